"""Memory for samples, used again.

Invariant: memory is handed out again only when nothing refers to it any more, because every buffer is a view whose end
is watched, and whatever is made of the buffer keeps that view. What lies idle is bounded; small buffers are not kept.

Memory that is fresh from the kernel costs a page fault for every 4 KiB, which took as long as copying a sample into it.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch

MIN_BYTES = 1 << 20
"""Smaller buffers are malloc's business, which uses them again itself."""
MAX_IDLE_BYTES = 64 << 20

_Block = npt.NDArray[np.uint8]


class BufferPool:
    """Buffers of one process."""

    def __init__(self) -> None:
        self._idle: list[_Block] = []
        self._taking = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """An uninitialised uint8 tensor of so many bytes; its memory may be up to twice that."""
        if num_bytes < MIN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        block = self._take_idle(num_bytes)
        if block is None:
            block = np.empty(-(-num_bytes // MIN_BYTES) * MIN_BYTES, np.uint8)
        view = block[:num_bytes]
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.from_numpy(view)

    def _take_idle(self, num_bytes: int) -> _Block | None:
        with self._taking:  # blocks may be given back meanwhile: they are only ever added, at the end
            fitting = [at for at, block in enumerate(self._idle) if num_bytes <= len(block) <= 2 * num_bytes]
            return self._idle.pop(min(fitting, key=lambda at: len(self._idle[at]))) if fitting else None

    def _give_back(self, block: _Block) -> None:
        """Called wherever the last reference goes, so without a lock."""
        if len(block) + sum(map(len, self._idle)) <= MAX_IDLE_BYTES:
            self._idle.append(block)
