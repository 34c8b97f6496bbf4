"""Runs whose store refuses this worker although it let it in before.

Invariant: what a store refuses in mid-run (permissions or credentials that someone changed, and may change back) costs
no batch an attempt and ends no worker, and stops it only while every run that it serves waits.
"""

from __future__ import annotations

from collections.abc import Collection

from hiddenq.delivery import refusals


class Refusals(refusals.Refusals):
    """Those of one worker, beside the runs that it serves."""

    def all_wait(self, runs: Collection[str]) -> bool:
        """Whether none of these runs is to be tried now."""
        return all(self.seconds_left(run) for run in runs)

    def reason(self, runs: Collection[str]) -> str:
        """Why none of these runs can be served; "" if one of them can."""
        reasons = self.reasons()
        found = [reasons.get(run, "") for run in runs]
        return found[0] if found and all(found) else ""
