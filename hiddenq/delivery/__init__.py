"""Delivery: claims, leases, fenced completion over RQ and Redis, and the ledger of a run.

Consumes messages of `hiddenq.contracts` and a Redis; produces claims for the stages, and in Redis exactly the data that
RQ 3.0.0 would write, so its tools show the truth. Imports nothing else of ours but `contracts` and `telemetry`.

The promise: at-least-once work, exactly one committed shard a batch, nothing lost, whatever process, host, Redis or
store dies, at whatever moment. Where to read it:

    consumer.py     the one interface of both stages, with the diagram of a job's states
    endings.py      its other half: how a claim ends
    lua/            every move as one atomic step, on the Redis server's clock; common.lua has the glossary of keys
    reaper.py       who calls whom dead, and on what evidence
    enqueue.py      from a plan to a bounded queue, as a reconciliation
"""

from hiddenq.delivery.connection import OUTAGE_SECONDS, connect, through_outage
from hiddenq.delivery.consumer import Consumer
from hiddenq.delivery.dead_letters import (
    dead_batches,
    dead_letters,
    drop_dead,
    each_dead_letter,
    num_dead,
    num_foreign,
    retry_dead,
)
from hiddenq.delivery.ended import KEEP_ENDED_SECONDS, EndedRuns
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
)
from hiddenq.delivery.ledger import Ledger, LedgerTotals
from hiddenq.delivery.location import LocationLock
from hiddenq.delivery.outlook import stuck_reason, upload_is_live, uploads_of
from hiddenq.delivery.reaper import Reaper, execution_is_dead, execution_is_known, spool_file_names
from hiddenq.delivery.runs import (
    RunRecord,
    batch_seconds,
    cancel,
    known_run,
    list_runs,
    live_runs,
    load_run,
    mark_finished,
    record_self_check,
    run_state,
    save_run,
    self_checks,
)
from hiddenq.delivery.server import EmbeddedServer
from hiddenq.delivery.server_guard import ServerGuard
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.transitions import Claim
from hiddenq.delivery.whereabouts import worker_name

__all__ = [
    "KEEP_ENDED_SECONDS",
    "OUTAGE_SECONDS",
    "Claim",
    "Consumer",
    "DeliverySettings",
    "EmbeddedServer",
    "EndedRuns",
    "EnqueueReport",
    "FleetSnapshot",
    "Ledger",
    "LedgerTotals",
    "LocationLock",
    "QueueState",
    "Reaper",
    "RunRecord",
    "RunState",
    "ServerGuard",
    "SpoolState",
    "WorkerStatus",
    "batch_seconds",
    "cancel",
    "connect",
    "dead_batches",
    "dead_letters",
    "drain",
    "drop_dead",
    "each_dead_letter",
    "enqueue",
    "execution_is_dead",
    "execution_is_known",
    "fleet",
    "forget",
    "known_run",
    "list_runs",
    "live_runs",
    "load_run",
    "mark_finished",
    "num_dead",
    "num_foreign",
    "record_self_check",
    "restore_uploads",
    "retry_dead",
    "run_state",
    "save_run",
    "self_checks",
    "spool_file_names",
    "stuck_reason",
    "through_outage",
    "upload_is_live",
    "uploads_of",
    "worker_name",
]
