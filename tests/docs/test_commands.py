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


def typed(page: Path) -> list[str]:
    """The commands on a page, in its sentences and its indented blocks."""
    text = page.read_text()
    spans = [*re.findall(r"`([^`]+)`", text), *re.findall(r"^    (.+)$", text, re.MULTILINE)]
    return [found[1] for span in spans if (found := TYPED.match(span))]


def test_commands_are_found_on_most_pages() -> None:
    assert sum(bool(typed(page)) for page in PAGES) > len(PAGES) / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_can_be_typed(page: Path) -> None:
    known: dict[str, set[str]] = {}
    for option in options():
        known.setdefault(option.command.split()[0], set()).update(option.name.split("/"))
    for command in typed(page):
        name, *words = command.split()
        assert name in known, command
        named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert named <= known[name] | set(NOT_SETTINGS), command
