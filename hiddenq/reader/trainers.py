"""Train from the store without an export: datasets that trainers take in place of their own.

Invariant: an item is what the trainer's own dataset makes of the exported file, key by key; both are made from the same
functions, and the tests hold one against the other. Neither trainer is imported here.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from hiddenq.reader.exports.piece import read_states
from hiddenq.reader.exports.settings import ExportSettings, check_settings, needs_norm
from hiddenq.reader.exports.speculators import slots
from hiddenq.reader.run import Run

IGNORED_LABEL = -100


class SpeculatorsDataset(Dataset[dict[str, torch.Tensor]]):
    """In place of speculators' `ArrowDataset`: give it to their data loader."""

    def __init__(
        self, run: Run, *, sample_ids: Sequence[int] | None = None, hidden_states_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Take a run; `hidden_states_dtype` is what their collate function casts to."""
        self._settings = ExportSettings(format="speculators")
        check_settings(self._settings, run)
        self.run = run
        self.sample_ids = list(run) if sample_ids is None else list(sample_ids)
        self.hidden_states_dtype = hidden_states_dtype
        self.approx_lengths = [int(run.lengths[run.index.position(sample_id)]) for sample_id in self.sample_ids]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        hidden_SKH = slots(self.run, self.sample_ids[position], self._settings)
        input_ids, loss_mask = self.run.read_tokens(self.sample_ids[position])
        return {
            "hidden_states": hidden_SKH[:, :-1].flatten(1),
            "input_ids": input_ids,
            "verifier_last_hidden_states": hidden_SKH[:, -1],
            "loss_mask": loss_mask,
            "lengths": torch.tensor([len(input_ids)], device="cpu"),
            "position_ids": torch.arange(len(input_ids), device="cpu"),
        }


class SpeculatorsTransfer:
    """In place of speculators' `FileTransfer`: for a dataset that was exported with `--link`."""

    def __init__(self, run: Run, sample_ids: Sequence[int]) -> None:
        """Take a run and the sample of each row (`sample_ids.npy` of the export)."""
        self._run = run
        self._sample_ids = [int(sample_id) for sample_id in sample_ids]
        self._settings = ExportSettings(format="speculators")

    def setup(self) -> None:
        """Nothing to set up: the store is opened in each process that reads."""

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """The row's states and tokens; None for a row that the dataset has not."""
        if not 0 <= file_idx < len(self._sample_ids):
            return None
        sample_id = self._sample_ids[file_idx]
        token_ids, _ = self._run.read_tokens(sample_id)
        return {"hidden_states": slots(self._run, sample_id, self._settings), "token_ids": token_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Nothing is generated: every row is in the run."""

    def delete(self, handle: str) -> None:
        """Nothing is deleted from a run."""


class ModelOptimizerDataset(Dataset[dict[str, Any]]):
    """In place of Model-Optimizer's `OfflineSupervisedDataset`: works with its `EagleOfflineDataCollator`."""

    def __init__(
        self,
        run: Run,
        *,
        sample_ids: Sequence[int] | None = None,
        answer_only_loss: bool = True,
        prenorm: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take a run.

        Args:
            answer_only_loss: use the loss mask; else every token counts, as their default is.
            prenorm: give the final state before the final norm, and say so (their DFlash honours it).
            dtype: of the states; None for the stored one.
        """
        self._settings = ExportSettings(format="modelopt", prenorm=prenorm)
        check_settings(self._settings, run)
        self.run = run
        self.sample_ids = list(run) if sample_ids is None else list(sample_ids)
        self._answer_only_loss = answer_only_loss
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, position: int) -> dict[str, Any]:
        norm = needs_norm(self._settings)
        states = read_states(self.run, self.sample_ids[position], self._settings, norm=norm, final=True)
        assert states.final is not None
        labels = torch.full_like(states.input_ids, IGNORED_LABEL)
        labels[:-1] = states.input_ids[1:]
        ones = torch.ones_like(states.input_ids)
        return {
            "input_ids": states.input_ids,
            "base_model_hidden_states": states.final.to(self._dtype or states.final.dtype),
            "aux_hidden_states": states.aux.flatten(1).to(self._dtype or states.aux.dtype),
            "attention_mask": ones,
            "loss_mask": states.loss_mask if self._answer_only_loss else ones.clone(),
            "labels": labels,
            "base_hidden_prenorm": self._settings.prenorm,
        }
