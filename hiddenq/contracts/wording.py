"""Numbers with their nouns, as people read them.

Invariant: one of a thing is never told as several.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 batch`, `12,345 dead letters`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"
