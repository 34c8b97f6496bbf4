"""One of a thing is never told as several."""

from __future__ import annotations

import pytest

from hiddenq.contracts.wording import counted


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(0, "box", "0 boxes"), (1, "dead letter", "1 dead letter"), (2, "batch", "2 batches"), (9999, "row", "9,999 rows")],

def test_a_number_and_its_noun_agree(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
