"""Uploaders: from the upload queue of a spool to the object store, each its own process, without torch.

Consumes `ShardReady` messages and the spool's files; produces objects under `states/`, ledger entries, and at a run's
end `index.parquet`, `dead_letters.jsonl` and `manifest.json`. Imports `hiddenq.contracts`, `.storage`, `.delivery` and
`.telemetry`.

    service.py    one process: claims, threads, signals     upload.py   one shard: ledger, put, commit, delete
    runs.py       the runs whose shards the spool holds     waiting.py  those that their store refuses
    status.py     metrics and the report to the fleet
    reconcile.py  spool against queue, ledger and store     rebuild.py  the ledger anew, from the store alone
    index.py      where each sample lies                    finish.py   index, manifest
    leftovers.py  twins and uploads half written, removed
"""

from uploader.finish import finish_run
from uploader.rebuild import rebuild_ledger
from uploader.service import serve
from uploader.settings import UploaderSettings

__all__ = ["UploaderSettings", "finish_run", "rebuild_ledger", "serve"]
