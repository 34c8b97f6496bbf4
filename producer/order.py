"""The order of samples: the longest first, or shuffled among similar lengths; however many they are.

Invariant: the order is a function of the samples' lengths, their places and the seed. Memory holds a few runs of keys,
whatever the number of samples: the rest lies on disk in sorted runs, which are merged one range of keys at a time.

A sample is a key, uint64: the complement of its length above its place in the spill, so ascending keys are the
longest first and, among equals, in the order of the rows.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from producer.batching import MAX_LENGTH, RotaryLimits
from producer.samples import EncodedBlock
from producer.spill import needing_room

Keys = npt.NDArray[np.uint64]
LengthArray = npt.NDArray[np.int64]

RUN_KEYS = 1 << 22
"""Keys in a run: 32 MiB."""
_MARK_EVERY = 1 << 10
"""One of so many keys of a run is remembered, to divide the runs into ranges of about a run's size."""
_PLACE_BITS = 40
_BAND = 1 / 64
"""Relative width of a band of similar lengths, in which a shuffle may move samples: it costs half of it in padding."""
_CHUNK = 1 << 16


def make_keys(lengths: LengthArray, first_place: int) -> Keys:
    """Keys of successive samples."""
    places = np.arange(first_place, first_place + len(lengths), dtype=np.uint64)
    return (MAX_LENGTH - lengths.astype(np.uint64)) << np.uint64(_PLACE_BITS) | places


def key_lengths(keys: Keys) -> LengthArray:
    """Lengths, in tokens."""
    return (MAX_LENGTH - (keys >> np.uint64(_PLACE_BITS))).astype(np.int64)


def key_places(keys: Keys) -> npt.NDArray[np.int64]:
    """Places in the spill, 0-based."""
    return (keys & np.uint64((1 << _PLACE_BITS) - 1)).astype(np.int64)


def iterate_samples(chunks: Iterator[Keys]) -> Iterator[tuple[int, int]]:
    """Place and length, sample by sample."""
    for chunk in chunks:
        for begin in range(0, len(chunk), _CHUNK):
            keys = chunk[begin : begin + _CHUNK]
            yield from zip(key_places(keys).tolist(), key_lengths(keys).tolist(), strict=True)


def iterate_lengths(chunks: Iterator[Keys]) -> Iterator[int]:
    """Lengths, sample by sample."""
    return (length for _, length in iterate_samples(chunks))


class SampleOrder:
    """Collects samples in the order of the rows, then gives them in the order of the plan."""

    def __init__(self, scratch: Callable[[], Path], run_keys: int = RUN_KEYS) -> None:
        """`scratch` gives a folder for runs of `run_keys` keys, once there is more than one."""
        self._scratch = scratch
        self._run_keys = run_keys
        self._keys = array("Q")
        self._runs: list[Path] = []
        self._marks: list[Keys] = []
        self._num_samples = 0
        self.num_tokens = 0
        self.num_supervised = 0

    def __len__(self) -> int:
        return self._num_samples

    def append(self, block: EncodedBlock) -> None:
        """Add a block's samples.

        Raises:
            UsageError: no room is left.
        """
        self.append_lengths(block.lengths)
        self.num_supervised += int(block.loss_mask.sum())

    def append_lengths(self, lengths: LengthArray) -> None:
        """Add samples of which only the lengths matter."""
        self._keys.frombytes(make_keys(lengths, len(self)).tobytes())
        self._num_samples += len(lengths)
        self.num_tokens += int(lengths.sum())
        if len(self._keys) >= self._run_keys:
            self._end_run()

    def chunks(self, shuffle_seed: int | None, rotary: RotaryLimits) -> Iterator[Keys]:
        """All keys in plan order, in arrays of any size; ends appending."""
        merged = self._merged()
        return merged if shuffle_seed is None else _shuffled(merged, shuffle_seed, rotary, self._run_keys)

    def _end_run(self) -> None:
        keys = np.frombuffer(self._keys, np.uint64)
        keys.sort()
        path = self._scratch() / f"keys-{len(self._runs):05d}.bin"
        with needing_room(path.parent), path.open("wb") as file:
            file.write(keys.data)
        self._marks.append(keys[::_MARK_EVERY].copy())
        self._runs.append(path)
        self._keys = array("Q")

    def _merged(self) -> Iterator[Keys]:
        if not self._runs:
            keys = np.frombuffer(self._keys, np.uint64)
            keys.sort()
            if len(keys):
                yield keys
            return
        if self._keys:
            self._end_run()
        marks = np.sort(np.concatenate(self._marks))
        step = max(1, self._run_keys // _MARK_EVERY)
        begins = [0] * len(self._runs)
        for bound in (*marks[step::step], None):
            pieces = []
            for number, path in enumerate(self._runs):
                run = np.memmap(path, np.uint64, "r")  # mapped for this range only, so that its pages do not add up
                end = len(run) if bound is None else int(np.searchsorted(run, bound))
                pieces.append(np.array(run[begins[number] : end]))
                begins[number] = end
            keys = np.concatenate(pieces)
            keys.sort()
            if len(keys):
                yield keys


def _shuffled(chunks: Iterator[Keys], seed: int, rotary: RotaryLimits, most: int) -> Iterator[Keys]:
    """Sorted keys, shuffled within bands of similar length; a band of more than `most` samples, piece by piece."""
    held = np.empty(0, np.uint64)
    for chunk in itertools.chain(chunks, [None]):
        is_last = chunk is None
        if chunk is not None:
            held = np.concatenate([held, chunk])
        while len(held):
            longest = int(key_lengths(held[:1])[0])
            shortest = max(longest - int(longest * _BAND), rotary.shortest_beside(longest))
            end = int(np.searchsorted(held, np.uint64((MAX_LENGTH - shortest + 1) << _PLACE_BITS)))
            if end == len(held) < most and not is_last:
                break
            band = held[: min(end, most)]
            held = held[len(band) :]
            yield band[np.argsort(_scramble(band, seed), kind="stable")]


def _scramble(keys: Keys, seed: int) -> Keys:
    """A hash of places and seed: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = (keys & np.uint64((1 << _PLACE_BITS) - 1)) + np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
