"""Numbers with their nouns and paths, as people read them.

Invariant: one of a thing is never told as several, and what is shown is text that any terminal and JSON take.
"""

from __future__ import annotations

import os
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 batch`, `12,345 dead letters`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def shown(path: str | Path) -> str:
    """A path as text that JSON and people take: bytes of it that are no UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")
