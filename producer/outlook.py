"""What a run would ask of time and disks: hours at a rate, bytes a second, room.

Invariant: a rate is said with where it comes from. A measured one is that of a run's own shards, from the first to the
last by the store's clock, pauses left out: what a whole pipeline of that time and place committed, not a guess.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from hiddenq.contracts import names
from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.run import ModelIdentity, RunConfig
from hiddenq.contracts.wording import counted
from hiddenq.storage import ObjectStore
from hiddenq.storage.runfiles import iterate_batches, load_run_json
from hiddenq.storage.spool import SHARDS_IN_SPOOL

_PAUSE_SECONDS = 20.0
_PAUSE_GAPS = 10
_FEWEST_GAPS = 4
"""A gap between shards that is longer than this, and than so many of the mean of all shorter ones, of which there must
be a few, is a pause and not work. Bursts don't make one: the gaps between them count in the mean."""


class Rate(Frozen):
    """How fast a run goes."""

    tokens_per_second: float
    """Of all GPUs together."""
    source: str
    """Where the number comes from, for a person."""


class RateEstimate(Frozen):
    """What a rate means for this run."""

    tokens_per_second: float
    source: str
    samples_per_second: float
    hours: float
    bytes_per_second: float
    """What spool and output must take."""


class Room(Frozen):
    """Whether a file system has room for what is to lie on it."""

    name: str
    """`output`, `spool`, or `output and spool`."""
    folder: str
    """Where; both, with a comma between them, if it is for both."""
    free_bytes: int
    needed_bytes: int
    seconds_to_full: float | None
    """How long the rate may go on if nothing leaves the folder; None without a rate."""

    @property
    def has_room(self) -> bool:
        """Whether what is needed fits into what is free."""
        return self.needed_bytes <= self.free_bytes


def estimate_rate(rate: Rate, num_tokens: int, num_samples: int, num_bytes: int) -> RateEstimate:
    """What a rate means for so much work."""
    seconds = max(num_tokens / rate.tokens_per_second, 1e-9)
    return RateEstimate(
        tokens_per_second=rate.tokens_per_second,
        source=rate.source,
        samples_per_second=num_samples / seconds,
        hours=seconds / 3600,
        bytes_per_second=num_bytes / seconds,
    )


def given_rate(tokens_per_second: float) -> Rate:
    """A rate that the user names.

    Raises:
        UsageError: it is none.
    """
    if not 0 < tokens_per_second < float("inf"):
        raise UsageError(f"--tokens-per-second {tokens_per_second:g}: a rate is above 0")
    return Rate(tokens_per_second=tokens_per_second, source="as given")


def measured_rate(store: ObjectStore, model: ModelIdentity) -> Rate:
    """The rate of the run at a location, finished or not.

    Raises:
        UsageError: no run is there, it ran another model, or it has too few shards to tell.
    """
    config = load_run_json(store)
    if config is None:
        raise UsageError(f"--rate-from {store.uri}: no run.json there; name the location of a run")
    if config.model.config_digest != model.config_digest:
        raise UsageError(
            f"--rate-from {store.uri}: it ran another model ({config.model.model}, {config.model.architecture}), "
            "whose rate says nothing about this one"
        )
    num_tokens, seconds, num_shards, num_pauses = _progress(store)
    without = f" (without {counted(num_pauses, 'pause')})" if num_pauses else ""
    if not seconds:
        raise UsageError(
            f"--rate-from {store.uri}: too few shards there to tell a rate; give --tokens-per-second, or run with more "
            "samples"
        )
    return Rate(
        tokens_per_second=num_tokens / seconds,
        source=f"measured over {counted(num_shards, 'shard')} in {seconds:,.1f} s{without} at {store.uri}"
        f"{_other_dtype(config, model)}",
    )


def find_rooms(
    output: str | None, spool: Path | None, needed_bytes: int, largest_shard: int, rate: RateEstimate | None
) -> Iterable[Room]:
    """What room the output (if it is a folder) and the spool have for so many bytes, and for some shards.

    Where both lie on one file system, it is one room, which must hold both.
    """
    wanted: list[tuple[str, Path, int]] = []
    if output is not None and "://" not in output.removeprefix("file://"):
        wanted.append(("output", Path(output.removeprefix("file://")), needed_bytes))
    if spool is not None:
        wanted.append(("spool", spool, SHARDS_IN_SPOOL * largest_shard))
    for _, sharing in itertools.groupby(wanted, key=lambda want: _existing(want[1]).stat().st_dev):
        names, folders, needed = zip(*sharing, strict=True)
        free = shutil.disk_usage(_existing(folders[0])).free
        yield Room(
            name=" and ".join(names),
            folder=", ".join(map(str, folders)),
            free_bytes=free,
            needed_bytes=sum(needed),
            seconds_to_full=free / rate.bytes_per_second if rate and rate.bytes_per_second else None,
        )


def _progress(store: ObjectStore) -> tuple[int, float, int, int]:
    """Tokens, the seconds and the number of shards in which they were committed; twins, the first and pauses left out.

    And how many pauses there were.
    """
    times: dict[str, float] = {}
    for info in store.list(names.STATES_PREFIX):
        if parsed := names.parse_shard_name(info.key):
            times[parsed[0]] = min(info.modified, times.get(parsed[0], info.modified))
    tokens = {batch.batch_id: batch.num_tokens for batch in iterate_batches(store) if batch.batch_id in times}
    ordered = sorted((time, batch) for batch, time in times.items() if batch in tokens)
    gaps = sorted((later - earlier, batch) for (earlier, _), (later, batch) in pairwise(ordered))
    seconds, num_gaps = sum(gap for gap, _ in gaps), len(gaps)
    while len(gaps) > _FEWEST_GAPS and gaps[-1][0] > _PAUSE_SECONDS:
        longest, num_shorter = gaps[-1][0], len(gaps) - 1
        if longest * num_shorter <= _PAUSE_GAPS * (seconds - longest):
            break
        seconds -= longest
        gaps.pop()
    return sum(tokens[batch] for _, batch in gaps), seconds, len(gaps), num_gaps - len(gaps)


def _other_dtype(config: RunConfig, model: ModelIdentity) -> str:
    return f", which ran in {config.model.dtype}" if config.model.dtype != model.dtype else ""


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
