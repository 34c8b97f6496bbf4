"""The programs of deploy/image/, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

IMAGE = Path(__file__).resolve().parents[2] / "deploy/image"


def load(name: str) -> ModuleType:
    """`credentials` or `health`."""
    spec = importlib.util.spec_from_file_location(name, IMAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
