"""`hiddenq drain`, `forget`, `cancel`: what is named must be there, or a line says what is."""

from __future__ import annotations

import pytest

from tests.delivery.conftest import Bench
from tests.support.command import exit_status


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("drain", "node9"), "hiddenq: node9: no such host; Redis knows h\n"),
        (("forget", "node9"), "hiddenq: node9: no such host; Redis knows h\n"),
        (("cancel", "other"), "hiddenq: other: Redis knows no such run; it knows run\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_host_or_run_that_nobody_knows_is_one_line_and_exit_2(
    command: tuple[str, str],
    line: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", bench.server.password)
    bench.enqueue(1)
    bench.gpu_worker()
    assert exit_status([*command, "--redis-url", bench.server.bare_url]) == 2
    assert capsys.readouterr().err == line
    assert not bench.client.exists("hiddenq:drained")


def test_a_drained_host_that_has_left_can_still_be_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", bench.server.password)
    bench.gpu_worker().close(withdraw=True)
    bench.client.sadd("hiddenq:drained", "h")
    assert exit_status(["forget", "h", "--redis-url", bench.server.bare_url]) == 0
    assert capsys.readouterr().out == "0 workers of h forgotten\n"
    assert not bench.client.exists("hiddenq:drained")
