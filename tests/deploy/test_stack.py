"""Docker, for real: the images build, the stack does the demo's work, survives, is joined by a machine, and goes away.

One stack serves all of these tests, in this order; each looks at one promise.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenq.contracts.errors import RedisRefused
from hiddenq.delivery import connect
from tests.deploy.docker import ROOT, docker, require_engine
from tests.deploy.stack import (
    JOINED,
    LAN,
    PROJECT,
    SECRETS,
    TARGETS,
    VERSION,
    Output,
    Stack,
    build_images,
    first_machine,
    prometheus,
    second_machine,
    wait,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYTHON_SLIM_BYTES = 130 << 20
"""What python:3.11-slim-bookworm weighs where it can be pulled; what stands in for it here is larger."""
MAX_BYTES = 400 << 20
OURS = ("credentials", "monitor", "uploader", "worker", "produce")


@pytest.fixture(scope="module")
def images() -> None:
    require_engine()
    build_images()


@pytest.fixture(scope="module")
def lan(images: None) -> Iterator[str]:
    """The wire between two machines; yields the address that the first one has on it."""
    docker("network", "create", LAN, check=False)
    [network] = json.loads(docker("network", "inspect", LAN))
    yield network["IPAM"]["Config"][0]["Gateway"]
    docker("network", "rm", LAN, check=False)


@pytest.fixture(scope="module")
def stack(lan: str) -> Iterator[Stack]:
    node = first_machine(lan)
    node.compose("down", "--volumes", "--remove-orphans", "--timeout", "1", check=False)
    try:
        node.compose("up", "--detach", "--quiet-pull")
        yield node
    finally:
        node.down()


@pytest.fixture(autouse=True)
def _store_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["AWS_SECRET_ACCESS_KEY"])


def run_of(name: str) -> str:
    config = Output(f"s3://demo/{name}").config
    assert config is not None
    return config.run


def size_of(image: str) -> int:
    return int(json.loads(docker("image", "inspect", image))[0]["Size"])


@pytest.mark.parametrize("target", ["producer", "uploader", "monitor"])
def test_a_cpu_image_has_no_torch_and_is_under_400_mb(images: None, target: str) -> None:
    [base] = re.findall(r"^ARG PYTHON=(\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    ours = size_of(f"hiddenq-{target}:{VERSION}") - size_of(base)
    assert ours + PYTHON_SLIM_BYTES < MAX_BYTES, f"{target}: {ours >> 20} MiB over its base"
    look = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('torch', 'pip'))))"
    docker("run", "--rm", "--network=none", "--entrypoint=python", f"hiddenq-{target}:{VERSION}", "-c", look)


def test_images_say_what_they_are_and_run_as_somebody(images: None) -> None:
    for target in TARGETS[:4]:
        [image] = json.loads(docker("image", "inspect", f"hiddenq-{target}:{VERSION}"))
        assert image["Config"]["Labels"]["org.opencontainers.image.title"] == "hiddenq"
        assert re.fullmatch(r"1000[1-4]:10000", image["Config"]["User"])


def test_what_an_image_holds_is_listed_on_demand(images: None, tmp_path: Path) -> None:
    options = ("--quiet", "--network=host", "-f", "Dockerfile", "--build-arg", "ROLE=monitor", "--output", tmp_path)
    docker("build", *options, "--target", "sbom", ROOT)
    listed = json.loads((tmp_path / "sbom.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    names = {component["name"] for component in listed["components"]}
    assert {"redis", "prometheus_client", "pydantic"} <= {name.replace("-", "_") for name in names}
    assert "torch" not in names


def test_a_service_that_can_not_work_says_why_and_what_to_do_and_does_not_start(images: None) -> None:
    ended = subprocess.run(
        ["docker", "run", "--rm", "--network=none", "-e", "HIDDENQ_REDIS_URL=redis://127.0.0.1:1/0",
         f"hiddenq-uploader:{VERSION}", "upload"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "error    redis://127.0.0.1:1/0" in ended.stderr
    assert "do:  docker compose up -d redis" in ended.stderr


def test_the_demo_runs_to_its_end_and_its_result_is_right(stack: Stack) -> None:
    output = Output("s3://demo/run")
    wait(output.is_complete, "the demo's manifest.json")
    output.check()
    assert (config := output.config) is not None
    assert config.num_samples >= 10
    ended = stack.containers()
    assert {name: ended[name]["ExitCode"] for name in ("credentials", "demo-input", "produce")} == {
        "credentials": 0, "demo-input": 0, "produce": 0
    }  # fmt: skip


def test_every_long_lived_service_is_healthy(stack: Stack) -> None:
    services = ("redis", "monitor", "uploader", "worker", "prometheus", "demo-store")
    wait(lambda: stack.is_healthy(*services), "health of every service", seconds=60)


def test_prometheus_finds_and_scrapes_every_process(stack: Stack) -> None:
    def roles() -> set[str]:
        return {line["metric"].get("role", "monitor") for line in prometheus("up == 1")}

    wait(lambda: roles() == {"monitor", "gpu_worker", "uploader"}, "every process in Prometheus", seconds=90)
    [complete] = wait(lambda: prometheus("hiddenq_monitor_run_complete == 1"), "the run in Prometheus")
    assert complete["metric"]["run"] == run_of("run")


def test_an_operator_sees_the_fleet_and_status_is_complete(stack: Stack) -> None:
    status = json.loads(
        stack.compose("run", "--rm", "--no-deps", "operator", "status", "--run", run_of("run"), "--json")
    )
    assert "first" in json.dumps(status)


def test_a_killed_worker_comes_back_by_itself_and_its_run_is_finished(stack: Stack) -> None:
    output = Output("s3://demo/killed")
    stack.produce(output.uri, limit=20)
    wait(output.has_shards, "a first shard")
    stack.kill_process("worker")
    wait(output.is_complete, "manifest.json after the kill")
    output.check()
    wait(lambda: stack.inspect("worker")["RestartCount"] >= 1, "the worker's restart", seconds=60)


@pytest.mark.parametrize("host", ["plain", "tls"])
def test_another_machine_joins_with_an_address_and_a_password_and_does_the_work_alone(
    stack: Stack, lan: str, tmp_path: Path, host: str
) -> None:
    password = tmp_path / "join-password"
    password.write_text(stack.compose("run", "--rm", "--no-deps", "credentials", "show", "join"))
    authority = None
    if host == "tls":
        authority = tmp_path / "ca.pem"
        stack.compose("cp", "redis:/run/hiddenq/ca.pem", str(authority))
    stack.compose("stop", "worker", "uploader")
    joined = second_machine(host, lan, password, authority)
    try:
        joined.compose("up", "--detach")
        output = Output(f"s3://demo/joined-{host}")
        stack.produce(output.uri, limit=8)
        wait(output.is_complete, "manifest.json by the other machine")
        output.check()
        wait(lambda: len(prometheus(f'up{{host="{host}"}} == 1')) == 2, "its metrics in Prometheus", seconds=90)
        stack.compose("run", "--rm", "--no-deps", "operator", "drain", host)
    finally:
        joined.down()


def test_the_shared_port_lets_the_join_password_in_and_nobody_else(stack: Stack, lan: str) -> None:
    password = stack.compose("run", "--rm", "--no-deps", "credentials", "show", "join").strip()
    connect(f"redis://worker@{lan}:6379/0", password=password).close()
    for url in (f"redis://operator@{lan}:6379/0", f"redis://admin@{lan}:6379/0", f"redis://{lan}:6379/0"):
        with pytest.raises(RedisRefused):
            connect(url, password=password)


def test_no_secret_is_in_a_log_a_metric_redis_or_the_output(stack: Stack) -> None:
    secrets = stack.compose(
        "run", "--rm", "--no-deps", "--entrypoint=sh", "credentials", "-c",
        "for name in worker uploader producer monitor operator join admin; do cat /run/hiddenq/redis-$name; echo; done",
    ).split()  # fmt: skip
    assert len(secrets) == 7
    secrets += SECRETS.values()
    places = {
        f"log of {service}": stack.compose("logs", "--no-color", service).encode() for service in (*OURS, "redis")
    }
    places["metrics"] = json.dumps(prometheus('{__name__=~".+"}')).encode()
    places["Redis"] = in_container(stack, "redis", "cat /data/appendonlydir/*")
    for run in ("run", "killed", "joined-plain", "joined-tls"):
        store = Output(f"s3://demo/{run}").store
        places |= {f"{run}/{info.key}": store.get_bytes(info.key) for info in store.list()}
    assert len(places) > 20
    assert len(places["Redis"]) > 1000
    leaks = [place for place, data in places.items() for secret in secrets if secret.encode() in data]
    assert leaks == []


def in_container(stack: Stack, service: str, command: str) -> bytes:
    name = stack.containers()[service]["Name"]
    return subprocess.run(["docker", "exec", name, "sh", "-c", command], capture_output=True, check=True).stdout


def test_down_leaves_nothing_and_nobody_had_to_be_killed(stack: Stack) -> None:
    stack.compose("start", "uploader", "worker")
    wait(lambda: stack.is_healthy("worker", "uploader"), "worker and uploader again", seconds=120)
    stack.compose("stop")
    codes = {name: found["ExitCode"] for name, found in stack.containers().items()}
    # 143: ended by the signal, in good order; 137 would be killed, after the grace period.
    ended = {name: codes[name] for name in ("worker", "uploader", "redis", "monitor")}
    assert ended == {"worker": 0, "uploader": 0, "redis": 0, "monitor": 143}
    stack.compose("down", "--volumes")
    assert docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}") == ""
    assert docker("volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}") == ""
    assert docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={JOINED}") == ""
