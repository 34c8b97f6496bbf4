"""Rotary scaling that looks at the longest position: clamped positions keep padding out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gpu_worker.decoder import Decoder
from gpu_worker.extraction import Extractor
from tests.gpu_worker.conftest import difference, extract, shard_format, tiny_decoder, token_rows

LIMIT = 30


def dynamic() -> Decoder:
    return tiny_decoder(
        "llama",
        max_position_embeddings=LIMIT,
        rope_parameters=_Frozen(rope_type="dynamic", factor=4.0, rope_theta=10000.0),
    )


def longrope() -> Decoder:
    return tiny_decoder(
        "phi3",
        max_position_embeddings=4 * LIMIT,
        original_max_position_embeddings=LIMIT,
        rope_parameters=_Frozen(
            rope_type="longrope",
            rope_theta=10000.0,
            short_factor=[1.0] * 8,
            long_factor=[2.0 + step for step in range(8)],
            original_max_position_embeddings=LIMIT,
        ),
    )


def yarn() -> Decoder:
    return tiny_decoder(
        "llama",
        max_position_embeddings=4 * LIMIT,
        rope_parameters=_Frozen(
            rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=LIMIT
        ),
    )


class _Frozen(dict[str, object]):
    """A mapping that may be an argument of a cached function."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(sorted(self.items(), key=str)))


def _worst(decoder: Decoder, lengths: Sequence[int], padded_length: int) -> float:
    extractor = Extractor(decoder, shard_format(range(4)))
    rows = token_rows(lengths)
    together = extract(extractor, rows, padded_length=padded_length).states
    found = max(difference(mine, extract(extractor, [row]).states[0]) for row, mine in zip(rows, together, strict=True))
    extractor.close()
    return found


@pytest.mark.parametrize("make", [dynamic, longrope, yarn])
@pytest.mark.parametrize("lengths", [(29, 20), (29, 3)])
def test_rounding_the_length_up_over_the_limit_changes_nothing(
    make: Callable[[], Decoder], lengths: tuple[int, int]
) -> None:
    assert _worst(make(), lengths, 32) < 1e-5


@pytest.mark.parametrize("make", [dynamic, longrope, yarn])
def test_rows_on_one_side_of_the_limit_are_exact(make: Callable[[], Decoder]) -> None:
    decoder = make()
    assert _worst(decoder, (28, 12, 5), 28) < 1e-5
    if make is not dynamic:  # above the limit a dynamic scale is each length's own
        assert _worst(decoder, (90, 60, 41), 96) < 1e-5


def test_rows_of_one_length_above_a_dynamic_limit_are_exact() -> None:
    assert _worst(dynamic(), (60, 60, 60), 64) < 1e-5


@pytest.mark.parametrize("make", [dynamic, longrope, yarn])
def test_a_batch_after_a_longer_one_is_exact(make: Callable[[], Decoder]) -> None:
    extractor = Extractor(make(), shard_format(range(4)))
    rows = {length: token_rows([length]) for length in (40, 60, 90, 12)}
    first = {length: extract(_fresh(make), one).states[0] for length, one in rows.items()}
    for length in (90, 60, 40, 12):  # as a plan orders them
        assert difference(extract(extractor, rows[length]).states[0], first[length]) < 1e-6
    extractor.close()


def _fresh(make: Callable[[], Decoder]) -> Extractor:
    """An extractor whose model has run nothing longer than the probe."""
    tiny_decoder.cache_clear()
    return Extractor(make(), shard_format(range(4)))


def test_yarn_rows_on_both_sides_of_the_limit_are_exact() -> None:
    assert _worst(yarn(), (90, 12), 96) < 1e-5


@pytest.mark.parametrize("make", [dynamic, longrope])
def test_what_the_plan_keeps_apart_would_indeed_differ(make: Callable[[], Decoder]) -> None:
    """If this fails, the plan's rule can go."""
    assert _worst(make(), (90, 20), 90) > 1e-4
