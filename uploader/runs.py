"""The runs whose shards lie in a spool, as this process sees them.

Invariant: nothing is written to a location before `run.json` there was read and found to be the one that Redis has. A
path that exists on two machines is two places; this is where that is noticed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch, StoreRefused
from hiddenq.contracts.run import RunConfig
from hiddenq.delivery import EndedRuns, Ledger, RunRecord, live_runs, load_run
from hiddenq.storage import BandwidthLimit, ObjectStore, Spool, StoreObserver, StoreSettings, open_store
from hiddenq.storage.runfiles import load_run_json
from uploader.settings import UploaderSettings


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """One run, ready for its shards."""

    record: RunRecord
    store: ObjectStore
    ledger: Ledger

    @property
    def config(self) -> RunConfig:
        """What `run.json` says."""
        return self.record.config


class Runs:
    """Runs by name, each opened once."""

    def __init__(
        self,
        client: redis.Redis,
        spool: Spool,
        settings: UploaderSettings,
        observer: StoreObserver,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._spool = spool
        self._settings = settings
        self._observer = observer
        self._open: dict[str, OpenRun] = {}
        self._ended = EndedRuns(clock)
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenRun:
        """A run, opened if need be: store probed, `run.json` compared.

        Raises:
            UsageError: Redis knows no such run.
            RunMismatch: `run.json` at the location, as this host sees it, is not the run's.
            StoreRefused: the location can't be used, or lies outside the allowed prefix.
            StoreAway: the store can't be used for now.
        """
        with self._lock:
            opening = self._opening[name]
        with opening:  # a store that does not answer holds up its own run alone
            if (run := self.opened().get(name)) is None:
                run = self._open_run(load_run(self._client, name))
                with self._lock:
                    self._open[name] = run
            return run

    def live(self) -> set[str]:
        """Names of the runs that are going on, by Redis."""
        return {record.run for record in live_runs(self._client)}

    def opened(self) -> Mapping[str, OpenRun]:
        """The runs opened so far."""
        with self._lock:
            return dict(self._open)

    def let_go(self) -> None:
        """Close runs that ended a while ago, each with its connections; one that is asked for again is opened again."""
        live = self.live()
        with self._lock:
            for name in self._ended.due(self._open, live):
                del self._open[name]

    def _open_run(self, record: RunRecord) -> OpenRun:
        check_allowed(record.location, self._settings.allowed_prefix)
        settings = StoreSettings.model_validate(record.store)
        limit = BandwidthLimit(settings.bandwidth_bytes_per_second, self._spool.folder / ".bandwidth")
        store = open_store(record.location, settings, observer=self._observer, limit=limit)
        check_same_run(store, record.config)
        store.anchor(names.RUN_JSON)
        telemetry.logger().info("store_probed", run=record.run, location=store.uri, **_detail(store))
        return OpenRun(record=record, store=store, ledger=Ledger(self._client, record.run))


def check_allowed(location: str, allowed_prefix: str | None) -> None:
    """Raise `StoreRefused` unless a location lies below the allowed prefix."""
    if allowed_prefix is None:
        return
    allowed = allowed_prefix.rstrip("/")
    if location != allowed and not location.startswith(allowed + "/"):
        raise StoreRefused(f"{location}: this uploader may only write below {allowed} (--allowed-prefix)")


def check_same_run(store: ObjectStore, config: RunConfig) -> None:
    """Raise `RunMismatch` unless `run.json` at the location is the run's."""
    if store.open_local(names.RUN_JSON) is None:  # a folder that is not there is simply another machine's
        store.check_readable()
    found = load_run_json(store)
    if found is None:
        raise RunMismatch(
            f"{store.uri}: no run.json there as {telemetry.host_name()} sees it, expected the one of run {config.run}; "
            "a local folder must be the same on every machine (shared), or use s3://"
        )
    if found != config:
        differences = [str(difference) for difference in config.differences(found)] or [f"run: {found.run!r} there"]
        raise RunMismatch(
            f"{store.uri}: run.json there as {telemetry.host_name()} sees it is not that of run {config.run}: "
            f"{differences[0]}"
        )


def _detail(store: ObjectStore) -> dict[str, Any]:
    capabilities = store.probe()
    return {"confirm": capabilities.confirm, "detail": capabilities.detail}
