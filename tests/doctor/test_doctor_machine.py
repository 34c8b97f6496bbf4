"""Promises of the doctor about everything but GPUs: spool and disk against the plan, clocks, Redis, store, model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hiddenq.contracts.errors import StoreAway
from hiddenq.contracts.run import RunConfig
from hiddenq.doctor import DoctorSettings, Finding, diagnose
from hiddenq.doctor.__main__ import main as preflight
from hiddenq.doctor.__main__ import settings_of
from hiddenq.doctor.driver import Surroundings
from hiddenq.doctor.host import check_cache, check_shared_memory, check_spool
from hiddenq.doctor.location import check_location, check_store_clock, remaining_bytes
from hiddenq.doctor.model import check_kernels, check_model
from hiddenq.doctor.queue import check_exposure, check_queue
from hiddenq.storage import StoreSettings, open_store
from tests.doctor.fake_nvml import FakeGpu, FakeNvml
from tests.support.hub import serve_hub
from tests.support.made_run import make_run
from tests.support.redis_server import RedisServer
from tests.support.s3_server import S3Server

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


def whats(findings: list[Finding], level: str) -> str:
    for finding in findings:
        assert finding.level == "ok" or (finding.why and finding.remedy), finding
    return "\n".join(finding.what for finding in findings if finding.level == level)


def test_a_spool_too_small_for_the_plans_shards_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(20 * GIB, 13 * GIB, 7 * GIB))
    assert "7.0 GiB free, 8.0 GiB wanted" in whats(list(check_spool(tmp_path, max_shard_bytes=GIB)), "error")
    assert not whats(list(check_spool(tmp_path, max_shard_bytes=GIB // 2)), "error")


def test_a_spool_on_a_network_or_in_a_containers_layer_is_a_warning(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    for kind, words in (("nfs4", "on a network file system (nfs4)"), ("overlay", "in the container's own layer")):
        mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
        assert words in whats(list(check_spool(tmp_path, max_shard_bytes=1, mounts=mounts)), "warning")


def test_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    assert check_shared_memory(tmp_path).remedy.startswith("shm_size: 1g")


def test_a_cache_that_forbids_running_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_cache(tmp_path).level == "ok"
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "mounted noexec" in check_cache(tmp_path / "triton").what


def test_a_healthy_redis_is_well(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", redis_server.password)
    findings = list(check_queue(redis_server.bare_url))
    assert [finding.level for finding in findings] == ["ok"] * 3
    assert "answers nobody without a password" in findings[-1].what


def test_a_skewed_clock_is_a_warning_that_says_which_way(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", redis_server.password)
    ahead = list(check_queue(redis_server.bare_url, clock=lambda: time.time() + 40))
    assert "40 s ahead of Redis's" in whats(ahead, "warning")


def test_redis_that_refuses_us_is_an_error_without_a_secret_in_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", "planted-wrong-password")
    (finding,) = check_queue(redis_server.bare_url)
    assert finding.level == "error"
    assert "HIDDENQ_REDIS_PASSWORD" in finding.what
    assert finding.remedy.startswith("the user in the address")
    assert "planted" not in repr(finding)


def test_an_eviction_policy_is_an_error_and_missing_durability_or_password_a_warning(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "open", password="", appendonly="no")
    try:
        text = whats(list(check_queue(server.bare_url)), "warning")
        assert "keeps no append-only file" in text
        assert "answers without a password" in text
        with server.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        (refused,) = check_queue(server.bare_url)
        assert "maxmemory-policy allkeys-lru, which drops jobs" in refused.what
        assert refused.remedy.startswith("what it says, in Redis's settings")
    finally:
        server.stop()


def test_redis_at_a_public_address_is_a_warning_and_in_the_clear_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenq.doctor.queue._addresses", lambda host, port: ["8.8.8.8"])
    # Nobody listens there: the address alone decides.
    findings = list(check_exposure("redis://127.0.0.1:1/0"))
    assert "public address (8.8.8.8)" in whats(findings, "warning")
    assert "in the clear" in whats(findings, "error")
    assert not whats(list(check_exposure("rediss://127.0.0.1:1/0")), "error")


def clock_behind(seconds: float) -> float:
    return time.time() - seconds


def test_the_stores_clock_is_read_even_from_a_refusal(s3_server: S3Server) -> None:
    assert whats(list(check_store_clock(s3_server.endpoint_url)), "ok")
    for seconds, level in ((120, "warning"), (1200, "error")):
        findings = list(check_store_clock(s3_server.endpoint_url, clock=partial(clock_behind, seconds)))
        found = re.search(r"is (\d+) s behind the store's", whats(findings, level))
        assert found is not None
        assert abs(int(found[1]) - seconds) <= 2  # `Date` counts whole seconds


def test_a_store_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert whats(list(check_location(str(tmp_path / "file" / "run"), StoreSettings())), "error")

    def away(self: object) -> None:
        raise StoreAway("s3://b/p: no answer")

    monkeypatch.setattr("hiddenq.storage.local.LocalStore.probe", away)
    findings = list(check_location(str(tmp_path), StoreSettings()))
    assert "no answer" in whats(findings, "error")
    assert findings[-1].remedy == f"is the disk mounted, and is there room? df -h {tmp_path}", "no word of a network"


def test_room_is_compared_with_what_the_run_still_has_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path / "run").config
    assert remaining_bytes(config, open_store(tmp_path / "run")) == 0  # all of it is there
    for shard in (tmp_path / "run/states").iterdir():
        shard.unlink()
    left = remaining_bytes(config, open_store(tmp_path / "run"))
    assert left > 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(left, 1, left - 1))
    assert "the run still needs" in whats(list(check_location(str(tmp_path / "run"), StoreSettings())), "error")


def checkpoint(folder: Path, num_bytes: int, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return folder


def test_a_model_that_does_not_fit_is_an_error_and_a_close_fit_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    folder = checkpoint(tmp_path / "model", 54 * GIB, model_type="qwen3")
    assert "does not fit" in whats(list(check_model(folder, [80 * GIB, 48 * GIB])), "error")
    assert "fits closely" in whats(list(check_model(folder, [55 * GIB])), "warning")
    assert "fits: weights 54.0 GiB" in whats(list(check_model(folder, [80 * GIB])), "ok")
    assert not whats(list(check_model(folder, [48 * GIB], gpus_per_worker=2)), "error")


def test_the_model_that_the_run_names_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    folder = checkpoint(tmp_path / "model", 81 * GIB, model_type="qwen3")
    make_run(tmp_path / "run", model=str(folder))
    settings = DoctorSettings(location=str(tmp_path / "run"))
    around = Surroundings(kernel_driver=None, in_container=False, torch_cuda="13.0", torch_version="2.13.0")
    findings = diagnose(settings, nvml=FakeNvml(FakeGpu()), around=around)
    assert "model does not fit: weights 81.0 GiB" in whats(findings, "error")


def test_the_runs_largest_batch_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    run: RunConfig = make_run(tmp_path / "run").config.model_copy(update={"token_budget": 1 << 24})
    folder = checkpoint(tmp_path / "model", GIB, model_type="qwen3")
    assert "fits closely" in whats(list(check_model(folder, [5 * GIB], run=run)), "warning")


def test_a_hybrid_without_fast_kernels_and_a_missing_compiler_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("hiddenq.doctor.model.find_spec", lambda _: None)
    findings = list(check_kernels({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, on_gpu=True))
    assert "no C compiler" in whats(findings, "error")
    assert "fast kernels are not installed" in whats(findings, "warning")
    assert not list(check_kernels({"model_type": "llama"}, on_gpu=False))


@pytest.mark.parametrize(
    ("content", "what"), [('{"a":', "Expecting value"), ("[]", r"\[\]"), ('"' + "a" * 9, "Unterminated string")]
)
def test_a_config_that_is_none_is_an_error_with_its_remedy(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    [found] = check_model(tmp_path, [80 << 30])
    assert found.level == "error"
    assert re.search(rf"config\.json is not a model's config: {what}", found.what)
    assert found.remedy.startswith("copy the checkpoint again")


def test_a_checkpoint_that_can_not_be_loaded_is_an_error_on_any_machine(tmp_path: Path) -> None:
    assert "holds no config.json" in whats(list(check_model(tmp_path, [])), "error")
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in whats(list(check_model(tmp_path, [])), "error")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert "is a pointer of Git LFS" in whats(list(check_model(tmp_path, [])), "error")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert "can be read: weights" in whats(list(check_model(tmp_path, [])), "ok")


def test_a_model_that_is_nowhere_is_an_error_and_one_of_the_hubs_is_looked_for_in_its_cache_and_there(
    tmp_path: Path,
) -> None:
    home, commit = tmp_path / "hf", "c" * 40
    cached = home / "hub" / "models--owner--cached"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    checkpoint(cached / "snapshots" / commit, 1, model_type="llama")
    checkpoint(tmp_path / "here", 1, model_type="llama")
    before = sorted(tmp_path.rglob("*"))
    everywhere = {
        "/models/nothing": ("error", "--model /models/nothing: no such folder on this host"),
        "no such": ("error", "--model no such: no such folder here, and the hub says: "),
        "here": ("ok", "here can be read"),
        "owner/cached": ("ok", "owner/cached can be read"),
    }
    with serve_hub("owner/there", {}, kind="models") as address:
        expected = everywhere | {
            "nosuch": ("error", "--model nosuch: no such folder here, and the hub says: "),
            "owner/there": ("ok", "--model owner/there: the hub has it"),
        }
        assert_found(expected, tmp_path, HF_HOME=str(home), HF_ENDPOINT=address)
    missing = ("error", "not in the hub's cache on this machine; the hub can't be reached from here")
    expected = everywhere | {"nosuch": missing, "owner/there": missing}
    assert_found(expected, tmp_path, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert sorted(tmp_path.rglob("*")) == before, "nothing was fetched"


def assert_found(expected: dict[str, tuple[str, str]], folder: Path, **environment: str) -> None:
    """What is found of these models, in a process of its own: the hub's library reads its settings once."""
    script = (
        "import json, sys; from hiddenq.doctor import DoctorSettings, diagnose\n"
        "models = {model: diagnose(DoctorSettings(role='upload', model=model)) for model in sys.argv[1:]}\n"
        "print(json.dumps({model: [(f.level, f.what) for f in found] for model, found in models.items()}))"
    )
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.check_output([sys.executable, "-c", script, *expected], cwd=folder, env=environment, text=True)
    for model, [[level, what]] in json.loads(said).items():
        assert level == expected[model][0], what
        assert expected[model][1] in what


def test_nothing_is_left_where_no_location_was(tmp_path: Path) -> None:
    assert not whats(list(check_location(str(tmp_path / "some" / "where"), StoreSettings())), "error")
    assert not list(tmp_path.iterdir())
    (tmp_path / "here").mkdir()
    list(check_location(str(tmp_path / "here"), StoreSettings()))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_preflight_takes_what_its_command_would_take_from_the_same_variables() -> None:
    variables = {
        "HIDDENQ_OUT": "s3://b/p",
        "HIDDENQ_ENDPOINT_URL": "https://store.example",
        "HIDDENQ_ADDRESSING_STYLE": "virtual",
        "HIDDENQ_SSE": "aws:kms",
        "HIDDENQ_REQUEST_PAYER": "true",
        "HIDDENQ_CHECKSUMS": "metadata",
        "HIDDENQ_REGION": "",
        "HIDDENQ_GPUS_PER_WORKER": "4",
        "HIDDENQ_WORKER_MODEL": "/models/here",
        "HIDDENQ_SPOOL": "/spool",
        "PROFILE": "somebody else's",
    }
    produce, worker = settings_of("produce", variables), settings_of("worker", variables)
    assert produce.location == "s3://b/p"
    assert produce.store == StoreSettings(
        endpoint_url="https://store.example",
        addressing_style="virtual",
        sse="aws:kms",
        request_payer=True,
        checksums="metadata",
    )
    assert (worker.gpus_per_worker, worker.model, worker.spool) == (4, "/models/here", Path("/spool"))
    assert (produce.model, produce.spool, worker.location) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HIDDENQ_ENDPOINT_URL", "http://me:planted-secret@store:9000", "it holds credentials"),
        ("HIDDENQ_ADDRESSING_STYLE", "planted-secret", "HIDDENQ_ADDRESSING_STYLE: Input should be"),
        ("HIDDENQ_GPUS_PER_WORKER", "planted-secret", "HIDDENQ_GPUS_PER_WORKER: Input should be a valid integer"),
    ],
)
def test_a_variable_that_can_not_be_stops_a_container_with_its_name_and_without_its_value(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["doctor", "produce"])
    monkeypatch.setenv(name, value)
    assert preflight() == 2
    told = capsys.readouterr().err
    assert text in told
    assert "planted" not in told
    assert "Traceback" not in told


def test_a_role_is_asked_only_what_it_needs(tmp_path: Path) -> None:
    assert diagnose(DoctorSettings(role="upload")) == []
    names = " ".join(finding.what for finding in diagnose(DoctorSettings(role="worker", devices="cpu", spool=tmp_path)))
    assert "spool" in names
    assert "NVIDIA" not in names
