"""Encoding in processes: killed ones are named, orphans end by themselves."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiddenq.contracts.errors import ModelError, UsageError
from producer.blocks import Block
from producer.encoder import Encoder, EncoderSettings
from producer.formats import read_blocks
from producer.pool import encode_blocks
from producer.sources import InputFile
from producer.tokenizer import TokenizerSource
from tests.producer.conftest import write_lines


def children(pid: int) -> list[int]:
    """Live processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def is_live(pid: int) -> bool:
    """Whether a process runs: one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}] * 20_000)


SETTINGS = EncoderSettings(
    row_schema="input_ids",
    tokenizer=None,
    vocab_size=512,
    max_length=64,
    length_policy="truncate",
    special_tokens="count",
    surrogates="replace",
)


def test_a_killed_process_is_one_line(data: Path) -> None:
    encoded = encode_blocks(read_blocks([InputFile.at(data)]), Encoder(SETTINGS), SETTINGS, 2)
    next(encoded)
    for pid in children(os.getpid()):
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(UsageError, match="--processes 2: a tokenising process died, most likely for want of memory"):
        list(encoded)


def test_a_process_that_cannot_load_its_tokenizer_says_so(data: Path) -> None:
    source = TokenizerSource(
        model="/nowhere", revision=None, local_only=True, trust_remote_code=False, chat_template=None
    )
    settings = dataclasses.replace(SETTINGS, tokenizer=source)
    with pytest.raises(ModelError, match="--model /nowhere: its tokenizer can't be loaded"):
        list(encode_blocks(read_blocks([InputFile.at(data)]), Encoder(SETTINGS), settings, 2))


def test_rows_that_cannot_be_read_are_not_blamed_on_a_process(data: Path) -> None:
    def broken() -> Iterator[Block]:
        yield from itertools.islice(read_blocks([InputFile.at(data)]), 1)
        raise OSError("the disk is broken")

    with pytest.raises(OSError, match="the disk is broken"):
        list(encode_blocks(broken(), Encoder(SETTINGS), SETTINGS, 2))


def test_processes_end_with_the_one_that_started_them(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pathlib, pickle, time
            from producer.formats import read_blocks
            from producer.encoder import Encoder
            from producer.pool import encode_blocks
            from producer.sources import InputFile
            if __name__ == "__main__":
                settings = pickle.loads({pickle.dumps(SETTINGS)!r})
                blocks = read_blocks([InputFile.at(pathlib.Path({str(data)!r}))])
                encoded = encode_blocks(blocks, Encoder(settings), settings, 2)
                next(encoded)
                print("going", flush=True)
                time.sleep(600)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"going\n"
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.wait()
        wait_until(lambda: not any(is_live(pid) for pid in workers))
