"""Every package that hiddenq asks for has its version in constraints.txt and its reason in docs/dependencies.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def named(requirement: str) -> str:
    """The package of a requirement, as the registry spells it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted({named(each) for group in groups for each in group} - {"hiddenq"})


@pytest.mark.parametrize("package", dependencies())
def test_a_dependency_is_pinned_and_has_its_reason(package: str) -> None:
    pins = [named(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert package in pins
    assert re.search(rf"\b{re.escape(package)}\b", (ROOT / "docs" / "dependencies.md").read_text().lower())
