"""What only shows when samples are held against each other.

Invariant: nothing here needs the model; the norms of a layer's states vary far less over samples than from layer to
layer, so a sample whose layers stand in another order stands out, and no two samples have the same states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hiddenq.contracts.run import RunConfig
from hiddenq.reader.checks.report import Findings
from hiddenq.reader.checks.shard import ShardOutcome

MIN_SAMPLES = 8
"""Fewer samples say nothing about what is usual."""
MIN_GAIN = 0.5
"""log2 units by which another order must fit better than the one stated."""


def check_norms(outcomes: Sequence[ShardOutcome], config: RunConfig, findings: Findings) -> None:
    """Samples whose norms by layer fit the run better with two layers exchanged."""
    norms = {sample_id: norm for outcome in outcomes for sample_id, norm in outcome.norms.items()}
    if len(norms) < MIN_SAMPLES:
        return
    table = np.stack(list(norms.values()))  # [samples, K+1]
    usual = np.median(table, axis=0)
    labels = [*(f"layer {layer}" for layer in config.target_layer_ids), "the final state"][: table.shape[1]]
    cost = np.abs(table[:, :, None] - usual[None, None, :])  # [samples, slot, layer]
    for first, second in itertools.combinations(range(table.shape[1]), 2):
        stated = cost[:, first, first] + cost[:, second, second]
        swapped = cost[:, first, second] + cost[:, second, first]
        for at in np.nonzero((stated - swapped > MIN_GAIN) & (swapped < 0.5 * stated))[0]:
            findings.add(
                "layer_order",
                f"sample {list(norms)[at]}",
                f"norms fit the run better with {labels[first]} and {labels[second]} exchanged",
            )


def check_repeats(outcomes: Sequence[ShardOutcome], findings: Findings) -> None:
    """States that stand under two sample ids, though the samples' sizes or tokens may differ."""
    seen: dict[bytes, int] = {}
    for outcome in outcomes:
        for sample_id, digest in outcome.digests.items():
            if (other := seen.setdefault(digest, sample_id)) != sample_id:
                findings.add("repeated_states", f"sample {sample_id}", f"has the very states of sample {other}")
