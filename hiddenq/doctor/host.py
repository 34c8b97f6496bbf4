"""The machine under the GPUs: spool, disks, shared memory, caches, limits.

Invariant: room is compared with what the run will write, not with a round number; a folder that is lost with its
container, or shared over a network, is named as such before anything is put there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hiddenq.doctor.findings import Finding, error, gib, ok, warning
from hiddenq.storage.files import file_system
from hiddenq.storage.spool import SHARDS_IN_SPOOL

MIN_SHM_BYTES = 256 << 20
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p")


def check_spool(folder: Path, *, max_shard_bytes: int, mounts: Path = Path("/proc/self/mounts")) -> Iterator[Finding]:
    """Whether a spool at `folder` can be written, is on a local disk, and holds several shards."""
    place = _nearest(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        status = place.stat()
        yield error(
            f"spool {folder}: user {os.geteuid()} may not write to {place} (owner {status.st_uid}, group "
            f"{status.st_gid}, mode {status.st_mode & 0o7777:o})",
            "no shard can be finished",
            f"sudo chgrp 10000 {place} && sudo chmod 2775 {place} (workers and uploaders share group 10000), or run as "
            "its owner",
        )
        return
    kind = file_system(place.resolve(), mounts)
    if kind == "overlay":
        yield warning(
            f"spool {folder} lies in the container's own layer",
            "finished shards are lost with the container and computed again",
            "mount a volume there (HIDDENQ_SPOOL_VOLUME in deploy/.env)",
        )
    if kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        yield warning(
            f"spool {folder} is on a network file system ({kind})",
            "every shard crosses the network twice, and a hanging server hangs the GPUs",
            "use a local disk, or memory: deploy/compose.ramspool.yaml",
        )
    free, wanted = shutil.disk_usage(place).free, SHARDS_IN_SPOOL * max_shard_bytes
    if free < wanted:
        yield error(
            f"spool {folder}: {gib(free)} free, {gib(wanted)} wanted ({SHARDS_IN_SPOOL} shards of up to "
            f"{gib(max_shard_bytes)})",
            "workers would stand still most of the time, waiting for uploads",
            "use a larger disk, or produce the run with a lower --max-shard-bytes",
        )
    else:
        yield ok(f"spool {folder}: {gib(free)} free ({kind})")


def check_room(folder: Path, *, num_bytes: int) -> Finding:
    """Whether a local output location has room for what a run still has to write."""
    place = _nearest(folder)
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        return error(
            f"{folder}: {gib(free)} free, the run still needs {gib(num_bytes)}",
            "it would stop with a full disk",
            "free some space, write to another disk or to an object store, or store fewer layers or fp8 "
            "(--storage-dtype float8_e4m3fn)",
        )
    return ok(f"{folder}: {gib(free)} free, the run still needs {gib(num_bytes)}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether /dev/shm is more than a container's default."""
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if size < MIN_SHM_BYTES:
        return warning(
            f"{folder} has {size >> 20} MiB",
            "processes that share a model over several GPUs exchange tensors there and die with a bus error",
            "shm_size: 1g in the compose file, --shm-size=1g for docker run",
        )
    return ok(f"{folder}: {gib(size)}")


def check_cache(folder: Path) -> Finding:
    """Whether kernels can be kept and loaded: a folder that can be written and is not mounted noexec."""
    place = _nearest(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        return warning(
            f"cache {folder} can't be written by user {os.geteuid()}",
            "kernels are compiled and tuned anew at every start, a minute or more",
            f"sudo chgrp 10000 {place} && sudo chmod 2775 {place}, or mount a volume there",
        )
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return error(
            f"cache {folder} is mounted noexec",
            "compiled kernels are loaded from there and would be refused",
            f"mount -o remount,exec {place}, or set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to another disk",
        )
    return ok(f"cache {folder} can be written and run from")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder.expanduser()))
    while not folder.is_dir():
        folder = folder.parent
    return folder
