"""Runs as Redis knows them: what a worker needs to join one, and whether it is still going on.

Invariant: a run's record is the same for every host and is never changed; its state is one of `live`, `finished`
(manifest written) and `cancelled`, and only `save_run` makes a run live again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import redis
from pydantic import ValidationError

from hiddenq.contracts import names
from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import RedisRefused, UsageError
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.contracts.run import RunConfig
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.key_types import reading
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.settings import DeliverySettings

State = Literal["live", "finished", "cancelled"]
MAX_SELF_CHECKS = 1000


class RunRecord(Frozen):
    """What every stage learns of a run from Redis. No secrets: credentials come from each host's environment."""

    config: RunConfig
    location: str
    """Canonical address of the output location."""
    store: dict[str, Any]
    """The store's settings."""
    delivery: DeliverySettings

    @property
    def run(self) -> str:
        """The run's id."""
        return self.config.run


def save_run(client: redis.Redis, record: RunRecord) -> None:
    """Make a run known and live."""
    with away_errors(), client.pipeline() as pipeline:
        pipeline.hset(_key(record.run), mapping={"record": record.model_dump_json(), "state": "live"})
        pipeline.sadd("hiddenq:runs", record.run)
        pipeline.execute()


def list_runs(client: redis.Redis) -> list[RunRecord]:
    """All runs that Redis knows and this hiddenq can read, by name; another one troubles nobody but itself."""
    with away_errors():
        runs = sorted(text(run) for run in client.smembers("hiddenq:runs"))
        found = [_read(client, run) for run in runs]
    return [record for record in found if isinstance(record, RunRecord)]


def live_runs(client: redis.Redis) -> list[RunRecord]:
    """The runs that are going on, by name."""
    return [record for record in list_runs(client) if run_state(client, record.run) == "live"]


def load_run(client: redis.Redis, run: str | None = None) -> RunRecord:
    """A run by its name, or the only live one.

    Raises:
        UsageError: there is no such run, none, or more than one to choose from.
    """
    if run is not None:
        try:
            return known_run(client, run)
        except UsageError as unknown:
            raise UsageError(f"--run {unknown}") from None
    known = {record.run: record for record in list_runs(client)}
    live = [name for name in known if run_state(client, name) == "live"]
    if not live:
        ended = f"; --run shows one that ended: {_listed(list(known))}" if known else ""
        raise UsageError(f"no run is live here; start one with `hiddenq run` or `hiddenq produce`{ended}")
    if len(live) > 1:
        raise UsageError(f"name a run with --run: live runs are {_listed(live)}")
    return known[live[0]]


def known_run(client: redis.Redis, run: str) -> RunRecord:
    """A run by its name.

    Raises:
        UsageError: there is no such run.
    """
    known = {record.run: record for record in list_runs(client)}
    if run in known:
        return known[run]
    with away_errors():
        found = _read(client, run)
    if isinstance(found, str):
        raise UsageError(
            f"{run}: this hiddenq can't read what Redis keeps of it ({found}); use the hiddenq that wrote it, or start "
            "the run again, which writes it anew"
        )
    raise UsageError(f"{run}: Redis knows no such run; it knows {_listed(list(known))}")


def run_state(client: redis.Redis, run: str) -> State | None:
    """A run's state; None if Redis does not know it."""
    with away_errors():
        state = text(client.hget(_key(run), "state") or "")
    return state or None  # type: ignore[return-value]


def mark_finished(client: redis.Redis, run: str) -> None:
    """The run's manifest is written."""
    with away_errors():
        client.hset(_key(run), "state", "finished")


def cancel(client: redis.Redis, run: str) -> int:
    """Take no more batches of a run; what is started or waits for its upload goes on. Returns jobs removed.

    Raises:
        UsageError: Redis knows no such run.
    """
    known_run(client, run)
    with away_errors():
        return int(Scripts(client).run("cancel", run=run, queue=names.extract_queue(run)))


def record_self_check(client: redis.Redis, run: str, check: SelfCheck) -> None:
    """Keep the result of a self-check for the run's report."""
    with away_errors(), client.pipeline() as pipeline:
        pipeline.rpush(f"{_key(run)}:checks", check.model_dump_json())
        pipeline.ltrim(f"{_key(run)}:checks", -MAX_SELF_CHECKS, -1)
        pipeline.execute()


def self_checks(client: redis.Redis, run: str) -> list[SelfCheck]:
    """The newest self-checks of a run, oldest first."""
    with away_errors():
        lines = client.lrange(f"{_key(run)}:checks", 0, -1)
    with reading(f"{_key(run)}:checks"):
        return [SelfCheck.model_validate_json(raw(line)) for line in lines]


def batch_seconds(client: redis.Redis, run: str) -> list[float]:
    """Seconds from the GPU to the spool of the newest 500 batches, newest first."""
    with away_errors():
        found = client.lrange(f"{_key(run)}:seconds", 0, -1)
    with reading(f"{_key(run)}:seconds"):
        return [float(seconds) for seconds in found]


def _read(client: redis.Redis, run: str) -> RunRecord | str | None:
    """A run's record, or why it can't be read; None if there is none."""
    try:
        found, state = client.hmget(_key(run), "record", "state")
        if not found:
            return None
        record = RunRecord.model_validate_json(raw(found))
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
    except RedisRefused as error:
        return str(error)
    if text(state) not in get_args(State):
        return f"state: {text(state)[:80]!r}"
    if record.run != run:
        return f"it is that of run {record.run}"
    version, known = record.config.schema_version, RunConfig.supported_version()
    return record if version == known else f"schema version {version}, known is {known}"


def _key(run: str) -> str:
    return f"hiddenq:run:{run}"


def _listed(runs: Sequence[str]) -> str:
    return ", ".join(runs) or "none"
