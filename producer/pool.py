"""Encoding in parallel: blocks in, encoded blocks out, in the same order.

Invariant: the result is that of one process encoding block after block, because blocks are cut before they are handed
out and collected in the order in which they were cut; and memory is bounded, because only a few blocks a process are
on the way at a time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from hiddenq.contracts.errors import UsageError
from hiddenq.model_identity import block_torch
from producer.blocks import Block
from producer.encoder import EncodedBlock, Encoder, EncoderSettings

_BLOCKS_PER_PROCESS = 3

_encoder: Encoder | None = None
"""This process's encoder, where it is one of a pool."""


def encode_blocks(
    blocks: Iterable[Block], encoder: Encoder, settings: EncoderSettings, num_processes: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Each block with what it became; by `encoder` in this process if `num_processes` is 1.

    Raises:
        UsageError: a process was killed, most likely for want of memory.
    """
    if num_processes == 1:
        for block in blocks:
            yield block, encoder.encode(block)
        return
    pool = ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    )
    waiting: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, pool.submit(_encode, block)))
            if len(waiting) >= _BLOCKS_PER_PROCESS * num_processes:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise UsageError(
            f"--processes {num_processes}: a tokenising process died, most likely for want of memory; use fewer"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(settings: EncoderSettings) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and shuts the pool down
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the parent has said it once
    if settings.tokenizer is None or not settings.tokenizer.trust_remote_code:
        block_torch()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(settings)
    gc.freeze()  # what is loaded now stays; looking through it again and again costs several per cent


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder.encode(block)
