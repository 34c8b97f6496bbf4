"""How fast samples come out of a run, beside reading the same bytes with plain safetensors from the same place.

    python -m benchmarks.reader [--gigabytes 1.0] [--length 512] [--out FOLDER] [--threads 4] [--rounds 9] [--s3]

Every way gives every sample once, in the same random order. Two comparisons, since safetensors only maps a file:
`owned` ends with tensors that own their memory (as a batch or a GPU needs them), `mapped` with views of the page cache
of which every byte is looked at once. Local files are in the page cache before. With `--s3` a real server on this
machine holds the run, and plain means: get the whole shard, `safetensors.torch.load`. The ways take turns, so that a
round compares them under one load; printed are medians over rounds, and of the ratios the smallest and the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load

from hiddenq.reader import HiddenStatesStream, Run, Sample, open_run, verify
from hiddenq.storage import StoreSettings
from tests.support import s3_server
from tests.support.made_run import make_run

HIDDEN_SIZE, LAYERS = 2048, (1, 9, 17, 25)

Way = Callable[[], Iterable[Iterable[torch.Tensor]]]


def main() -> None:
    """Make a run (unless one is given), measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=512, help="mean number of tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a run that is there already")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--s3", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        location = arguments.out or made(Path(folder), arguments.gigabytes, arguments.length)
        run = open_run(location)
        num_bytes = int(run.index.num_bytes.sum())
        print(
            f"{len(run)} samples, {num_bytes / 1e9:.2f} GB, {num_bytes / len(run) / 1e6:.2f} MB each; median of "
            f"{arguments.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        for title, ways in comparisons(run, location, arguments):
            measure(title, ways, num_bytes, arguments.rounds)
        started = time.perf_counter()
        report = verify(location, threads=arguments.threads)
        print(f"verify: {report.num_bytes / (time.perf_counter() - started) / 1e9:.2f} GB/s, ok={report.ok}")


def comparisons(run: Run, location: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Way]]]:
    """Ways by name; the first one of each comparison is the baseline."""
    order = np.random.default_rng(0).permutation(run.sample_ids).tolist()
    names = [name for name, _, _ in run.shard_format.columns()]
    if arguments.s3:
        settings = upload(location)
        remote = open_run(f"s3://{s3_server.BUCKET}/benchmark", settings)
        client = s3_server.shared_server().client()

        def whole_shards() -> Iterator[Iterable[torch.Tensor]]:
            for key in run.index.shard_keys:
                body = client.get_object(Bucket=s3_server.BUCKET, Key=f"benchmark/{key}")["Body"]
                yield load(body.read()).values()

        yield (
            "S3",
            {
                "whole shards, safetensors": whole_shards,
                "run[sample_id]": lambda: (tensors(remote, sample_id) for sample_id in order),
                "HiddenStatesStream": lambda: streamed(remote, arguments.threads),
            },
        )
        return
    mapped = open_run(location, local_files="map")
    read = open_run(location, local_files="read")
    files = [safe_open(location / key, framework="pt") for key in run.index.shard_keys]

    def plain(sample_id: int) -> Iterator[torch.Tensor]:
        file = files[run.index.shard[run.index.position(sample_id)]]
        return (file.get_tensor(f"{sample_id}.{name}") for name in names)

    yield (
        "owned",
        {
            "safetensors, cloned": lambda: ([tensor.clone() for tensor in plain(sample_id)] for sample_id in order),
            "run[sample_id]": lambda: (tensors(run, sample_id) for sample_id in order),
            'local_files="read"': lambda: (tensors(read, sample_id) for sample_id in order),
            "HiddenStatesStream": lambda: streamed(run, arguments.threads),
        },
    )
    yield (
        "mapped, every byte looked at",
        {
            "safetensors": lambda: (look(plain(sample_id)) for sample_id in order),
            'local_files="map"': lambda: (look(tensors(mapped, sample_id)) for sample_id in order),
            "HiddenStatesStream": lambda: map(look, streamed(mapped, arguments.threads)),
        },
    )


def measure(title: str, ways: dict[str, Way], num_bytes: int, rounds: int) -> None:
    """Run the ways in turn, several times after once; print medians, ratios and what memory grew by."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    anonymous: list[int] = []
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            for sample in way():
                for _ in sample:
                    pass
            seconds[name].append(time.perf_counter() - started)
        anonymous.append(anonymous_bytes())
    print(f"{title}: memory grew by {(anonymous[-1] - anonymous[0]) / 1e6:.1f} MB from the first round to the last")
    baseline = next(iter(seconds.values()))[1:]
    for name, each in seconds.items():
        ratios = [plain / own for plain, own in zip(baseline, each[1:], strict=True)]
        print(
            f"    {name:26} {num_bytes / statistics.median(each[1:]) / 1e9:6.2f} GB/s   "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of safetensors"
        )


def tensors(run: Run, sample_id: int) -> list[torch.Tensor]:
    """A sample's tensors through the reader."""
    return parts(run[sample_id])


def parts(sample: Sample) -> list[torch.Tensor]:
    """The tensors of a sample."""
    found = (sample.hidden_states, sample.final_hidden_state, sample.input_ids, sample.loss_mask)
    return [tensor for tensor in found if tensor is not None]


def streamed(run: Run, threads: int) -> Iterator[Iterable[torch.Tensor]]:
    """The samples of a stream."""
    return map(parts, HiddenStatesStream(run, threads=threads))


def look(sample: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Touch every byte of tensors that may be nothing but a map."""
    seen = list(sample)
    for tensor in seen:
        np.bitwise_xor.reduce(tensor.reshape(-1).view(torch.int64).numpy())
    return seen


def made(folder: Path, gigabytes: float, length: int) -> Path:
    """A run of about so many gigabytes."""
    sample_bytes = length * ((len(LAYERS) + 1) * HIDDEN_SIZE * 2 + 16)
    make_run(
        folder,
        num_samples=max(4, round(gigabytes * 1e9 / sample_bytes)),
        samples_per_batch=8,
        min_length=length // 2,
        max_length=length * 3 // 2,
        hidden_size=HIDDEN_SIZE,
        num_layers=36,
        target_layer_ids=LAYERS,
        vocab_size=50_000,
    )
    return folder


def upload(location: Path) -> StoreSettings:
    """Put a run into a bucket of a server of our own, which is stopped when Python ends."""
    server = s3_server.shared_server()
    os.environ |= {"AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY}
    for path in location.rglob("*"):
        if path.is_file():
            key = f"benchmark/{path.relative_to(location).as_posix()}"
            server.client().upload_file(str(path), s3_server.BUCKET, key)
    return StoreSettings(endpoint_url=server.endpoint_url, region="us-east-1")


def anonymous_bytes() -> int:
    """This process's own memory: pages of mapped files, which the kernel takes back at will, are not counted."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
