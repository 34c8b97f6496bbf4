"""Small real models and datasets for whole runs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command, make_command, processes_with
from tests.support.models import save_tiny_model
from tests.support.redis_server import own_redis_server, redis_server, shared_redis_server  # noqa: F401  fixtures
from tests.support.s3_server import s3_location, s3_server  # noqa: F401  fixtures

ALONE = ("--devices", "cpu", "--cpu-threads", "1", "--processes", "1", "--uploaders", "1")
"""Options of a run that takes as little of the machine as it can: tests run beside each other."""
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


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that takes a fraction of a second a batch, so that a run can be met in its middle."""
    return save_tiny_model(
        tmp_path_factory.mktemp("slow") / "llama",
        num_hidden_layers=16,
        hidden_size=256,
        intermediate_size=1024,
        max_position_embeddings=1024,
    )


@pytest.fixture(scope="session")
def real_model() -> tuple[Path, Path]:
    """The demo's model and conversations: SmolLM2-135M-Instruct and people's chats."""
    folder = Path(__file__).parents[2] / ".demo"
    conversations = sorted(folder.glob("conversations-*.jsonl"))
    if not (folder / "model").exists() or not conversations:
        if os.environ.get("CI"):
            pytest.fail("the demo's model is missing: `make test` makes it")
        pytest.skip("the demo's model is missing: make it with `python deploy/demo.py .demo`")
    return folder / "model", conversations[0]


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


def shard_files(out: Path) -> list[Path]:
    """Committed shards of a local location; a name that begins with a dot is what a killed process left, no object."""
    return [path for path in (out / "states").iterdir() if not path.name.startswith(".")]
