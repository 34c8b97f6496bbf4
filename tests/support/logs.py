"""What was logged, read by its fields.

Invariant: every record asked for is one of ours, a mapping; a text that another library logged is refused.
"""

from __future__ import annotations

from typing import Any

import pytest


def logged(caplog: pytest.LogCaptureFixture, words: str) -> list[dict[str, Any]]:
    """The records that have these words in them, in order."""
    found: list[dict[str, Any]] = []
    for record in caplog.records:
        fields: object = record.msg  # a text, says typeshed; structlog leaves a mapping
        if words in str(fields):
            assert isinstance(fields, dict), fields
            found.append(fields)
    return found
