"""Debian's Prometheus programs for tests: a missing one skips a test on a developer's machine and fails it in CI."""

from __future__ import annotations

import os
import shutil

import pytest


def program(*names: str) -> str:
    """The first of these programs that is installed."""
    for name in names:
        if path := shutil.which(name):
            return path
    text = f"{names[0]} is not installed: apt-get install prometheus prometheus-alertmanager"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)
