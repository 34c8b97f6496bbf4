"""What verify says and how the command ends; that it reads each byte once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreRefused, UsageError
from hiddenq.reader import VerifyReport, verify
from hiddenq.reader.checks.report import TODO, FindingKind
from hiddenq.storage import LocalStore
from tests.support.command import exit_status
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]


def test_every_byte_of_shards_and_tokens_is_asked_for_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    asked: dict[str, list[tuple[int, int]]] = {}
    whole = LocalStore.get_bytes

    def counted(self: LocalStore, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = whole(self, key, begin, end)
        asked.setdefault(key, []).append((begin, begin + len(data)))
        return data

    monkeypatch.setattr(LocalStore, "get_bytes", counted)
    assert verify(made.folder, deep=True).ok
    for key in [*made.shard_keys, *(names.token_part_key(part) for part in range(2)), names.BATCHES, names.INDEX]:
        ranges = sorted(asked[key])
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == (made.folder / key).stat().st_size


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--recompute", "-1"], "Invalid value for '--recompute'"),
        (["--recompute", "1", "--model", "owner/name", "--device", "abacus"], "--device abacus:"),
        (["--recompute", "1", "--model", "/nowhere"], "--model /nowhere: no such folder on this host"),
    ],
)
def test_the_command_answers_bad_arguments_in_one_line(
    make: Make, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(["verify", "--out", str(make().folder), *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said


def test_every_finding_says_what_to_do_and_the_command_ends_with_1(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make()
    assert exit_status(["verify", "--out", str(made.folder)]) == 0
    assert "verified: every sample once" in capsys.readouterr().out
    (made.folder / made.shard_keys[0]).unlink()
    assert exit_status(["verify", "--out", str(made.folder), "--json"]) == 1
    report = VerifyReport.parse(capsys.readouterr().out)
    assert all(finding.todo for finding in report.findings)
    assert set(TODO) == set(get_args(FindingKind))


def test_a_thousand_findings_stay_readable(make: Make) -> None:
    made = make(num_samples=120, max_length=4)
    for sample in made.samples.values():
        sample.loss_mask = 1 - sample.loss_mask
    made.write_shards()
    made.finish()
    report = verify(made.folder)
    assert report.num_findings["tokens"] == 120
    assert len(report.lines()) < 50
    assert any("and 100 more" in line for line in report.lines())


def test_no_run_and_no_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run there \(run.json is missing\)"):
        verify(tmp_path)
    with pytest.raises(StoreRefused, match="no such folder"):
        verify(tmp_path / "nowhere")


def test_progress_reaches_the_bytes_of_the_run(make: Make) -> None:
    made = make()
    seen: list[tuple[int, int]] = []
    report = verify(made.folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.num_bytes, report.num_bytes)
