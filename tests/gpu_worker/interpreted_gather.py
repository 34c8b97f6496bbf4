"""Compares the Triton gather, interpreted on the CPU, with the plain one; run as a program by test_gather."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from gpu_worker import gather_triton
from gpu_worker.gather import columns_of
from tests.gpu_worker.conftest import shard_format
from tests.gpu_worker.test_gather import gathered, made_up

for storage in ("bfloat16", "float16", "float32"):
    wanted = shard_format((1, 3, 2), storage_dtype=storage)
    states = made_up(wanted)
    if storage == "bfloat16":  # the interpreter cuts where a GPU rounds
        states = [states_BSH.bfloat16() for states_BSH in states]
    expected = gathered(wanted, states)
    found = gathered(wanted, states)
    found.payload.fill_(0)
    for index, column in enumerate(columns_of(wanted)):
        gather_triton.store_states_cuda(column, index, states[index], found)
    ids = torch.arange(48).view(4, 12)
    gather_triton.store_tokens_cuda(ids, ids.remainder(2).to(torch.uint8), found.bytes_per_token - 16, found)
    assert torch.equal(found.payload, expected.payload), storage
    assert torch.equal(found.nonfinite_CB, expected.nonfinite_CB), storage
