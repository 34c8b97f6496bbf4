"""One of a thing is never told as several."""

from __future__ import annotations

import pytest

from hiddenq.contracts.wording import counted

SAID = {
    (0, "box"): "0 boxes",
    (1, "dead letter"): "1 dead letter",
    (2, "batch"): "2 batches",
    (12345, "row"): "12,345 rows",
}


@pytest.mark.parametrize(("number", "noun"), SAID)
def test_a_number_and_its_noun_agree(number: int, noun: str) -> None:
    assert counted(number, noun) == SAID[number, noun]
