"""Formats that are one `torch.save` a sample: SpecForge, Model-Optimizer, EAGLE-1/2.

Invariant: ids, masks and layer ids are ours unchanged (id L is the output of layer L in all of them); the final state
is after the final norm but where Model-Optimizer's file says otherwise. EAGLE's trainer takes every file below its
folder for a sample, whatever its name, so its samples have a folder to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hiddenq.reader.exports.piece import Piece, States, read_states, sample_memory, save
from hiddenq.reader.exports.settings import ExportSettings, needs_final, needs_norm
from hiddenq.reader.index import Integers
from hiddenq.reader.run import Run

ROWS_PER_FOLDER = 2000
"""As SpecForge's own writer does."""


def file_pieces(run: Run, order: Integers, settings: ExportSettings) -> Iterator[Piece]:
    """One piece a sample."""
    for row, sample_id in enumerate(order.tolist()):
        yield Piece(
            key=_key(row, sample_id, settings),
            build=partial(_build, run, sample_id, settings),
            sample_ids=(sample_id,),
            num_bytes=sample_memory(run, sample_id),
        )


def _key(row: int, sample_id: int, settings: ExportSettings) -> str:
    first = row - row % ROWS_PER_FOLDER
    folder = f"rows_{first}-{first + ROWS_PER_FOLDER}"
    if settings.format == "modelopt":
        return f"{folder}/{sample_id}.pt"
    return f"{folder}/data_{row}.ckpt" if settings.format == "specforge" else f"data/data_{row}.ckpt"


def _build(run: Run, sample_id: int, settings: ExportSettings) -> bytes | None:
    states = read_states(run, sample_id, settings, norm=needs_norm(settings), final=needs_final(settings))
    if settings.format == "modelopt":
        return save(modelopt_fields(states, sample_id, prenorm=settings.prenorm))
    if settings.format == "eagle":
        assert states.final is not None
        return save({"input_ids": states.input_ids, "hidden_state": states.final, "loss_mask": states.loss_mask})
    if settings.method != "eagle3" and not _two_supervised(states.loss_mask):
        return None  # SpecForge's DFlash family raises on such a sample
    return save(specforge_fields(states, settings))


def modelopt_fields(states: States, sample_id: int, *, prenorm: bool) -> dict[str, object]:
    """A file of Model-Optimizer's `OfflineSupervisedDataset`."""
    assert states.final is not None
    return {
        "input_ids": states.input_ids,
        "hidden_states": states.final,
        "aux_hidden_states": states.aux.flatten(1),
        "loss_mask": states.loss_mask,
        "conversation_id": str(sample_id),
        "hidden_states_prenorm": prenorm,
    }


def specforge_fields(states: States, settings: ExportSettings) -> dict[str, object]:
    """A file of SpecForge's offline reader, for the chosen method."""
    fields: dict[str, object] = {"input_ids": states.input_ids, "loss_mask": states.loss_mask}
    aux_S_KH = states.aux.flatten(1)
    if settings.method == "eagle3":
        assert states.final is not None
        return fields | {"aux_hidden_state": aux_S_KH[None], "hidden_state": states.final[None]}
    fields["hidden_states"] = aux_S_KH
    if settings.method == "dspark":
        assert states.final is not None
        fields["target_last_hidden_states"] = states.final[None]
    return fields


def _two_supervised(loss_mask: torch.Tensor) -> bool:
    return bool((loss_mask[1:] * loss_mask[:-1]).any())
