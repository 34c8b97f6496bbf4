"""Hub datasets by name, through the real `datasets` and `huggingface_hub`, from a hub on loopback.

Each resolution runs in a process of its own, because these libraries read their settings once, when they are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.producer.conftest import chat
from tests.support.hub import serve_hub

TRAIN = [chat(f"question {number}", "answer") for number in range(1500)]
TEST = [chat("another", "answer")]
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *chat("a", "b")["messages"][1:]]}
MIXED = [chat("a", "b"), PARTS]
BROKEN = b'{"messages": []}\n{"messages":'

_SCRIPT = """
import json, sys, pathlib
from hiddenq.contracts.errors import DatasetError
from producer.formats import read_blocks
from producer.sources import resolve_data
found = {}
for entry in sys.argv[1:]:
    try:
        files = resolve_data([entry], lambda: pathlib.Path("/nowhere"))
        rows = [row for block in read_blocks(files) for row in block.decode()]
        found[entry] = [[file.name for file in files], rows]
    except DatasetError as error:
        found[entry] = str(error)
print("\\n" + json.dumps(found))
"""


def lines(rows: Iterable[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


README = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- {config_name: mixed, data_files: mixed.jsonl}
- {config_name: broken, data_files: broken.jsonl}
---
"""
FILES = {
    "README.md": README.encode(),
    "data/train.jsonl": lines(TRAIN),
    "data/test.jsonl": lines(TEST),
    "mixed.jsonl": lines(MIXED),
    "broken.jsonl": BROKEN,
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub("owner/name", FILES) as address:
        yield address


def resolve(address: str, home: Path, *entries: str) -> dict[str, object]:
    """What each entry becomes, as a user's process finds it out."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *entries],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_hub_dataset_is_read_by_name_split_and_config_and_again_without_the_hub(hub: str, tmp_path: Path) -> None:
    found = resolve(hub, tmp_path, "owner/name:plain:train", "owner/name:plain:test")
    assert found == {
        "owner/name:plain:train": [["owner/name:plain:train#0"], TRAIN],
        "owner/name:plain:test": [["owner/name:plain:test#0"], TEST],
    }
    away = resolve("http://127.0.0.1:21001", tmp_path, "owner/name:plain:train", "owner/other")
    assert away["owner/name:plain:train"] == [["owner/name:plain:train#0"], TRAIN]
    assert away["owner/other"] == (
        "--data owner/other: no such file, and not in the hub's cache on this machine; the hub of datasets can't be "
        "reached from here"
    )


def test_rows_of_other_types_than_their_neighbours_come_through_datasets_as_they_are(hub: str, tmp_path: Path) -> None:
    assert resolve(hub, tmp_path, "owner/name:mixed:train")["owner/name:mixed:train"] == [
        ["owner/name:mixed:train#0"],
        MIXED,
    ]


def test_what_the_hub_does_not_have_is_one_line_in_its_words(hub: str, tmp_path: Path) -> None:
    found = resolve(hub, tmp_path, "owner/other", "owner/name:plain:dev", "owner/name", "owner/name:broken:train")
    assert all(isinstance(text, str) and "\n" not in text for text in found.values())
    assert "the hub says: Dataset 'owner/other' doesn't exist on the Hub" in str(found["owner/other"])
    assert 'Unknown split "dev". Should be one of' in str(found["owner/name:plain:dev"])
    assert "Config name is missing" in str(found["owner/name"])
    assert "JSON" in str(found["owner/name:broken:train"])
