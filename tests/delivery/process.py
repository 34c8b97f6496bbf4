"""A worker as a process of its own, to send signals to: `python -m tests.delivery.process URL PASSWORD MODE`.

Modes: `hold` claims three batches, brings one to the GPU and waits to be stopped, then publishes what it holds;
`native` likewise, but its main thread sits in a call that no Python code interrupts; `stall` stays in a stage past its
deadline; `newer` claims until something ends it.
"""

from __future__ import annotations

import ctypes
import sys
import time

from hiddenq.contracts.errors import HiddenqError
from hiddenq.contracts.messages import BatchJob
from hiddenq.delivery import Consumer, connect, worker_name
from tests.delivery.conftest import FAST, report, shard


def lock_twice() -> None:
    """Never returns, and no signal interrupts it."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def main(url: str, password: str, mode: str) -> int:
    """Run one mode; returns the exit status."""
    settings = FAST.model_copy(update={"stage_seconds": {"gpu": 0.5 if mode == "stall" else 600.0}})
    consumer = Consumer(
        connect(url, password=password),
        "hiddenq-extract-run",
        BatchJob,
        name=worker_name("gpu"),
        settings=settings,
        report=lambda: report("gpu_worker"),
    )
    consumer.install_signals()
    with consumer:
        claims = consumer.claim(3)
        if claims:
            consumer.enter(claims[0], "gpu")
        print("holding", flush=True)
        if mode == "native":
            lock_twice()
        elif mode == "stall":
            time.sleep(600)
        while mode == "newer":
            consumer.claim()
        consumer.stopping.wait()
        if len(sys.argv) > 4:
            time.sleep(float(sys.argv[4]))
        for claim in claims:
            consumer.publish(claim, shard(claim))
    print("drained", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:4]))
    except HiddenqError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
