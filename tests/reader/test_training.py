"""A small EAGLE-3 drafter learns from exported states, and can't from shuffled ones.

The invariant: what it must predict stands in the states of the right token alone (they foretell the token after next,
as a target's do), so a shift of ids, masks or states by one, or the states of other tokens, and it fails.

Shape legend: B samples, S tokens, K target layers, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu_worker.target_head import write_target_head
from hiddenq.reader import HiddenStatesStream, Sample, open_run
from hiddenq.reader.exports import ExportSettings, export
from hiddenq.storage import open_store
from tests.support.made_run import MadeRun, make_run
from tests.support.models import build_model, save_tiny_model, tiny_config
from tests.support.samples import both_states

VOCAB_SIZE, DRAFT_VOCAB_SIZE, HIDDEN_SIZE, LAYERS = 32, 24, 64, (1, 2, 4)
TARGET: dict[str, Any] = {"num_hidden_layers": 6, "vocab_size": VOCAB_SIZE, "initializer_range": 0.2}


@dataclass
class Data:
    """A run as an EAGLE-3 trainer holds it."""

    input_ids_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    aux_BSKH: torch.Tensor
    """The three target layers, side by side."""
    final_BSH: torch.Tensor
    """After the final norm."""


class Drafter(nn.Module):
    """EAGLE-3 in small: three layers' states fused to one; one decoder layer over it and the token just drawn."""

    def __init__(self, embedding: torch.Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(embedding.float())
        self.fuse = nn.Linear(len(LAYERS) * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN_SIZE) for _ in range(4))
        self.qkv = nn.Linear(2 * HIDDEN_SIZE, 3 * HIDDEN_SIZE, bias=False)
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE), nn.SiLU(), nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE)
        )
        self.head = nn.Linear(HIDDEN_SIZE, DRAFT_VOCAB_SIZE, bias=False)

    def forward(self, input_ids_BS: torch.Tensor, aux_BSKH: torch.Tensor) -> torch.Tensor:
        """Logits [B, S-1, D] of what the target will say at the next token."""
        fused = self.fuse(aux_BSKH[:, :-1])
        drawn = self.embed(input_ids_BS[:, 1:])
        query, key, value = self.qkv(torch.cat([self.norms[0](drawn), self.norms[1](fused)], -1)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = fused + self.out(attended)
        hidden = hidden + self.mlp(self.norms[2](hidden))
        logits: torch.Tensor = self.head(self.norms[3](hidden))
        return logits


@pytest.fixture(scope="module")
def run_with_head(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """A run whose states foretell: those of the target layers the token after next, the final state the next."""
    model_folder = save_tiny_model(tmp_path_factory.mktemp("target"), **TARGET)
    lm_head_VH = build_model(tiny_config("llama", **TARGET)).lm_head.weight.detach()
    generator = torch.Generator().manual_seed(7)
    mixing_KVH = torch.randn(len(LAYERS), VOCAB_SIZE, HIDDEN_SIZE, generator=generator)

    def states(_sample_id: int, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(len(LAYERS), len(input_ids), HIDDEN_SIZE, generator=generator)
        hidden_KSH = mixing_KVH[:, input_ids.roll(-2)] + 0.3 * noise
        return hidden_KSH.transpose(0, 1), lm_head_VH[input_ids.roll(-1)]

    made = make_run(
        tmp_path_factory.mktemp("run"),
        num_samples=96,
        min_length=24,
        max_length=24,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_layers=6,
        target_layer_ids=LAYERS,
        states=states,
        model=str(model_folder),
    )
    write_target_head(open_store(made.folder), made.config)
    return made


def exported(made: MadeRun, folder: Path) -> Data:
    """From the files of an export."""
    export(made.folder, ExportSettings(format="specforge", seed=0), folder)
    files = sorted(folder.rglob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("data_")))
    fields = [torch.load(path, weights_only=True) for path in files]
    return Data(
        torch.stack([each["input_ids"] for each in fields]),
        torch.stack([each["loss_mask"] for each in fields]),
        torch.cat([each["aux_hidden_state"] for each in fields]).float(),
        torch.cat([each["hidden_state"] for each in fields]).float(),
    )


def streamed(made: MadeRun, _folder: Path) -> Data:
    """From the run itself."""
    run = open_run(made.folder)

    def item(sample: Sample) -> tuple[torch.Tensor, ...]:
        hidden, final = both_states(sample)
        return sample.input_ids, sample.loss_mask, hidden.flatten(1).float(), run.target_head.post_norm(final).float()

    return Data(*map(torch.stack, zip(*map(item, HiddenStatesStream(run)), strict=True)))


def train(data: Data, made: MadeRun, t2d: torch.Tensor, steps: int = 60) -> tuple[float, float]:
    """(held-out loss before, after) a few dozen steps: KL divergence from the target over the draft vocabulary."""
    head = open_run(made.folder).target_head
    torch.manual_seed(0)
    drafter = Drafter(head.embedding)
    optimizer = torch.optim.Adam([each for each in drafter.parameters() if each.requires_grad], lr=5e-3)
    target_BSV = (data.final_BSH @ head.lm_head.float().T)[:, 1:]
    speaks_BS = (data.loss_mask_BS[:, 1:] == 1) & t2d[target_BSV.argmax(-1)]
    log_target_BSD = target_BSV[..., t2d].log_softmax(-1)

    def loss_of(rows: slice) -> torch.Tensor:
        logits = drafter(data.input_ids_BS[rows], data.aux_BSKH[rows])
        by_token = functional.kl_div(logits.log_softmax(-1), log_target_BSD[rows], reduction="none", log_target=True)
        return by_token.sum(-1)[speaks_BS[rows]].mean()

    held_out = slice(72, 96)
    with torch.no_grad():
        before = float(loss_of(held_out))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(slice(step % 6 * 12, step % 6 * 12 + 12)).backward()
        optimizer.step()
    with torch.no_grad():
        return before, float(loss_of(held_out))


@pytest.mark.parametrize("read", [exported, streamed])
def test_a_drafter_learns_from_the_states_and_not_from_shuffled_ones(
    run_with_head: MadeRun, tmp_path: Path, read: Callable[[MadeRun, Path], Data]
) -> None:
    data = read(run_with_head, tmp_path / "exported")
    settings = ExportSettings(format="specforge", draft_vocab_size=DRAFT_VOCAB_SIZE)
    export(run_with_head.folder, settings, tmp_path / "vocabulary")
    t2d = torch.load(tmp_path / "vocabulary/vocab_mapping.pt", weights_only=True)["t2d"]
    before, after = train(data, run_with_head, t2d)
    assert after < 0.5 * before, (before, after)

    states = data.aux_BSKH
    order = torch.randperm(states.shape[0] * states.shape[1], generator=torch.Generator().manual_seed(1))
    data.aux_BSKH = states.flatten(0, 1)[order].view_as(states)
    before, after = train(data, run_with_head, t2d)
    assert after > 0.9 * before, (before, after)

    data.aux_BSKH = states.roll(1, dims=1)
    before, after = train(data, run_with_head, t2d)
    assert after > 0.9 * before, ("states of the neighbour must not do", before, after)
