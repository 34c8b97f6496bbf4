"""The reference job on paper: 913,786 samples through a 27B model, five layers, on 8 GPUs; and larger fleets.

    python -m benchmarks.reference_job --tokens-per-second 11060 --redis-milliseconds 0.47 --start-seconds 94

The plan is the producer's own, cut from as many log-normal lengths. The fleet is simulated in virtual time: each worker
claims ahead, one batch after another, longest first; Redis serves one batch after another; some workers are slow, some
die, lose the batch they are in to its lease, and start anew. Rate, Redis time and start are measured elsewhere (by
`benchmarks/extraction.py` and `benchmarks/queue.py`) and given here. Fleets above `--gpus` get as much work a GPU as
the reference job gives to 8, up to 100 batches each. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage import StoreSettings
from hiddenq.storage.s3_multipart import part_sizes
from producer.batching import BatchLimits, RotaryLimits, cut_batches
from producer.order import SampleOrder, iterate_lengths

REFERENCE = ShardFormat(
    target_layer_ids=(1, 16, 31, 46, 61),
    hidden_size=5120,
    model_dtype="bfloat16",
    storage_dtype="bfloat16",
    final_hidden_state=False,
)
GPUS_PER_HOST = 8
MOST_BATCHES_PER_GPU = 100
STRAGGLERS, SLOWNESS = 0.02, 2.5
"""Share of slow workers, and how many times longer they take."""
JITTER = 0.05
"""Relative standard deviation of a batch's time."""
RESTART_NOTICED_SECONDS = 30.0
"""A dead worker's lease."""
CONNECTIONS_PER_WORKER, CONNECTIONS_PER_HOST = 2, 6


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a batch costs, as measured."""

    tokens_per_second: float
    """Padded tokens a second of one GPU."""
    redis_seconds: float
    """Processor time of Redis a batch, from its enqueue to its commit."""
    start_seconds: float
    """From a worker's start to its first batch."""
    hours_between_deaths: float
    """Mean, of one worker."""


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-second", type=float, required=True, help="of one GPU, measured")
    parser.add_argument("--redis-milliseconds", type=float, required=True, help="of Redis's core a batch, measured")
    parser.add_argument("--start-seconds", type=float, required=True, help="process start to first batch, measured")
    parser.add_argument("--samples", type=int, default=913_786)
    parser.add_argument("--mean-tokens", type=float, default=195.0, help="10 MB a sample: 9 TB in all")
    parser.add_argument("--hours-between-deaths", type=float, default=24.0, help="of one worker; an assumption")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096])
    options = parser.parse_args()
    costs = Costs(
        tokens_per_second=options.tokens_per_second,
        redis_seconds=options.redis_milliseconds / 1000,
        start_seconds=options.start_seconds,
        hours_between_deaths=options.hours_between_deaths,
    )
    plan = plan_job(options.samples, options.mean_tokens)
    fleets = [simulate(plan, num_gpus, costs) for num_gpus in options.gpus]
    print(json.dumps({"job": describe(plan), "fleets": fleets}, indent=2))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Padded tokens and bytes of each batch, longest samples first."""

    num_samples: int
    num_tokens: int
    padded: list[int]
    num_bytes: list[int]


def plan_job(num_samples: int, mean_tokens: float, sigma: float = 0.9) -> Plan:
    """The producer's batches for log-normal lengths of a given mean."""
    chance = np.random.default_rng(0)
    lengths = chance.lognormal(np.log(mean_tokens) - sigma**2 / 2, sigma, num_samples)
    tokens = np.clip(lengths, 16, 4096).astype(np.int64)
    rotary = RotaryLimits()
    order = SampleOrder(lambda: Path("/nowhere"))
    order.append_lengths(tokens)
    limits = BatchLimits.of(token_budget=32768, max_shard_bytes=1 << 30, shard=REFERENCE, rotary=rotary)
    batches = list(cut_batches(iterate_lengths(order.chunks(None, rotary)), limits))
    return Plan(
        num_samples=num_samples,
        num_tokens=int(tokens.sum()),
        padded=[batch.num_samples * batch.padded_length for batch in batches],
        num_bytes=[batch.num_tokens * REFERENCE.bytes_per_token for batch in batches],
    )


def describe(plan: Plan) -> dict[str, Any]:
    """The job's size."""
    return {
        "num_samples": plan.num_samples,
        "num_tokens": plan.num_tokens,
        "padding_ratio": round(sum(plan.padded) / plan.num_tokens, 5),
        "num_batches": len(plan.padded),
        "num_objects": len(plan.padded),
        "terabytes": round(sum(plan.num_bytes) / 1e12, 2),
        "megabytes_per_object": round(sum(plan.num_bytes) / len(plan.num_bytes) / 1e6),
    }


def simulate(plan: Plan, num_gpus: int, costs: Costs, seed: int = 0) -> dict[str, Any]:
    """Run a fleet in virtual time."""
    chance = random.Random(seed)
    work = _work_of(plan, num_gpus)
    slowness = [SLOWNESS if chance.random() < STRAGGLERS else 1.0 for _ in range(num_gpus)]
    redis_free = idle = lost = busy = 0.0
    num_deaths = 0
    free_at = [(0.0, 0.0, gpu) for gpu in range(num_gpus)]  # when it is free, when its claimed batch is there
    heapq.heapify(free_at)
    ready: list[tuple[float, int]] = []  # batches of the dead, from when they can be claimed again
    first_without, ended, place = None, 0.0, 0
    while place < len(work) or ready:
        now, claimed_at, gpu = heapq.heappop(free_at)
        if ready and (ready[0][0] <= now or place == len(work)):
            since, padded = heapq.heappop(ready)
            begins = max(now, claimed_at, since)
        else:
            padded, place = work[place], place + 1
            begins = max(now, claimed_at)
        if place == len(work) and first_without is None:
            first_without = begins
        if first_without is None:
            idle += begins - now
        seconds = padded / costs.tokens_per_second * slowness[gpu] * max(0.5, chance.gauss(1, JITTER))
        redis_free = max(redis_free, begins) + costs.redis_seconds
        if chance.random() < seconds / (costs.hours_between_deaths * 3600):
            num_deaths += 1
            died = begins + seconds * chance.random()
            lost += died - begins
            heapq.heappush(ready, (died + RESTART_NOTICED_SECONDS, padded))
            heapq.heappush(free_at, (died + costs.start_seconds, died + costs.start_seconds, gpu))
            continue
        busy += seconds
        ended = max(ended, begins + seconds)
        heapq.heappush(free_at, (begins + seconds, redis_free, gpu))
    num_bytes = sum(plan.num_bytes) / len(plan.num_bytes) * len(work)
    hosts = max(1, num_gpus // GPUS_PER_HOST)
    return {
        "gpus": num_gpus,
        "share_of_the_job_per_gpu": round(len(work) / num_gpus / (len(plan.padded) / 8), 3),
        "batches": len(work),
        "hours_with_start": round((ended + costs.start_seconds) / 3600, 3),
        "gpu_hours": round((ended + costs.start_seconds) * num_gpus / 3600, 1),
        "batches_per_second": round(len(work) / ended, 1),
        "redis_core_share": round(len(work) * costs.redis_seconds / ended, 3),
        "idle_share_waiting_for_redis": round(idle / (idle + busy), 4),
        "tail_seconds": round(ended - (first_without or ended), 1),
        "deaths": num_deaths,
        "lost_share": round(lost / busy, 5),
        "store_gigabytes_per_second": round(num_bytes / ended / 1e9, 2),
        "host_gigabytes_per_second": round(num_bytes / ended / 1e9 / hosts, 2),
        "store_requests_per_second": round(len(work) * _requests(plan) / ended),
        "redis_connections": num_gpus * CONNECTIONS_PER_WORKER + hosts * CONNECTIONS_PER_HOST,
    }


def _requests(plan: Plan) -> float:
    """Requests to an S3 store a shard: its parts, and the upload's begin and end."""
    settings = StoreSettings()
    return sum(len(part_sizes(size, settings.part_bytes)) + 2 for size in plan.num_bytes) / len(plan.num_bytes)


def _work_of(plan: Plan, num_gpus: int) -> list[int]:
    """Padded tokens of the batches that a fleet gets: the job itself up to 8 GPUs, beyond that as much a GPU."""
    if num_gpus <= GPUS_PER_HOST:
        return plan.padded
    wanted = num_gpus * min(MOST_BATCHES_PER_GPU, len(plan.padded) // GPUS_PER_HOST)
    places = np.linspace(0, len(plan.padded) - 1, wanted).astype(int)
    return [plan.padded[place] for place in places]


if __name__ == "__main__":
    main()
