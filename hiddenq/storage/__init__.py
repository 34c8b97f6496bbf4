"""Where bytes lie: the object-store interface with its backends, and the spool in front of it.

Consumes files and bytes, produces objects under one location; imports `hiddenq.contracts` only, and no torch.

    settings.py  how a store is reached          store.py      the interface
    local.py     a folder                        s3*.py        S3 and what speaks like it
    spool*.py    finished shards before upload   quarantine.py damaged ones
    runfiles.py  the small files of a run        body.py       what a request sends
    files.py     file system calls               bandwidth.py  a limit that a host's uploaders share
    backoff.py   how long between two tries
"""

from hiddenq.storage.backoff import RandomGrowingWait
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.local import LocalStore
from hiddenq.storage.location import holds_credentials, open_store
from hiddenq.storage.settings import StoreSettings
from hiddenq.storage.spool import Spool
from hiddenq.storage.spool_file import SpoolEntry, SpoolFile, SpoolUsage
from hiddenq.storage.spool_presence import SpoolPresence
from hiddenq.storage.store import ObjectInfo, ObjectStore, StoreCapabilities, StoreObserver

__all__ = [
    "BandwidthLimit",
    "LocalStore",
    "ObjectInfo",
    "ObjectStore",
    "RandomGrowingWait",
    "Spool",
    "SpoolEntry",
    "SpoolFile",
    "SpoolPresence",
    "SpoolUsage",
    "StoreCapabilities",
    "StoreObserver",
    "StoreSettings",
    "holds_credentials",
    "open_store",
]
