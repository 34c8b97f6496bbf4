"""What docs/troubleshooting.md quotes is what is printed, and what it tells to type can be typed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from hiddenq.contracts.manifest import RejectReason
from tests.support.options import options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = [path for part in ("hiddenq", "producer", "gpu_worker", "uploader") for path in (ROOT / part).rglob("*.py")]
_CODE = re.compile(r"`([^`]+)`")
STORES_OWN = {"AccessDenied", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "PermanentRedirect"}


def first_cells(title: str) -> list[str]:
    """What the first column of the tables with that title quotes."""
    found, inside = [], False
    for line in PAGE.splitlines():
        inside = line.startswith(f"| {title} |") or (inside and line.startswith("|"))
        if inside:
            found += _CODE.findall(line.split("|")[1])
    return found


def test_every_line_it_quotes_is_printed_by_the_code() -> None:
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    quoted = [text for text in first_cells("printed") if text not in STORES_OWN]
    assert len(quoted) > 15
    assert [text for text in quoted if text not in joined] == []


def test_every_reason_for_a_rejected_row_is_explained() -> None:
    named = [name for name in first_cells("reason") if not name.startswith("--")]
    assert sorted(named) == sorted(get_args(RejectReason))


def test_every_option_and_command_it_names_exists() -> None:
    typed = _CODE.findall(PAGE) + re.findall(r"^    (hiddenq .*)$", PAGE, re.MULTILINE)
    named = {name for text in typed for name in re.findall(r"(?:^|\s)(--[a-z][a-z-]+)", text)}
    assert named <= {option.name.partition("/")[0] for option in options()}
    commands = {text.split()[1] for text in typed if text.startswith("hiddenq ")}
    assert commands <= {option.command.split()[0] for option in options()}
