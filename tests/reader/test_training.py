"""A small drafter learns from exported states, and can't from shuffled ones.

The invariant: what it must predict stands in the states of the right token alone (the token after next, as a target's
states foretell what it will say), so a shift of ids, masks or states by one, or states of another sample, and it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hiddenq.reader import HiddenStatesStream, Sample
from hiddenq.reader.exports import ExportSettings, export
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]
VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 32, 64, 3
Item = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""input_ids [S], loss_mask [S], states [S, K·H]"""


class Drafter(nn.Module):
    """EAGLE-3's shape: three layers' states fused to one, beside the embedding of the token that was just drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Linear(NUM_LAYERS * HIDDEN_SIZE, HIDDEN_SIZE)
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.head = nn.Sequential(
            nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE), nn.SiLU(), nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
        )

    def forward(self, input_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits for the token after the next at each position but the last two."""
        fused = self.fuse(states[:-2].float())
        logits: torch.Tensor = self.head(torch.cat([fused, self.embed(input_ids[1:-1])], dim=-1))
        return logits


def foretelling_states(_sample_id: int, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States that hold, in a mixed form and with noise, the token after next."""
    generator = torch.Generator().manual_seed(7)
    mixing_KVH = torch.randn(NUM_LAYERS, VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    after_next = torch.cat([input_ids[2:], input_ids[:2]])
    noise = torch.randn(NUM_LAYERS, len(input_ids), HIDDEN_SIZE, generator=generator)
    hidden_KSH = mixing_KVH[:, after_next] + 0.3 * noise
    return hidden_KSH.transpose(0, 1), hidden_KSH[-1]


def train(items: list[Item], steps: int = 60) -> tuple[float, float]:
    """(held-out loss before, after) a few dozen steps."""
    torch.manual_seed(0)
    drafter = Drafter()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    train_items, held_out = items[: len(items) * 3 // 4], items[len(items) * 3 // 4 :]

    def loss_of(batch: list[Item]) -> torch.Tensor:
        losses = [
            nn.functional.cross_entropy(drafter(ids, states), ids[2:], reduction="none")[mask[2:] == 1]
            for ids, mask, states in batch
        ]
        return torch.cat(losses).mean()

    with torch.no_grad():
        before = float(loss_of(held_out))
    for step in range(steps):
        batch = [train_items[(step * 8 + row) % len(train_items)] for row in range(8)]
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    with torch.no_grad():
        return before, float(loss_of(held_out))


def exported_items(made: MadeRun, folder: Path) -> list[Item]:
    export(made.folder, ExportSettings(format="specforge", method="dflash", seed=0), folder)
    files = sorted(folder.rglob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("data_")))
    fields = [torch.load(path, weights_only=True) for path in files]
    return [(each["input_ids"], each["loss_mask"], each["hidden_states"]) for each in fields]


def streamed_items(made: MadeRun, _folder: Path) -> list[Item]:
    def item(sample: Sample) -> Item:
        assert sample.hidden_states is not None
        return sample.input_ids, sample.loss_mask, sample.hidden_states.flatten(1)

    return [item(sample) for sample in HiddenStatesStream(made.folder)]


@pytest.mark.parametrize("read", [exported_items, streamed_items])
def test_a_drafter_learns_from_the_states_and_not_from_shuffled_ones(
    make: Make, tmp_path: Path, read: Callable[[MadeRun, Path], list[Item]]
) -> None:
    made = make(
        num_samples=96,
        min_length=24,
        max_length=24,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        target_layer_ids=(1, 2, 4),
        states=foretelling_states,
    )
    items = read(made, tmp_path / "exported")
    before, after = train(items)
    assert after < 0.5 * before, (before, after)

    generator = torch.Generator().manual_seed(1)
    shuffled = [(ids, mask, states[torch.randperm(len(ids), generator=generator)]) for ids, mask, states in items]
    before, after = train(shuffled)
    assert after > 0.9 * before, (before, after)

    shifted = [(ids, mask, states.roll(1, dims=0)) for ids, mask, states in items]
    before, after = train(shifted)
    assert after > 0.9 * before, ("states of the neighbour must not do", before, after)
