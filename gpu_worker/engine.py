"""The device's side of the pipeline: batch in, bytes of a shard in a pinned buffer out, the device never idle.

Invariant: launching a batch waits for nothing that the device does. Payloads are gathered into one of two device
buffers, copied from there by a second stream while the next batch runs, and a buffer is written again only after its
copy; a pinned buffer belongs to one batch from `launch` until its writer gives it back. On the CPU a batch is gathered
straight into its host buffer.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.extraction import Extractor
from gpu_worker.inputs import DeviceBatch, PaddedBatch
from gpu_worker.memory import OutOfMemory, RowLimits, run_in_parts
from gpu_worker.selfcheck import PendingCheck, compare_alone, shortest_row
from hiddenq import telemetry

NUM_PAYLOADS = 2
_ROUND_BYTES = 2 << 20


class Slot:
    """One host buffer, pinned where a GPU copies into it; grows to the largest batch it saw."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self.host = self._allocate(num_bytes)

    def fit(self, num_bytes: int) -> Tensor:
        """The first `num_bytes` of the buffer, uint8."""
        if self.host.numel() < num_bytes:
            self.host = self._allocate(num_bytes)
        return self.host[:num_bytes]

    def _allocate(self, num_bytes: int) -> Tensor:
        rounded = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)


class Ring:
    """The host buffers: as many batches can be between the device and the spool."""

    def __init__(self, num_slots: int, num_bytes: int, *, pinned: bool) -> None:
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(num_slots):
            self._free.put(Slot(num_bytes, pinned=pinned))

    def take(self, timeout_seconds: float) -> Slot | None:
        """A free buffer; None if all are with the writers for so long."""
        try:
            return self._free.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def give(self, slot: Slot) -> None:
        """A writer is done with the buffer."""
        self._free.put(slot)


@dataclass(kw_only=True)
class Launched:
    """A batch that the device works on."""

    slot: Slot
    payload: Tensor
    """uint8, on the host: whole once `wait` returned."""
    nonfinite_CB: Tensor
    """int32, on the host: likewise."""
    num_splits: int
    check: PendingCheck | None
    launched_at: float
    """`time.monotonic` at the launch."""
    started: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None
    finished_at: float = 0.0

    def wait(self) -> None:
        """Wait until the bytes are on the host. Raises what the device raised."""
        if self.copied is not None:
            self.copied.synchronize()
            self.finished_at = time.monotonic()


@dataclass(kw_only=True)
class DeviceTime:
    """How busy the device was between its first and its last batch."""

    first: torch.cuda.Event | None = None
    busy_seconds: float = 0.0
    span_seconds: float = 0.0

    def add(self, launched: Launched) -> float:
        """A batch ended; returns the seconds it kept the device busy."""
        if launched.started is None or launched.ended is None:
            seconds = launched.finished_at - launched.launched_at
        else:
            self.first = self.first or launched.started
            seconds = launched.started.elapsed_time(launched.ended) / 1000
            self.span_seconds = self.first.elapsed_time(launched.ended) / 1000
        self.busy_seconds += seconds
        return seconds


@dataclass
class _Payload:
    buffer: Tensor
    copied: torch.cuda.Event | None = None
    """The last copy out of the buffer."""


class Engine:
    """Launches batches on one device, one after another, from one thread."""

    def __init__(self, device: torch.device, *, payload_bytes: int = 0) -> None:
        self.device = device
        self.limits = RowLimits()
        self._on_gpu = device.type == "cuda"
        self._payloads: list[_Payload] = []
        self._copies: torch.cuda.Stream | None = None
        self._next = 0
        if self._on_gpu:
            self._copies = new_stream(device)
            self._payloads = [_Payload(self._empty(payload_bytes)) for _ in range(NUM_PAYLOADS)]

    def launch(self, extractor: Extractor, batch: PaddedBatch, slot: Slot, *, check: bool = False) -> Launched:
        """Start a batch whose bytes end up in `slot`. `check`: recompute its shortest row alone, too.

        Raises:
            TransientError: one row alone does not fit into memory.
            WrongStates: the model gave something else than it did when it was probed.
        """
        host = slot.fit(batch.num_bytes)
        if not self._on_gpu:
            return self._run_on_cpu(extractor, batch, slot, host, check)
        payload = self._payloads[self._next]
        self._next = (self._next + 1) % NUM_PAYLOADS
        if payload.buffer.numel() < batch.num_bytes:
            payload.buffer = self._empty(batch.num_bytes)
        stream = torch.cuda.current_stream(self.device)
        if payload.copied is not None:
            stream.wait_event(payload.copied)
        started, ended, copied = new_event(timed=True), new_event(timed=True), new_event(timed=False)
        launched_at = time.monotonic()
        started.record(stream)
        num_splits, nonfinite_CB, pending = self._run(extractor, batch, payload.buffer, check=check)
        ended.record(stream)
        copies = self._copies
        assert copies is not None
        copies.wait_event(ended)
        with torch.cuda.stream(copies):
            host.copy_(payload.buffer[: batch.num_bytes], non_blocking=True)
            flags = to_pinned(nonfinite_CB, copies)
            if pending is not None:
                pending = pending.moved(lambda figures: to_pinned(figures, copies))
            copied.record(copies)
        payload.copied = copied
        return Launched(
            slot=slot,
            payload=host,
            nonfinite_CB=flags,
            num_splits=num_splits,
            check=pending,
            launched_at=launched_at,
            started=started,
            ended=ended,
            copied=copied,
        )

    def run_into(self, extractor: Extractor, batch: PaddedBatch, payload: Tensor) -> None:
        """Run a batch whose bytes stay on the device: for warming up."""
        self._run(extractor, batch, payload, check=False)

    def _run_on_cpu(self, extractor: Extractor, batch: PaddedBatch, slot: Slot, host: Tensor, check: bool) -> Launched:
        launched_at = time.monotonic()
        num_splits, nonfinite_CB, pending = self._run(extractor, batch, host, check=check)
        return Launched(
            slot=slot,
            payload=host,
            nonfinite_CB=nonfinite_CB,
            num_splits=num_splits,
            check=pending,
            launched_at=launched_at,
            finished_at=time.monotonic(),
        )

    def _run(
        self, extractor: Extractor, batch: PaddedBatch, payload: Tensor, *, check: bool
    ) -> tuple[int, Tensor, PendingCheck | None]:
        with torch.inference_mode():
            on_device = extractor.upload(batch, payload)
            num_splits = run_in_parts(
                lambda first, last: extractor.run(on_device.rows(first, last)),
                num_rows=batch.num_rows,
                padded_length=batch.padded_length,
                limits=self.limits,
                release=self._release,
            )
            pending = self._check(extractor, batch, on_device) if check else None
        return num_splits, on_device.destination.nonfinite_CB, pending

    def _check(self, extractor: Extractor, batch: PaddedBatch, on_device: DeviceBatch) -> PendingCheck | None:
        """The shortest row alone; None if there is no room for that beside the batch, which it must cost nothing."""
        row = shortest_row(batch)
        try:
            return compare_alone(extractor, batch, on_device, row)
        except OutOfMemory:
            telemetry.logger().warning("self_check_left_out", sample=batch.sample_ids[row], error="out of memory")
        self._release()
        return None

    def _release(self) -> None:
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _empty(self, num_bytes: int) -> Tensor:
        rounded = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES
        return torch.empty(rounded, dtype=torch.uint8, device=self.device)


def to_pinned(values: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Copy a small tensor to the host on `stream`, which is the current one, without waiting."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    values.record_stream(stream)
    return host


def is_dead(device: torch.device) -> bool:
    """Whether the device can do nothing more for this process (a sticky CUDA error)."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return True
    return False


def new_event(*, timed: bool) -> torch.cuda.Event:
    """A CUDA event whose waiters sleep instead of spinning on a core; torch's own constructor is untyped."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed, blocking=True)
    return event


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A CUDA stream; torch's own constructor is untyped."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)
    return stream
