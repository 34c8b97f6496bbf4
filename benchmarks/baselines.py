"""How others do the same work with Transformers: what hiddenq is measured against, on the same model and samples.

`peer`: one sample at a time, all hidden states, logits, one file a sample, as in the usual scripts of drafter projects.
`scripts`: length-sorted batches with a mask, all hidden states, one file a batch, as hiddenq's ancestors did.

Shape legend: B rows, S padded tokens, K layers, H hidden size.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.workload import Workload

PEER_SAMPLES = 60
SCRIPT_BATCHES = 4
SCRIPT_BUDGET = 16384


def measure_peer(model: Any, workload: Workload, layers: list[int], out: Path, *, device: str) -> dict[str, float]:
    """Batch 1, all hidden states, logits, one file a sample."""
    rows = [torch.tensor([row]) for row in workload.rows()[:PEER_SAMPLES]]

    def run(samples: list[torch.Tensor]) -> None:
        for number, ids_BS in enumerate(samples):
            output = model(ids_BS.to(device), output_hidden_states=True)
            kept = torch.cat([output.hidden_states[layer + 1] for layer in layers], -1).squeeze(0).cpu()
            final = output.hidden_states[-1].squeeze(0).cpu()
            torch.save({"input_ids": ids_BS[0], "hidden_states": final, "aux": kept}, out / f"peer-{number}.pt")

    return _timed(run, rows, rows[:4], out, device, sum(row.numel() for row in rows))


def measure_scripts(model: Any, workload: Workload, layers: list[int], out: Path, *, device: str) -> dict[str, float]:
    """Length-sorted batches, a mask, all hidden states, one file a batch."""
    batches = _batches(workload.rows())

    def run(chosen: list[list[list[int]]]) -> None:
        for number, rows in enumerate(chosen):
            longest = max(map(len, rows))
            ids_BS = torch.zeros(len(rows), longest, dtype=torch.long)
            mask_BS = torch.zeros_like(ids_BS)
            for place, row in enumerate(rows):
                ids_BS[place, : len(row)] = torch.tensor(row)
                mask_BS[place, : len(row)] = 1
            output = model(
                ids_BS.to(device), attention_mask=mask_BS.to(device), output_hidden_states=True, logits_to_keep=1
            )
            kept_BSK = torch.cat([output.hidden_states[layer + 1] for layer in layers], -1).cpu()
            tensors = {str(place): kept_BSK[place, : len(row)].contiguous() for place, row in enumerate(rows)}
            save_file(tensors, out / f"batch-{number}.safetensors")

    tokens = sum(len(row) for rows in batches for row in rows)
    return _timed(run, batches, batches[:1], out, device, tokens)


def _batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """A spread of length-sorted batches."""
    batches: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=len):
        if batches[-1] and (len(batches[-1]) + 1) * len(row) > SCRIPT_BUDGET:
            batches.append([])
        batches[-1].append(row)
    return batches[:: max(1, len(batches) // SCRIPT_BATCHES)]


@torch.inference_mode()
def _timed(run: Any, work: Any, warm_up: Any, out: Path, device: str, num_tokens: int) -> dict[str, float]:
    out.mkdir(parents=True, exist_ok=True)
    try:
        run(warm_up)
        _wait(device)
        begun = time.monotonic()
        run(work)
        _wait(device)
        seconds = time.monotonic() - begun
    finally:
        shutil.rmtree(out)
    return {"num_tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
