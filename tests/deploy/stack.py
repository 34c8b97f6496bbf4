"""The stack of deploy/, brought up from images built out of this checkout.

Invariant: everything is the user's own file; what the tests add is in `compose.test.yaml` and in the environment. Two
compose projects on one engine stand for two machines: they share no network but one that plays the wire between them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from hiddenq.contracts.run import RunConfig
from hiddenq.reader import verify
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.runfiles import load_run_json
from tests.deploy.docker import DEPLOY, ROOT, docker
from tests.support.waiting import wait_until

TARGETS = ("monitor", "uploader", "producer", "worker-cpu", "demo")
VERSION = "test"
LAN, PROJECT, JOINED = "hiddenq-test-lan", "hiddenq-test", "hiddenq-test-joined"
STORE_PORT, PROMETHEUS_PORT = 26010, 26011
SECRETS = {"AWS_SECRET_ACCESS_KEY": "planted-store-secret-7d1f", "HF_TOKEN": "hf_plantedhubtoken93ab"}


def build_images() -> None:
    """The images of one version, by the Dockerfile; torch's CPU wheel is where deploy/README.md says it must be."""
    wheels = DEPLOY / "wheels"
    if not list(wheels.glob("torch-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "--dest", str(wheels), "torch"], check=True, capture_output=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, TARGETS))


def build(target: str) -> None:
    """One image."""
    name = f"hiddenq-{target}:{VERSION}"
    docker("build", "--quiet", "--network=host", "-f", "Dockerfile", "--target", target, "-t", name, ROOT)


@dataclass
class Stack:
    """One compose project."""

    project: str
    files: tuple[str, ...]
    environment: dict[str, str]
    profiles: tuple[str, ...] = ()
    env_file: str = ".env.demo"

    def compose(self, *arguments: str, timeout: float = 600, check: bool = True) -> str:
        """Run a compose command on this project."""
        files = [part for file in self.files for part in ("-f", file)]
        profiles = [part for profile in self.profiles for part in ("--profile", profile)]
        return docker(
            "compose", "-p", self.project, "--env-file", self.env_file, *files, *profiles, *arguments,
            timeout=timeout, check=check, environment=self.environment,
        )  # fmt: skip

    def containers(self) -> dict[str, dict[str, Any]]:
        """State of each service's container, those that ended included."""
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {found["Service"]: found for found in map(json.loads, lines)}

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        name = self.containers()[service]["Name"]
        [found] = json.loads(docker("inspect", name))
        return dict(found)

    def is_healthy(self, *services: str) -> bool:
        """Whether these run and pass their health checks."""
        found = self.containers()
        return all(found.get(service, {}).get("Health") == "healthy" for service in services)

    def kill_process(self, service: str) -> None:
        """kill -9 of the container's first process, as a crash would; `docker kill` would count as a person's wish."""
        os.kill(int(self.inspect(service)["State"]["Pid"]), signal.SIGKILL)

    def produce(self, out: str, *, limit: int) -> None:
        """Enqueue a run."""
        self.compose("run", "--rm", "--no-deps", "-e", f"HIDDENQ_OUT={out}", "-e", f"HIDDENQ_LIMIT={limit}", "produce")

    def down(self) -> None:
        """Take everything away, volumes too; what was said last is shown if a test fails."""
        print(self.compose("logs", "--no-color", "--tail", "60", check=False))
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "60", check=False)


def first_machine(share_address: str) -> Stack:
    """The node with the queue, the demo's store in it."""
    return Stack(
        project=PROJECT,
        files=(
            "compose.yaml",
            "compose.cpu.yaml",
            "compose.share.yaml",
            "compose.tls.yaml",
            str(ROOT / "tests/deploy/compose.test.yaml"),
        ),
        profiles=("demo",),
        environment={
            **SECRETS,
            "HIDDENQ_VERSION": VERSION,
            "HIDDENQ_HOST": "first",
            "HIDDENQ_SHARE_ADDRESS": share_address,
            "HIDDENQ_LIMIT": "12",
            "HIDDENQ_MAX_LENGTH": "96",
            "HIDDENQ_TOKEN_BUDGET": "384",
            "HIDDENQ_UPLOADERS": "1",
            "TEST_LAN": LAN,
            "TEST_STORE_PORT": str(STORE_PORT),
            "TEST_PROMETHEUS_PORT": str(PROMETHEUS_PORT),
        },
    )


def second_machine(host: str, share_address: str, password_file: Path, authority_file: Path | None) -> Stack:
    """A machine that joins: the address of Redis and a password; over TLS also whom to believe."""
    over_tls = authority_file is not None
    return Stack(
        project=JOINED,
        files=(
            "compose.worker.yaml",
            *["compose.worker.tls.yaml"] * over_tls,
            "compose.cpu.yaml",
            str(ROOT / "tests/deploy/compose.joined.test.yaml"),
        ),
        environment={
            **SECRETS,
            "HIDDENQ_VERSION": VERSION,
            "HIDDENQ_HOST": host,
            "HIDDENQ_REDIS_ADDRESS": f"{share_address}:{6380 if over_tls else 6379}",
            "HIDDENQ_REDIS_PASSWORD_FILE": str(password_file),
            **({"HIDDENQ_REDIS_CA_FILE": str(authority_file)} if over_tls else {}),
            "HIDDENQ_ADVERTISE_ADDRESS": share_address,
            "HIDDENQ_UPLOADERS": "1",
            "TEST_LAN": LAN,
            "TEST_MODELS": f"{PROJECT}_models",
        },
    )


@dataclass(frozen=True)
class Output:
    """A run's location, as this test sees it from outside."""

    uri: str

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(endpoint_url=f"http://127.0.0.1:{STORE_PORT}", region="us-east-1")

    @property
    def store(self) -> ObjectStore:
        return open_store(self.uri, self.settings)

    @property
    def config(self) -> RunConfig | None:
        return load_run_json(self.store)

    def has_shards(self) -> bool:
        """Whether anything is stored yet."""
        return any(True for _ in self.store.list("states/"))

    def is_complete(self) -> bool:
        """Whether the manifest is there, which is written last."""
        return self.store.stat("manifest.json") is not None

    def check(self) -> None:
        """Every sample once, checksums, shapes, finite."""
        report = verify(self.uri, self.settings)
        assert report.ok, "\n".join(report.lines())


def prometheus(query: str) -> list[dict[str, Any]]:
    """An instant query's answer."""
    with urlopen(f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?query={quote(query)}", timeout=10) as answer:
        return [dict(series) for series in json.load(answer)["data"]["result"]]


def wait(condition: Callable[[], Any], what: str, *, seconds: float = 240) -> Any:
    """Wait for a state of the stack; a service that isn't up yet counts as not there."""

    def attempt() -> Any:
        try:
            return condition()
        except OSError:
            return None

    return wait_until(attempt, seconds=seconds, what=what)
