"""Small real models and datasets for whole runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command, make_command, processes_with
from tests.support.models import save_tiny_model

SENTENCE = "the model reads a token and writes a state for each layer that was asked of it while time goes on"


@pytest.fixture
def hiddenq(tmp_path: Path) -> Iterator[Command]:
    """The command; afterwards nothing that it started may be alive."""
    home = tmp_path / "home"
    home.mkdir()
    yield make_command(home)
    left = processes_with(str(tmp_path))
    assert not left, f"left running: {left}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny llama, qwen3 and qwen3_5 (a hybrid) checkpoints in fp32, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(folder / name, name) for name in ("llama", "qwen3", "qwen3_5_text")}


def chats(num: int, *, seed: int = 0, max_words: int = 60) -> list[dict[str, Any]]:
    """Conversations of two to four turns with lengths that vary."""
    chance, words = random.Random(seed), SENTENCE.split()
    rows = []
    for _ in range(num):
        turns = [" ".join(chance.choices(words, k=chance.randint(1, max_words))) for _ in range(chance.choice((2, 4)))]
        rows.append({"messages": [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(turns)]})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
