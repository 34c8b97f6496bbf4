"""Passwords and certificates are made once, where they are used, and each can be read by the one who needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.programs import IMAGE, load

PROGRAM = IMAGE / "credentials.py"


def run(folder: Path, *arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, PROGRAM, "--folder", folder, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_is_there_is_kept_and_rotate_makes_all_of_it_anew(tmp_path: Path) -> None:
    run(tmp_path, "make")
    first = contents(tmp_path)
    run(tmp_path, "make")
    assert contents(tmp_path) == first
    run(tmp_path, "rotate")
    assert contents(tmp_path).keys() == first.keys()
    unchanged = {name for name, text in contents(tmp_path).items() if text == first[name]}
    assert unchanged == {"redis.names"}


def test_each_secret_can_be_read_by_one_user_alone(tmp_path: Path) -> None:
    run(tmp_path, "make")
    for path in tmp_path.iterdir():
        mode = path.stat().st_mode & 0o777
        assert mode == (0o444 if path.name == "ca.pem" else 0o400), path.name
    if os.geteuid() == 0:
        owners = load("credentials").OWNERS
        assert {name: (tmp_path / name).stat().st_uid for name in owners} == owners
        assert len(set(owners.values())) == len(owners)


def test_passwords_are_long_and_none_is_anothers(tmp_path: Path) -> None:
    run(tmp_path, "make")
    passwords = [path.read_text() for path in tmp_path.iterdir() if path.suffix == "" and "-" in path.name]
    assert len(set(passwords)) == len(passwords) == 8
    assert min(map(len, passwords)) >= 32
    assert run(tmp_path, "show", "join").strip() == (tmp_path / "redis-join").read_text()


def test_the_certificate_is_for_the_shared_address_and_a_new_one_is_made_when_it_changes(tmp_path: Path) -> None:
    run(tmp_path, "make", HIDDENQ_SHARE_ADDRESS="10.8.0.1")
    authority, first = (tmp_path / "ca.pem").read_text(), (tmp_path / "redis.pem").read_text()
    assert "IP Address:10.8.0.1" in openssl("x509", "-in", tmp_path / "redis.pem", "-noout", "-text")
    assert openssl("verify", "-CAfile", tmp_path / "ca.pem", tmp_path / "redis.pem").endswith("OK\n")
    run(tmp_path, "make", HIDDENQ_SHARE_ADDRESS="queue.example")
    assert "DNS:queue.example" in openssl("x509", "-in", tmp_path / "redis.pem", "-noout", "-text")
    assert (tmp_path / "redis.pem").read_text() != first
    assert (tmp_path / "ca.pem").read_text() == authority


def openssl(*arguments: str | Path) -> str:
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True).stdout


def test_another_machine_hands_its_one_password_to_worker_and_uploader(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("joined-password\n")
    run(tmp_path / "made", "adopt", str(tmp_path / "given"))
    assert contents(tmp_path / "made") == {"redis-worker": "joined-password", "redis-uploader": "joined-password"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a folder to a group")
def test_a_shared_folder_belongs_to_the_group_and_so_does_what_is_made_in_it(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    run(tmp_path / "made", "make", "--share", str(tmp_path / "spool"))
    status = (tmp_path / "spool").stat()
    assert (status.st_gid, status.st_mode & 0o7777) == (10000, 0o2775)
