"""The output location: there, writable, on the same clock, with room for the run.

Invariant: one small object is written and removed again by the store's own probe, as is a folder that was not there. A
store's clock is read from any
answer of it, signed or not, because a skewed clock is a reason for being refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from hiddenq.contracts import names
from hiddenq.contracts.errors import HiddenqError, ObjectMissing, StoreAway
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.doctor.findings import Finding, error, ok, warning
from hiddenq.doctor.host import check_room
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.files import no_empty_folders

SKEW_WARNING_SECONDS, SKEW_ERROR_SECONDS = 60.0, 600.0
"""S3 refuses signatures that are 900 s off."""


def check_location(uri: str, settings: StoreSettings, *, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """What is wrong with the store at `uri`."""
    is_s3 = uri.lower().startswith("s3://")
    network = "check the endpoint and the network: curl -I " + (settings.endpoint_url or "the store's address")
    rights = "the credentials' rights: put, get, list and delete there"
    if settings.endpoint_url or is_s3:
        yield from check_store_clock(settings.endpoint_url or "https://s3.amazonaws.com", clock=clock)
    try:
        store = open_store(uri, settings)
        with no_empty_folders(store.open_local("")):
            capabilities = store.probe()
    except StoreAway as away:
        yield error(
            str(away),
            "finished shards would pile up in the spool",
            network if is_s3 else f"is the disk mounted, and is there room? df -h {uri}",
        )
        return
    except HiddenqError as refusal:
        yield error(
            str(refusal),
            "no shard could be stored",
            rights if is_s3 else f"may this user write there? ls -ld {uri}",
        )
        return
    yield ok(f"store {store.uri}: {capabilities.detail}")
    config = run_config(store)
    if config and (folder := store.open_local("")):
        yield check_room(Path(folder), num_bytes=remaining_bytes(config, store))


def check_store_clock(url: str, *, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Difference between this machine's clock and the store's, from the `Date` of any answer."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=5) as answer:
            date = answer.headers.get("Date")
    except HTTPError as refusal:
        date = refusal.headers.get("Date")
    except (URLError, OSError, ValueError):
        return  # the probe says what is wrong
    if not date:
        return
    skew = clock() - parsedate_to_datetime(date).timestamp()
    text = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store's"
    remedy = "sudo timedatectl set-ntp true (or chronyc makestep)"
    if abs(skew) > SKEW_ERROR_SECONDS:
        yield error(text, "the store refuses signatures that are 15 minutes off", remedy)
    elif abs(skew) > SKEW_WARNING_SECONDS:
        yield warning(text, "at 15 minutes the store refuses every request", remedy)
    else:
        yield ok("this machine's clock agrees with the store's")


def run_config(store: ObjectStore) -> RunConfig | None:
    """The run at this location, if there is one (without what reads token parts, so that no role needs numpy here)."""
    try:
        return RunConfig.parse(store.get_bytes(names.RUN_JSON))
    except ObjectMissing:
        return None


def remaining_bytes(config: RunConfig, store: ObjectStore) -> int:
    """Bytes that a run still has to write: its plan less what lies there."""
    planned = config.num_tokens * ShardFormat.of_run(config).bytes_per_token
    return max(0, planned - sum(info.num_bytes for info in store.list(names.STATES_PREFIX)))
