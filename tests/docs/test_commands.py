"""Every `hiddenq` command that a page tells to type exists, with the options it is told to have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.options import NOT_SETTINGS, options

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "deploy/README.md",
    ROOT / "grafana/RUNBOOK.md",
]
TYPED = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:hiddenq|docker compose .*--rm operator) +([a-z][^#\n]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_can_be_typed(page: Path) -> None:
    text = page.read_text()
    spans = [*re.findall(r"`([^`]+)`", text), *re.findall(r"^    (.+)$", text, re.MULTILINE)]
    typed = [found[1] for span in spans if (found := TYPED.match(span))]
    known: dict[str, set[str]] = {}
    for option in options():
        known.setdefault(option.command.split()[0], set()).update(option.name.split("/"))
    for command in typed:
        name, *words = command.split()
        assert name in known, command
        named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert named <= known[name] | set(NOT_SETTINGS), command
