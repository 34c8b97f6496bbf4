"""Numbers as people read them."""

from __future__ import annotations

import pytest

from hiddenq.monitor import format_bytes, format_rate, format_seconds, format_share
from hiddenq.monitor.texts import format_time


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (9 << 40, "9.0 TiB"), (5000 << 40, "5000.0 TiB")],
)
def test_bytes(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (-0.01, "0.0s"),
        (7.23, "7.2s"),
        (59.6, "60s"),
        (306, "5m 06s"),
        (14_700, "4h 05m"),
        (273_600, "3d 4h"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.00"), (0.214, "0.21"), (34.53, "34.5"), (12_345.6, "12,346")])
def test_rates_have_three_figures(value: float, text: str) -> None:
    assert format_rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.1234, "12.3 %"), (0.99999, "99.9 %"), (1.0, "100 %")])
def test_a_share_is_100_only_when_all_is_done(value: float | None, text: str) -> None:
    assert format_share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1_764_475_500.0, "2025-11-30 04:05 UTC"),
        (4e11, "after the year 9999"),
        (1e18, "after the year 9999"),
    ],
)
def test_an_end_that_is_ages_away_is_said_and_not_computed(value: float | None, text: str) -> None:
    assert format_time(value) == text
