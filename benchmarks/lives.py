"""What long-lived processes take of memory and open files while they live, looked at every few seconds."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 5.0
MEMORY_SLACK, MEMORY_SLACK_BYTES, FILES_SLACK = 1.10, 16 << 20, 4
"""A process is flat if the last quarter of its life takes at most so much more than the second one."""


@dataclass
class Life:
    """What one process was seen to take, sample by sample."""

    role: str
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def growth(self) -> dict[str, Any]:
        """The second quarter of its life beside the last."""
        quarter = len(self.memory) // 4
        early, late = (slice(quarter, 2 * quarter), slice(3 * quarter, None))
        memory = [statistics.median(self.memory[part]) for part in (early, late)]
        files = [statistics.median(self.files[part]) for part in (early, late)]
        flat = memory[1] <= memory[0] * MEMORY_SLACK + MEMORY_SLACK_BYTES and files[1] <= files[0] + FILES_SLACK
        return {
            "seconds": round(len(self.memory) * SAMPLE_SECONDS),
            "megabytes": [round(value / 1e6, 1) for value in memory],
            "open_files": files,
            "flat": flat,
        }


class Lives:
    """Watches processes and all that they start, by role."""

    def __init__(self, watched: dict[str, subprocess.Popen[bytes]]) -> None:
        self._watched = watched
        self._lives: dict[int, Life] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Enough."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def growth(self) -> dict[str, dict[str, Any]]:
        """Of each process that was seen at least eight times."""
        return {f"{life.role} {pid}": life.growth() for pid, life in self._lives.items() if len(life.memory) >= 8}

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for role, process in self._watched.items():
                self._look(f"{role}, supervisor", process.pid)
                for pid in children(process.pid):
                    self._look(role, pid)

    def _look(self, role: str, pid: int) -> None:
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            num_files = len(os.listdir(f"/proc/{pid}/fd"))
            life = self._lives.setdefault(pid, Life(role))
            life.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
            life.files.append(num_files)


def children(pid: int) -> list[int]:
    """All that a process has started, and what that has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found
