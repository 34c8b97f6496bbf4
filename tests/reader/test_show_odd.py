"""`hiddenq sample` of a damaged sample: it is what one looks at then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hiddenq.reader import open_run, show_sample
from tests.reader.test_show import printed
from tests.support.made_run import MadeRun


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_layer_that_is_not_finite_is_said_so_and_hides_no_other(make: Callable[..., MadeRun], value: float) -> None:
    made = make(model="/nowhere/model")
    made.samples[0].hidden_states[:, 0] = value
    made.write_shards()
    made.finish()
    rows = [line for line in printed(show_sample(open_run(made.folder), 0)).splitlines() if "layer " in line]
    bad, good = rows[1:3]
    assert "not finite" in bad
    assert "█" in good
