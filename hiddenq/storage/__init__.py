"""Where bytes lie: the object-store interface with its backends, and the spool in front of it.

Consumes files and bytes, produces objects under one location; imports `hiddenq.contracts` only, and no torch.

    settings.py   how a store is reached                store.py   the interface
    local.py      a folder                              s3.py      S3 and what speaks like it
    spool.py      finished shards that wait for upload
"""

from hiddenq.storage.location import open_store
from hiddenq.storage.settings import StoreSettings
from hiddenq.storage.spool import Spool, SpoolEntry, SpoolFile, SpoolUsage
from hiddenq.storage.store import ObjectInfo, ObjectStore, StoreCapabilities

__all__ = [
    "ObjectInfo",
    "ObjectStore",
    "Spool",
    "SpoolEntry",
    "SpoolFile",
    "SpoolUsage",
    "StoreCapabilities",
    "StoreSettings",
    "open_store",
]
