"""A finding, and how it is shown.

Invariant: an `error` means that a start would fail or lose work, a `warning` that it would be slow, weak or fragile, an
`ok` that a thing was looked at and is well; nothing else decides whether a service starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    """What was found, in one line."""
    why: str = ""
    """Why it matters; empty for `ok`."""
    remedy: str = ""
    """The command or change that mends it; empty for `ok`."""


def ok(what: str) -> Finding:
    """A thing that is well."""
    return Finding(level="ok", what=what)


def warning(what: str, why: str, remedy: str) -> Finding:
    """A thing that makes a run slow, weak or fragile."""
    return Finding(level="warning", what=what, why=why, remedy=remedy)


def error(what: str, why: str, remedy: str) -> Finding:
    """A thing that makes a start fail, or loses work."""
    return Finding(level="error", what=what, why=why, remedy=remedy)


def gib(num_bytes: float) -> str:
    """`9.5 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def render(findings: Sequence[Finding]) -> str:
    """Findings for people: errors first, each with its reason and remedy; what is well as one line each."""
    order = {"error": 0, "warning": 1, "ok": 2}
    lines = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        lines.append(f"{finding.level:<8} {finding.what}")
        if finding.level != "ok":
            lines += [f"{'':<8}   why: {finding.why}", f"{'':<8}   do:  {finding.remedy}"]
    counts = {level: sum(finding.level == level for finding in findings) for level in order}
    lines.append(
        f"{_counted(counts['error'], 'error')}, {_counted(counts['warning'], 'warning')}, "
        f"{_counted(counts['ok'], 'thing')} well"
    )
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def exit_status(findings: Sequence[Finding]) -> int:
    """2 if anything is an error, else 0."""
    return 2 if any(finding.level == "error" for finding in findings) else 0
