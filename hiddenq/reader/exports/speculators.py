"""speculators: a dataset folder that `datasets.load_from_disk` opens, and one safetensors file a row.

Invariant: row r of the dataset and `hidden_states/hs_{r}.safetensors` hold the same sample, in every split that their
loader makes, since it counts rows of the whole dataset; `sample_ids.npy` says which sample a row is. The last slot of
`hidden_states` is the state before the final norm: their trainer applies the verifier's norm itself.

Layout of the folder: as `datasets` 4 and later write it (Arrow stream files, `state.json`, `dataset_info.json`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save as save_safetensors

from hiddenq.reader.exports.piece import Piece, read_states, sample_memory
from hiddenq.reader.exports.settings import ExportSettings
from hiddenq.reader.index import Integers
from hiddenq.reader.run import Run

ROWS_PER_PART = 2000
FP8_MAX = 448.0
_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
_NUMBER = {"dtype": "int64", "_type": "Value"}
_FEATURES: dict[str, Any] = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": _NUMBER, "sample_id": _NUMBER}
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("sample_id", pa.int64()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def speculators_pieces(run: Run, order: Integers, settings: ExportSettings) -> Iterator[Piece]:
    """The states of each row (unless they stay in the run), then the parts of the dataset, then what names them."""
    if not settings.link:
        for row, sample_id in enumerate(order.tolist()):
            yield Piece(
                key=f"hidden_states/hs_{row}.safetensors",
                build=partial(_states_file, run, sample_id, settings),
                sample_ids=(sample_id,),
                num_bytes=sample_memory(run, sample_id),
            )
    num_parts = max(1, -(-len(order) // ROWS_PER_PART))
    names = [f"data-{part:05d}-of-{num_parts:05d}.arrow" for part in range(num_parts)]
    for part, name in enumerate(names):
        ids = order[part * ROWS_PER_PART : (part + 1) * ROWS_PER_PART].tolist()
        yield Piece(key=name, build=partial(_dataset_part, run, ids))
    yield Piece(key="dataset_info.json", build=lambda: json.dumps({"features": _FEATURES}, indent=2).encode())
    yield Piece(key="state.json", build=lambda: _state(names, run, order))


def slots(run: Run, sample_id: int, settings: ExportSettings) -> torch.Tensor:
    """[S, K+1, H]: the target layers, then the last layer's output before the final norm."""
    states = read_states(run, sample_id, settings, norm=False, final=True)
    assert states.final is not None
    final_S1H = states.final[:, None].to(states.aux.dtype)
    return torch.cat([states.aux, final_S1H], dim=1)


def _states_file(run: Run, sample_id: int, settings: ExportSettings) -> bytes:
    hidden_SKH = slots(run, sample_id, settings)
    token_ids, _ = run.read_tokens(sample_id)
    tensors = {"hidden_states": hidden_SKH, "token_ids": token_ids}
    if settings.dtype == "float8_e4m3fn":
        # One scale a token over all its layers, as their FP8 transfer multiplies it back.
        scales_S11 = (hidden_SKH.float().abs().amax((1, 2), keepdim=True) / FP8_MAX).clamp(min=1e-12)
        tensors["hidden_states"] = (hidden_SKH.float() / scales_S11).to(torch.float8_e4m3fn)
        tensors["hidden_states_scales"] = scales_S11
    return save_safetensors({name: tensor.clone() for name, tensor in tensors.items()})


def _dataset_part(run: Run, sample_ids: list[int]) -> bytes:
    rows = [run.read_tokens(sample_id) for sample_id in sample_ids]
    columns = {
        "input_ids": [ids.numpy() for ids, _ in rows],
        "loss_mask": [mask.numpy() for _, mask in rows],
        "seq_len": [len(ids) for ids, _ in rows],
        "sample_id": sample_ids,
    }
    table = pa.Table.from_pydict(columns, schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _state(names: list[str], run: Run, order: Integers) -> bytes:
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": hashlib.blake2b(run.config.plan_digest.encode() + order.tobytes(), digest_size=8).hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    return json.dumps(state, indent=2).encode()
