"""How fast shards reach an S3 server, beside the fastest that could be: boto3's own transfer, CRT, raw parallel PUTs.

    python -m benchmarks.upload [--files 4] [--mebibytes 256] [--rounds 5]

All contenders send the same files to the same real server (SeaweedFS, on loopback), in random order, each in a process
of its own; ours checks every byte and has the store confirm its checksum, the others send none. Prints one JSON object:
for each contender the median rate and the processor seconds a gigabyte, and ours over the fastest other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import boto3
from awscrt.auth import AwsCredentialsProvider
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

from hiddenq.contracts import checksum as crc
from hiddenq.storage import StoreSettings, open_store
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, start_server

CONCURRENT_FILES = 2
"""As an uploader has under way."""
CONNECTIONS = 8
PART_BYTES = StoreSettings().part_bytes
REGION = "us-east-1"


class File(NamedTuple):
    """A file to send."""

    path: str
    num_bytes: int
    checksum: str


class Job(NamedTuple):
    """What a contender is to send, and whereto."""

    endpoint_url: str
    prefix: str
    files: list[File]


Send = Callable[[Sequence[File]], None]


class Cost(NamedTuple):
    """What it took."""

    seconds: float
    cpu_seconds: float


def hiddenq(job: Job) -> Send:
    """The store as an uploader uses it."""
    store = open_store(f"s3://{BUCKET}/{job.prefix}", StoreSettings(endpoint_url=job.endpoint_url))
    store.probe()

    def put(number: int, file: File) -> None:
        key = f"states/{number:06d}-0123abcd.safetensors"
        store.put_file(key, Path(file.path), checksum=file.checksum, num_bytes=file.num_bytes)

    return lambda files: in_threads(put, files, CONCURRENT_FILES)


def boto3_transfer(job: Job) -> Send:
    """boto3's `upload_file` with our part size and as many connections."""
    client = make_client(job)
    config = TransferConfig(
        multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=CONNECTIONS
    )

    def put(number: int, file: File) -> None:
        client.upload_file(file.path, BUCKET, f"{job.prefix}/{number}", Config=config)

    return lambda files: in_threads(put, files, CONCURRENT_FILES)


def crt_transfer(job: Job) -> Send:
    """The C runtime's transfer."""
    session = boto3.session.Session()._session
    serializer = BotocoreCRTRequestSerializer(session, {"region_name": REGION, "endpoint_url": job.endpoint_url})
    client = create_s3_crt_client(
        region=REGION,
        crt_credentials_provider=AwsCredentialsProvider.new_static(ACCESS_KEY, SECRET_KEY),
        part_size=PART_BYTES,
        use_ssl=False,
    )

    def send(files: Sequence[File]) -> None:
        with CRTTransferManager(client, serializer) as manager:
            futures = [manager.upload(file.path, BUCKET, f"{job.prefix}/{number}") for number, file in enumerate(files)]
            for future in futures:
                future.result()

    return send


def raw_puts(job: Job) -> Send:
    """One PUT a file, as many at once as there are connections."""
    client = make_client(job)

    def put(number: int, file: File) -> None:
        with Path(file.path).open("rb") as body:
            client.put_object(Bucket=BUCKET, Key=f"{job.prefix}/{number}", Body=body)

    return lambda files: in_threads(put, files, CONNECTIONS)


CONTENDERS: dict[str, Callable[[Job], Send]] = {
    "hiddenq": hiddenq,
    "boto3 upload_file": boto3_transfer,
    "CRT": crt_transfer,
    "raw parallel PUT": raw_puts,
}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of each file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_EC2_METADATA_DISABLED="true")
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), options.files, options.mebibytes << 20)
        costs: dict[str, list[Cost]] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            with running_server() as server:  # a fresh one each time: what is deleted keeps its place on the disk
                for name in random.sample(list(CONTENDERS), len(CONTENDERS)):
                    costs[name].append(measure(name, Job(server.endpoint_url, name.replace(" ", "-"), files)))
    print(json.dumps(report(costs, options.files * (options.mebibytes << 20)), indent=2))


def measure(name: str, job: Job) -> Cost:
    """A contender's cost, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (name, job))


def _measured(name: str, job: Job) -> Cost:
    send = CONTENDERS[name](job)
    send(job.files[:1])  # connections, threads and buffers are made once in the hours of an uploader's life
    cpu, began = _cpu_seconds(), time.perf_counter()
    send(job.files)
    return Cost(time.perf_counter() - began, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def report(costs: dict[str, list[Cost]], num_bytes: int) -> dict[str, Any]:
    """Rates and processor seconds of each contender, and ours over the fastest other."""
    rows = {
        name: {
            "megabytes_per_second": round(num_bytes / 1e6 / statistics.median(cost.seconds for cost in found), 1),
            "cpu_seconds_per_gigabyte": round(
                statistics.median(cost.cpu_seconds for cost in found) / (num_bytes / 1e9), 2
            ),
        }
        for name, found in costs.items()
    }
    fastest = max(row["megabytes_per_second"] for name, row in rows.items() if name != "hiddenq")
    return {"contenders": rows, "of_the_fastest": round(rows["hiddenq"]["megabytes_per_second"] / fastest, 3)}


def make_files(folder: Path, num_files: int, num_bytes: int) -> list[File]:
    """Random files, with their checksums."""
    files = []
    for number in range(num_files):
        path = folder / str(number)
        with path.open("wb") as file:
            for begin in range(0, num_bytes, 8 << 20):
                file.write(os.urandom(min(8 << 20, num_bytes - begin)))
        files.append(File(str(path), num_bytes, crc.of_file(path)))
    return files


@contextmanager
def running_server() -> Any:
    """A server for the time of a `with` block."""
    server = start_server(Path(tempfile.mkdtemp(prefix="hiddenq-upload-")))
    try:
        yield server
    finally:
        server.stop()


def make_client(job: Job) -> Any:
    """A client that sends no checksums."""
    config = Config(
        max_pool_connections=2 * CONNECTIONS,
        request_checksum_calculation="when_required",
        s3={"payload_signing_enabled": False},
    )
    return boto3.client("s3", endpoint_url=job.endpoint_url, region_name=REGION, config=config)


def in_threads(put: Callable[[int, File], None], files: Sequence[File], num_threads: int) -> None:
    """Put every file, so many at once."""
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(put, range(len(files)), files))


if __name__ == "__main__":
    main()
