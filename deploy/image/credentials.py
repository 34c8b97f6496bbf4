"""Passwords, access lists and certificates of one hiddenq installation, made where they are used.

Invariant: nothing secret comes with the project or stands in a compose file. What is missing is made at the first start
and kept; each file can be read by one user only, the one of the role that needs it. Redis itself sees hashes.

    make           make what is missing
    adopt FILE     on another machine: hand the join password in FILE to this machine's worker and uploader
    show NAME      print one password: join (for another machine), admin, grafana
    rotate         make everything anew; the services must be restarted after it
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets
import subprocess
from pathlib import Path

REDIS_UID, GRAFANA_UID = 999, 472
OWNERS = {
    "redis-admin": REDIS_UID,
    "redis-worker": 10001,
    "redis-uploader": 10002,
    "redis-producer": 10003,
    "redis-monitor": 10004,
    "redis-operator": 10005,
    "redis-join": 0,
    "grafana-admin": GRAFANA_UID,
}
"""Each password's file and the user that may read it."""
SHOWN = {"join": "redis-join", "admin": "redis-admin", "grafana": "grafana-admin"}
GROUP = 10000
CERTIFICATE_DAYS = 3650


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/run/hiddenq"))
    parser.add_argument("--roles", type=Path, default=Path(__file__).with_name("users.acl.in"))
    commands = parser.add_subparsers(dest="command", required=True)
    make, rotate, adopt = (commands.add_parser(name) for name in ("make", "rotate", "adopt"))
    adopt.add_argument("file", type=Path)
    for command in (make, rotate, adopt):
        command.add_argument(
            "--share", type=Path, nargs="+", default=[], help="folders that the roles' group may write"
        )
    commands.add_parser("show").add_argument("name", choices=sorted(SHOWN))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(mode=0o711, exist_ok=True)
    if arguments.command == "show":
        print((folder / SHOWN[arguments.name]).read_text())
        return 0
    for shared in arguments.share:
        share(shared)
    if arguments.command == "adopt":
        for name in ("redis-worker", "redis-uploader"):
            write(folder / name, arguments.file.read_text().strip(), OWNERS[name])
        return 0
    if arguments.command == "rotate":
        for path in folder.iterdir():
            path.unlink()
    passwords = make_passwords(folder)
    write(folder / "users.acl", users_acl(arguments.roles.read_text(), passwords), REDIS_UID)
    make_certificates(folder, os.environ.get("HIDDENQ_SHARE_ADDRESS", ""))
    return 0


def make_passwords(folder: Path) -> dict[str, str]:
    """Every password by its role (`worker`, `join`, …); those already there are kept."""
    for name, owner in OWNERS.items():
        if not (folder / name).exists():
            write(folder / name, secrets.token_urlsafe(32), owner)
    return {name.removeprefix("redis-"): (folder / name).read_text() for name in OWNERS if name.startswith("redis-")}


def users_acl(roles: str, passwords: dict[str, str]) -> str:
    """Redis's ACL file from the roles' text: comments dropped, definitions put in, `{role}` become hashes."""
    known = {role: "#" + hashlib.sha256(password.encode()).hexdigest() for role, password in passwords.items()}
    users = []
    for line in re.sub(r"\\\n\s*", "", roles).splitlines():
        name, is_definition, text = line.partition(" = ")
        if line.startswith("user "):
            users.append(line.format(**known) + "\n")
        elif is_definition and not line.startswith("#"):
            known[name] = text
    return "".join(users)


def make_certificates(folder: Path, share_address: str) -> None:
    """A certificate authority of this installation, and Redis's certificate for the names it is reached by."""
    names = ["DNS:redis", "DNS:localhost", "IP:127.0.0.1"]
    if share_address:
        kind = "IP" if re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+", share_address) else "DNS"
        names.append(f"{kind}:{share_address}")
    wanted, made_for = ",".join(names), folder / "redis.names"
    if made_for.exists() and made_for.read_text() == wanted:
        return
    authority: list[str | Path] = ["-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"]
    if not (folder / "ca.pem").exists():
        openssl(folder, "ca", ["basicConstraints=critical,CA:TRUE"], [])
    openssl(folder, "redis", ["basicConstraints=critical,CA:FALSE", f"subjectAltName={wanted}"], authority)
    (folder / "ca.pem").chmod(0o444)
    for name in ("redis.pem", "redis.key"):
        give(folder / name, REDIS_UID)
    write(made_for, wanted, 0)


def openssl(folder: Path, name: str, extensions: list[str], authority: list[str | Path]) -> None:
    """One key and its certificate, NAME.key and NAME.pem; signed by itself without an authority."""
    command: list[str | Path] = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"),
        *("-days", str(CERTIFICATE_DAYS), "-subj", f"/CN=hiddenq-{name}"),
        *(part for extension in extensions for part in ("-addext", extension)),
        *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", *authority),
    ]
    subprocess.run(command, check=True, capture_output=True)
    for suffix in ("key", "pem"):
        (folder / f"{name}.{suffix}").chmod(0o400)


def share(folder: Path) -> None:
    """Let the group of all roles write into a volume; new files inherit the group."""
    os.chown(folder, -1, GROUP)
    folder.chmod(0o2775)


def write(path: Path, text: str, owner: int) -> None:
    """A file that its owner alone can read, whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    give(partial, owner)
    partial.replace(path)


def give(path: Path, owner: int) -> None:
    """Hand a file to its owner; made by somebody else than root (for Kubernetes), it stays theirs."""
    if os.geteuid() == 0:
        os.chown(path, owner, GROUP)


if __name__ == "__main__":
    raise SystemExit(main())
