"""What a verification says: findings, each with what to do about it, and what was looked at.

Invariant: a report is clean exactly when it holds no finding; a kind that fires a million times is counted in full but
kept only by its first few, so a report stays readable however broken the run is. What is nobody's business but its
owner's (a file of another kind beside the run's) is a warning and no finding.
"""

from __future__ import annotations

import threading
from typing import Literal

from pydantic import Field

from hiddenq.contracts.base import Frozen, Versioned
from hiddenq.contracts.wording import counted
from hiddenq.reader.remedies import MEND_BY_RUN, MEND_HEAD, RUN_AGAIN

FindingKind = Literal[
    "run_json",
    "manifest",
    "plan",
    "rejected",
    "dead_letter",
    "unfinished",
    "index",
    "missing_shard",
    "stray_object",
    "damaged_shard",
    "layout",
    "tokens",
    "non_finite",
    "zero_states",
    "final_state",
    "target_head",
    "layer_order",
    "repeated_states",
    "recompute",
]

TODO: dict[FindingKind, str] = {
    "run_json": "restore run.json from a copy, or extract into another location",
    "manifest": f"{RUN_AGAIN}: it writes the manifest anew from what is there",
    "plan": "restore tokens/ from a copy, or extract into another location",
    "rejected": "restore rejected.jsonl from a copy; the states themselves are not concerned",
    "dead_letter": f"see why with `hiddenq failed list`, mend it, `hiddenq failed retry`, then {RUN_AGAIN}",
    "unfinished": f"{RUN_AGAIN} to go on; verify again at its end",
    "index": f"delete index.parquet and manifest.json, then {RUN_AGAIN}: both are written anew",
    "missing_shard": f"{RUN_AGAIN}: only the missing batches are made",
    "stray_object": "move it away if it is yours, delete it if it is nobody's",
    "damaged_shard": MEND_BY_RUN,
    "layout": MEND_BY_RUN,
    "tokens": MEND_BY_RUN,
    "non_finite": MEND_BY_RUN + "; if it comes back, the model overflows in this dtype: use bfloat16 or float32",
    "zero_states": MEND_BY_RUN,
    "final_state": MEND_BY_RUN,
    "target_head": MEND_HEAD,
    "layer_order": "check with `--recompute`; if it agrees, these samples are just unusual",
    "repeated_states": "check with `--recompute`; then " + MEND_BY_RUN,
    "recompute": "check that --model is the run's model; if so, " + MEND_BY_RUN,
}
MAX_KEPT = 20
"""Findings of one kind, or foreign objects, that are kept; the rest is counted."""


class Finding(Frozen):
    """One thing that is not as it should be."""

    kind: FindingKind
    where: str
    """Object, batch or sample."""
    text: str
    """What was expected and what was found."""
    todo: str


class Recomputed(Frozen):
    """What recomputing samples from the model showed."""

    num_samples: int
    tolerance: float
    """The largest relative difference that is accepted."""
    worst_difference: float
    """Over samples and layers: the 95th percentile over tokens of |stored - recomputed| / |recomputed|."""
    worst_sample: int
    worst_layer: str
    model: str


class VerifyReport(Versioned):
    """The outcome of a verification."""

    schema_version: int = 1
    uri: str
    run: str
    findings: tuple[Finding, ...] = ()
    """The first findings of each kind."""
    num_findings: dict[str, int] = Field(default_factory=dict)
    """All findings by kind."""
    foreign_objects: tuple[str, ...] = ()
    """The first objects beside the run's that are none of it; a warning."""
    num_foreign_objects: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_shards: int = 0
    num_bytes: int = 0
    """Bytes of shards read, each once."""
    seconds: float = 0.0
    recomputed: Recomputed | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def lines(self) -> list[str]:
        """The report for a terminal, one string a line."""
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e6
        lines = [
            f"run {self.run} at {self.uri}",
            f"read {counted(self.num_samples, 'sample')}, {counted(self.num_tokens, 'token')} in "
            f"{counted(self.num_shards, 'shard')}: "
            f"{self.num_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:,.0f} MB/s)",
        ]
        if again := self.recomputed:
            lines.append(
                f"recomputed {again.num_samples} of them with {again.model}: worst difference "
                f"{again.worst_difference:.2e} (sample {again.worst_sample}, {again.worst_layer}; "
                f"up to {again.tolerance:.0e} is accepted)"
            )
        for kind, count in self.num_findings.items():
            shown = [finding for finding in self.findings if finding.kind == kind]
            lines += [f"{kind}: {finding.where}: {finding.text}" for finding in shown]
            if count > len(shown):
                lines.append(f"{kind}: and {count - len(shown):,} more")
            lines.append(f"  -> {shown[0].todo}")
        lines += [f"warning: {key}: no object of this run; it is left alone" for key in self.foreign_objects]
        if (num_more := self.num_foreign_objects - len(self.foreign_objects)) > 0:
            lines.append(f"warning: and {num_more:,} more")
        if self.ok:
            lines.append("verified: every sample once, every byte as recorded")
        else:
            count = sum(self.num_findings.values())
            lines.append(f"NOT VERIFIED: {counted(count, 'finding')}")
        return lines


class Findings:
    """Collects findings from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kept: list[Finding] = []
        self.counts: dict[str, int] = {}
        self.foreign: list[str] = []
        self.num_foreign = 0

    def add(self, kind: FindingKind, where: str, text: str, todo: str | None = None) -> None:
        """Count a finding, and keep it if it is among the first of its kind."""
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if self.counts[kind] <= MAX_KEPT:
                self.kept.append(Finding(kind=kind, where=where, text=text, todo=todo or TODO[kind]))

    def note_foreign(self, key: str) -> None:
        """Count an object that is none of the run's and lies beside them."""
        with self._lock:
            self.num_foreign += 1
            if self.num_foreign <= MAX_KEPT:
                self.foreign.append(key)
