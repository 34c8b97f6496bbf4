"""Delivery: claims, leases, fenced completion over RQ and Redis, and the ledger of a run.

Consumes messages of `hiddenq.contracts` and a Redis; produces claims for the stages, and in Redis exactly the data that
RQ 3.0.0 would write, so its tools show the truth. Imports nothing else of ours but `contracts` and `telemetry`.

The promise: at-least-once work, exactly one committed shard a batch, nothing lost, whatever process, host, Redis or
store dies, at whatever moment. Where to read it:

    consumer.py     the one interface of both stages, with the diagram of a job's states
    lua/            every move as one atomic step, on the Redis server's clock; common.lua has the glossary of keys
    reaper.py       who calls whom dead, and on what evidence
    enqueue.py      from a plan to a bounded queue, as a reconciliation
"""

from hiddenq.delivery.connection import connect
from hiddenq.delivery.consumer import Consumer, worker_name
from hiddenq.delivery.dead_letters import dead_letters, drop_dead, retry_dead
from hiddenq.delivery.enqueue import EnqueueReport, enqueue, restore_uploads
from hiddenq.delivery.fleet import (
    FleetSnapshot,
    QueueState,
    RunState,
    SpoolState,
    WorkerStatus,
    drain,
    fleet,
    forget,
    stuck_reason,
)
from hiddenq.delivery.ledger import Ledger, LedgerTotals
from hiddenq.delivery.location import LocationLock
from hiddenq.delivery.reaper import Reaper, execution_is_dead, spool_file_names
from hiddenq.delivery.runs import (
    RunRecord,
    batch_seconds,
    cancel,
    list_runs,
    load_run,
    mark_finished,
    record_self_check,
    run_state,
    save_run,
    self_checks,
)
from hiddenq.delivery.server import EmbeddedServer
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.transitions import Claim

__all__ = [
    "Claim",
    "Consumer",
    "DeliverySettings",
    "EmbeddedServer",
    "EnqueueReport",
    "FleetSnapshot",
    "Ledger",
    "LedgerTotals",
    "LocationLock",
    "QueueState",
    "Reaper",
    "RunRecord",
    "RunState",
    "SpoolState",
    "WorkerStatus",
    "batch_seconds",
    "cancel",
    "connect",
    "dead_letters",
    "drain",
    "drop_dead",
    "enqueue",
    "execution_is_dead",
    "fleet",
    "forget",
    "list_runs",
    "load_run",
    "mark_finished",
    "record_self_check",
    "restore_uploads",
    "retry_dead",
    "run_state",
    "save_run",
    "self_checks",
    "spool_file_names",
    "stuck_reason",
    "worker_name",
]
