"""The compose files, as compose reads them: every combination is valid; each service is shut in, bounded, patient."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.deploy.docker import DEPLOY, config, require_compose
from tests.support.options import options

RUN = {"HIDDENQ_MODEL": "/models/m", "HIDDENQ_DATA": "/data/d.jsonl", "HIDDENQ_OUT": "s3://b/run"}
SHARE = {"HIDDENQ_SHARE_ADDRESS": "10.8.0.1"}
COMBINATIONS = [
    ("compose.yaml", *overrides)
    for overrides in (
        (),
        ("compose.cpu.yaml",),
        ("compose.ramspool.yaml",),
        ("compose.share.yaml",),
        ("compose.tls.yaml",),
        ("compose.share.yaml", "compose.tls.yaml"),
        ("compose.cpu.yaml", "compose.ramspool.yaml", "compose.share.yaml", "compose.tls.yaml"),
    )
]
JOINING = [
    ("compose.worker.yaml", *overrides)
    for overrides in (
        (),
        ("compose.cpu.yaml",),
        ("compose.ramspool.yaml",),
        ("compose.worker.tls.yaml",),
        ("compose.cpu.yaml", "compose.ramspool.yaml", "compose.worker.tls.yaml"),
    )
]
ONE_SHOT = {"credentials", "produce", "operator", "demo-input"}
OURS = {"monitor", "uploader", "worker", "produce", "operator", "credentials"}
GRACE_SECONDS = {"worker": 600, "uploader": 300, "redis": 120}


@pytest.fixture(autouse=True)
def _compose() -> None:
    require_compose()


@functools.cache
def one_node() -> dict[str, Any]:
    return config("compose.yaml", profiles=("*",), environment=RUN)


@functools.cache
def joining(*overrides: str) -> dict[str, Any]:
    environment = {
        "HIDDENQ_REDIS_ADDRESS": "10.8.0.1:6379",
        "HIDDENQ_REDIS_PASSWORD_FILE": "/dev/null",
        "HIDDENQ_REDIS_CA_FILE": "/dev/null",
    }
    return config("compose.worker.yaml", *overrides, environment=environment)


@pytest.mark.parametrize("files", COMBINATIONS, ids=" ".join)
def test_every_combination_for_one_node_is_valid(files: tuple[str, ...]) -> None:
    assert config(*files, profiles=("*",), environment={**RUN, **SHARE})["services"]["worker"]


@pytest.mark.parametrize("files", JOINING, ids=" ".join)
def test_every_combination_for_another_machine_is_valid(files: tuple[str, ...]) -> None:
    services = joining(*files[1:])["services"]
    assert set(services) == {"credentials", "uploader", "worker"}
    tls = "compose.worker.tls.yaml" in files
    assert services["worker"]["environment"]["HIDDENQ_REDIS_URL"].startswith("rediss://" if tls else "redis://")


def test_no_file_is_left_out_of_these_combinations() -> None:
    tried = {name for files in (*COMBINATIONS, *JOINING) for name in files}
    assert tried == {path.name for path in DEPLOY.glob("compose*.yaml")}


def test_the_example_settings_are_those_of_a_start() -> None:
    lines = [line for line in (DEPLOY / ".env.example").read_text().splitlines() if line and not line.startswith("#")]
    environment = dict(line.split("=", 1) for line in lines)
    assert config("compose.yaml", environment=environment)["services"]["worker"]


SET_HERE = {
    *("HIDDENQ_REDIS_URL", "HIDDENQ_METRICS_PORT", "HIDDENQ_METRICS_BIND", "HIDDENQ_SPOOL"),
    *("HIDDENQ_PROFILE", "HIDDENQ_KEEP_LOCAL", "HIDDENQ_RUN"),
}
"""Options that a container has from its image or its compose file, or that want a file of the host."""


OF_EVERY_PROCESS = {
    *("HIDDENQ_LOG_LEVEL", "HIDDENQ_HOST", "HIDDENQ_ADVERTISE_ADDRESS", "HIDDENQ_REDIS_PASSWORD_FILE"),
    *("HIDDENQ_METRICS_PORT", "HIDDENQ_METRICS_BIND"),
}
"""Read by what all processes share."""


@pytest.mark.parametrize(
    ("service", "command", "elsewhere"),
    [
        ("produce", "produce", set()),
        # The spool's uploaders are another service, and a GPU worker takes whatever run has work.
        ("worker", "worker", {"HIDDENQ_UPLOADERS"}),
        ("uploader", "upload", {"HIDDENQ_DEVICES"}),
    ],
)
def test_every_option_of_a_stage_can_be_set_in_env(service: str, command: str, elsewhere: set[str]) -> None:
    read = {option.variable for option in options() if option.command == command}
    stacks = [one_node(), joining()] if service != "produce" else [one_node()]
    for stack in stacks:
        given = {name for name in stack["services"][service]["environment"] if name.startswith("HIDDENQ_")}
        assert read - SET_HERE - elsewhere - given == set(), "missing"
        assert given - read - OF_EVERY_PROCESS == set(), "without effect"


def test_nothing_is_published_but_grafana_on_loopback() -> None:
    published = {
        name: [(port.get("host_ip"), port["target"]) for port in service.get("ports", ())]
        for name, service in one_node()["services"].items()
        if service.get("ports")
    }
    assert published == {"grafana": [("127.0.0.1", 3000)]}


def test_redis_is_shared_on_the_named_address_alone() -> None:
    for file, port in (("compose.share.yaml", 6379), ("compose.tls.yaml", 6380)):
        found = config("compose.yaml", file, environment={**RUN, **SHARE})["services"]["redis"]["ports"]
        assert [(port["host_ip"], port["target"]) for port in found] == [("10.8.0.1", port)]


def test_another_machine_opens_its_metrics_alone_and_not_to_the_world() -> None:
    for name, first in (("worker", 9400), ("uploader", 9440)):
        ports = joining()["services"][name]["ports"]
        assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
        assert min(port["target"] for port in ports) == first


def test_redis_has_no_way_out_and_only_its_clients_beside_it() -> None:
    stack = one_node()
    assert stack["networks"]["core"]["internal"]
    assert set(stack["services"]["redis"]["networks"]) == {"core"}
    assert {name for name, service in stack["services"].items() if "core" in (service.get("networks") or ())} == {
        *("redis", "monitor", "uploader", "worker", "produce", "operator", "demo-store", "demo-input")
    }


@pytest.mark.parametrize("where", ["one node", "another machine"])
def test_every_service_is_shut_in_bounded_and_logs_in_turns(where: str) -> None:
    services = one_node()["services"] if where == "one node" else joining()["services"]
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["logging"]["options"]["max-size"], name
        # A GPU worker has the machine to itself unless HIDDENQ_WORKER_MEMORY says otherwise.
        assert "mem_limit" in service or name == "worker", name
        assert "privileged" not in service, name
        if name not in ONE_SHOT:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"], name
            assert service["pids_limit"] > 0, name


def test_nobody_runs_as_root_but_those_who_prepare_volumes() -> None:
    users = {name: service.get("user", "of the image") for name, service in one_node()["services"].items()}
    assert {name for name, user in users.items() if user.startswith("0")} == {"credentials", "demo-input"}
    assert "\nUSER 0" not in (DEPLOY / "Dockerfile").read_text()
    for role, uid in (("producer", 10003), ("uploader", 10002), ("monitor", 10004), ("worker", 10001)):
        assert re.search(rf"AS {role}\n(?:(?!FROM).*\n)*USER {uid}:10000", (DEPLOY / "Dockerfile").read_text()), role


def test_every_image_is_pinned() -> None:
    for name, service in one_node()["services"].items():
        assert re.search(r":v?\d+\.\d+(\.\d+)?$", service["image"]), f"{name}: {service['image']}"
    assert re.search(r"^ARG PYTHON=python:\d+\.\d+\.\d+-", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)


def test_workers_stop_before_uploaders_and_uploaders_before_redis_each_with_time_to_finish() -> None:
    services = one_node()["services"]
    assert "uploader" in services["worker"]["depends_on"]
    assert "redis" in services["uploader"]["depends_on"]
    for name, seconds in GRACE_SECONDS.items():
        assert in_seconds(services[name]["stop_grace_period"]) >= seconds, name


def test_the_gpus_are_reserved_whole_with_the_capability_named() -> None:
    [devices] = one_node()["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["driver"] == "nvidia"
    assert devices["capabilities"] == ["gpu"]
    assert devices["count"] == -1  # all
    assert "device_ids" not in devices
    services = config("compose.yaml", "compose.cpu.yaml", environment=RUN)["services"]
    assert "deploy" not in services["worker"]
    assert services["worker"]["environment"]["HIDDENQ_DEVICES"] == "cpu"


def test_spool_and_caches_are_volumes_that_are_shared_and_may_run_code() -> None:
    services = one_node()["services"]
    for name in ("worker", "uploader"):
        mounts = {mount["target"]: mount for mount in services[name]["volumes"]}
        assert mounts["/spool"]["type"] == "volume"
        assert mounts["/cache"]["type"] == "volume"
        assert not any(mount.startswith(("/spool", "/cache")) for mount in services[name]["tmpfs"])
    spool = config("compose.yaml", "compose.ramspool.yaml", environment=RUN)["volumes"]["spool"]
    assert spool["driver_opts"]["type"] == "tmpfs"
    assert "noexec" not in str(services["worker"]["tmpfs"])


def test_grafana_asks_for_a_password_that_no_file_holds() -> None:
    environment = one_node()["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"].startswith("/run/hiddenq/")
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment


def in_seconds(duration: str) -> int:
    parts = re.findall(r"(\d+)([hms])", duration)
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)
