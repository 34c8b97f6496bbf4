"""What docs/models.md says was tried is what the tests try, and the lines it quotes are those printed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.architectures import ARCHITECTURES, MORE_WRAPPERS, WRAPPERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
SOURCES = [path for part in ("hiddenq", "gpu_worker") for path in (ROOT / part).rglob("*.py")]


def test_it_counts_what_the_tests_try() -> None:
    wrappers = len(WRAPPERS | MORE_WRAPPERS)
    assert f"{len(ARCHITECTURES)} model types" in PAGE
    assert f"{wrappers} vision" in PAGE
    assert (
        f"| {len(ARCHITECTURES)} causal architectures, {wrappers} vision wrappers |" in (ROOT / "README.md").read_text()
    )


def test_the_versions_it_names_are_those_that_may_be_installed() -> None:
    bounds = re.findall(r"transformers>=5\.(\d+),<5\.(\d+)", (ROOT / "pyproject.toml").read_text())
    assert len(set(bounds)) == 1
    named = {int(minor) for minor in re.findall(r"\b5\.(\d+)\.\d", PAGE)}
    assert sorted(named) == list(range(int(bounds[0][0]), int(bounds[0][1])))


def test_every_line_it_quotes_is_printed_by_the_code() -> None:
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.count("|") == 3 and "`" in line.split("|")[2]]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 15
    assert [text for text in quoted if text not in joined] == []
