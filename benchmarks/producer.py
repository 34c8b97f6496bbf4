"""How fast the producer tokenises, how well it packs, and how much memory it takes.

    python -m benchmarks.producer --model FOLDER [--rows 20000] [--rounds 3] [--processes N]
    python -m benchmarks.producer --model FOLDER --rows 0 --memory-rows 1000000 [--memory-kind text | ids] [--words 220]

Rows are conversations of one to four exchanges cut from the Python documentation, with lengths spread log-normally.
The baseline is `tokenizers`' own `encode_batch` over the very same rendered strings on the same cores; the two take
turns, because a machine's speed drifts, and `cpu_ratio` compares CPU time instead. The start of the processes is left
out: it takes seconds, a run takes hours.
`--memory-rows` takes so many rows, conversations or token ids, through the whole producer, and says the peak memory of
the process and of those that it starts.
Needs a model folder with a config and a chat tokenizer; of the weights, any file will do.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from hiddenq.model_identity import block_torch

MEDIAN_WORDS, SIGMA = 220, 0.9


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory-rows", type=int, default=0)
    parser.add_argument("--words", type=int, default=MEDIAN_WORDS, help="median words of a conversation")
    parser.add_argument("--memory-kind", choices=("text", "ids"), default="text")
    arguments = parser.parse_args()
    block_torch()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        results: dict[str, Any] = {}
        if arguments.rows:
            write_rows(data, arguments.rows, arguments.words)
            results = measure(arguments.model, data, arguments.rounds, arguments.processes) | padding()
        if arguments.memory_rows:
            if arguments.memory_kind == "text":
                write_rows(data, arguments.memory_rows, arguments.words)
            else:
                write_ids(data, arguments.memory_rows)
            results |= memory(arguments.model, data, arguments.processes)
            results |= {"memory_rows": arguments.memory_rows, "memory_kind": arguments.memory_kind}
    print(json.dumps(results, indent=2))


def write_rows(path: Path, num_rows: int, median_words: int = MEDIAN_WORDS) -> None:
    """Conversations, the same for each call."""
    chance = random.Random(7)
    words = " ".join(topics.values()).split(" ")

    def text() -> str:
        begin = chance.randrange(len(words))
        return " ".join(words[begin : begin + max(1, int(chance.lognormvariate(0, SIGMA) * median_words / 4))]) or "?"

    with path.open("w") as lines:
        for _ in range(num_rows):
            turns = [
                turn
                for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4)))
                for turn in ({"role": "user", "content": text()}, {"role": "assistant", "content": text()})
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")


def measure(model: str, data: Path, num_rounds: int, num_processes: int) -> dict[str, Any]:
    """Tokens a second of the producer and of `encode_batch`, by turns."""
    from producer import ProducerSettings
    from producer.job import Job
    from producer.tokenizer import ChatTokenizer, TokenizerSource

    settings = ProducerSettings(model=model, data=(str(data),), processes=num_processes)
    with Job(settings) as job:
        chat = ChatTokenizer(TokenizerSource.of(settings, job.target))
        texts = [chat.template.render(json.loads(line)["messages"]) for line in data.open()]
        ours, bare, peaks = [], [], [0]
        for _ in range(num_rounds):
            ours.append(producer_rate(job, peaks))
            bare.append(bare_rate(chat, texts))
        cpu = cpu_ratio(job, chat, texts)
    return {
        "num_rows": len(texts),
        "num_processes": num_processes,
        "producer_tokens_per_second": [round(rate) for rate in ours],
        "encode_batch_tokens_per_second": [round(rate) for rate in bare],
        "ratio": round(statistics.median(mine / theirs for mine, theirs in zip(ours, bare, strict=True)), 3),
        "cpu_ratio": round(cpu, 3),
        "process_peak_bytes": max(peaks),
    }


def producer_rate(job: Any, peaks: list[int]) -> float:
    """Tokens a second from the first blocks that come back to the last one; notes the processes' peak memory."""
    begin, num_tokens = 0.0, 0
    for number, block in enumerate(job.encode()):
        if number == 3 * job.settings.num_processes:
            begin, num_tokens = time.perf_counter(), 0
        num_tokens += len(block.input_ids)
        if number % 16 == 0:
            peaks += [peak_bytes(child.pid) for child in multiprocessing.active_children()]
    return num_tokens / (time.perf_counter() - begin)


def bare_rate(chat: Any, texts: list[str]) -> float:
    """Tokens a second of `encode_batch`, in its own threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    begin, num_tokens = time.perf_counter(), 0
    for first in range(0, len(texts), 1000):
        encodings = chat.backend.encode_batch(texts[first : first + 1000], add_special_tokens=False)
        num_tokens += sum(map(len, encodings))
    seconds = time.perf_counter() - begin
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return num_tokens / seconds


def cpu_ratio(job: Any, chat: Any, texts: list[str]) -> float:
    """CPU seconds of `encode_batch` over those of one producer process, on the first rows: blind to other load."""
    from producer.encoder import Encoder
    from producer.formats import read_blocks

    encoder = Encoder(job.encoder_settings)
    gc.freeze()  # as the producer's processes do
    blocks = list(read_blocks(job.files, min(len(texts), 2000)))
    begin = time.process_time()
    num_tokens = sum(len(encoder.encode(block).input_ids) for block in blocks)
    ours = (time.process_time() - begin) / num_tokens
    begin, num_tokens = time.process_time(), 0
    for block in blocks:
        rows = texts[block.first_row : block.first_row + block.num_rows]
        num_tokens += sum(map(len, chat.backend.encode_batch(rows, add_special_tokens=False)))
    return (time.process_time() - begin) / num_tokens / ours


def write_ids(path: Path, num_rows: int) -> None:
    """Rows of 1 to 199 token ids."""
    with path.open("w") as lines:
        for number in range(num_rows):
            lines.write(json.dumps({"input_ids": [number % 97] * (number % 199 + 1)}) + "\n")


def memory(model: str, data: Path, num_processes: int) -> dict[str, Any]:
    """Peak memory of a producer, in a process of its own."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    arguments = (theirs, model, data, num_processes)
    process = multiprocessing.get_context("spawn").Process(target=prepare_and_tell, args=arguments)
    process.start()
    results: dict[str, Any] = ours.recv()
    process.join()
    return results


def prepare_and_tell(pipe: Any, model: str, data: Path, num_processes: int) -> None:
    """Run a producer; send its peak memory, that of its processes, and how long it took."""
    from hiddenq.storage import open_store
    from producer import ProducerSettings, prepare

    block_torch()
    peaks: dict[int, int] = {}

    def look(stage: str, done: int, total: int) -> None:
        if stage == "tokenising":
            peaks.update({child.pid: peak_bytes(child.pid) for child in multiprocessing.active_children() if child.pid})

    begin = time.perf_counter()
    settings = ProducerSettings(model=model, data=(str(data),), processes=num_processes)
    prepared = prepare(settings, open_store(data.parent / "out"), look)
    pipe.send(
        {
            "memory_file_bytes": data.stat().st_size,
            "memory_tokens": prepared.config.num_tokens,
            "memory_peak_bytes": peak_bytes(os.getpid()),
            "memory_process_peak_bytes": list(peaks.values()),
            "memory_seconds": round(time.perf_counter() - begin, 1),
        }
    )


def peak_bytes(pid: int | None) -> int:
    """The most memory that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def padding() -> dict[str, float]:
    """Padded over real tokens for log-normal lengths: median 365, sigma 0.9, 16 to 4096, 32,768 tokens a batch."""
    from producer.batching import BatchLimits, RotaryLimits, cut_batches
    from producer.order import SampleOrder, iterate_lengths

    rotary = RotaryLimits()
    limits = BatchLimits(token_budget=32768, max_shard_bytes=1 << 40, bytes_per_token=1, rotary=rotary)
    ratios = {}
    for num_samples in (100_000, 1_000_000):
        for seed in (None, 1):
            chance = np.random.default_rng(0)
            lengths = np.clip(chance.lognormal(np.log(365), 0.9, num_samples), 16, 4096).astype(np.int64)
            order = SampleOrder(lambda: Path("/nowhere"))
            order.append_lengths(lengths)
            chunks = order.chunks(seed, rotary)
            padded = sum(
                batch.num_samples * batch.padded_length for batch in cut_batches(iterate_lengths(chunks), limits)
            )
            name = f"padding_ratio_{num_samples}" + ("" if seed is None else "_shuffled")
            ratios[name] = round(padded / int(lengths.sum()), 5)
    return ratios


if __name__ == "__main__":
    main()
