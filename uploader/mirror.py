"""A copy of a run on this host's disk, beside its place in the store (`--keep-local`).

Invariant: a copy that has a manifest is whole, because shards are copied before they are committed, and the manifest
last of all the rest.
"""

from __future__ import annotations

from hiddenq.contracts import names
from hiddenq.storage import LocalStore, ObjectStore
from uploader.settings import UploaderSettings


def mirror_of(run: str, settings: UploaderSettings) -> LocalStore | None:
    """Where copies of a run are kept; None if that is not asked for."""
    return LocalStore(settings.keep_local / run) if settings.keep_local else None


def mirror_run(store: ObjectStore, mirror: ObjectStore) -> None:
    """Copy everything but the shards, the manifest last; shards are copied as they are committed."""
    keys = [info.key for info in store.list() if not info.key.startswith(names.STATES_PREFIX)]
    for key in sorted(keys, key=lambda key: (key == names.MANIFEST, key)):
        mirror.put_bytes(key, store.get_bytes(key))
