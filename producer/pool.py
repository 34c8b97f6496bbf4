"""Encoding in parallel: blocks in, encoded blocks out, in the same order.

Invariant: the result is that of one process encoding block after block, because blocks are dealt out in turn and
collected in the same turn; and memory is bounded, because a process has four blocks at most. Nothing can wait for
ever: each process has a pipe of its own, always reads it, and dies with it; and the death of one is heard at its pipe.
A process goes on with its next block while a result waits for its turn.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from hiddenq.contracts.errors import UsageError
from hiddenq.model_identity import block_torch
from producer.blocks import Block
from producer.encoder import Encoder, EncoderSettings
from producer.samples import EncodedBlock

_BLOCKS_PER_PROCESS = 4
_END_SECONDS = 5.0


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
    workers = [_Worker(settings) for _ in range(num_processes)]
    waiting: deque[tuple[Block, _Worker]] = deque()
    try:
        for number, block in enumerate(blocks):
            if len(waiting) == _BLOCKS_PER_PROCESS * num_processes:
                done, worker = waiting.popleft()
                yield done, worker.receive()
            worker = workers[number % num_processes]
            worker.send(block)
            waiting.append((block, worker))
        while waiting:
            done, worker = waiting.popleft()
            yield done, worker.receive()
    except _Died as error:
        raise UsageError(
            f"--processes {num_processes}: a tokenising process died, most likely for want of memory; use fewer"
        ) from error
    finally:
        for worker in workers:
            worker.end()


class _Died(Exception):
    """A process is no longer at the other end of its pipe."""


class _Worker:
    """One process and this side of its pipe."""

    def __init__(self, settings: EncoderSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, block: Block) -> None:
        try:
            self._pipe.send(block)
        except OSError as error:
            raise _Died from error

    def receive(self) -> EncodedBlock:
        try:
            result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _Died from error
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, EncodedBlock)
        return result

    def end(self) -> None:
        self._pipe.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _work(pipe: Connection, settings: EncoderSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and closes the pipe
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    results: queue.SimpleQueue[EncodedBlock | Exception] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, blocks), daemon=True).start()
    threading.Thread(target=_answer, args=(pipe, results), daemon=True).start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the parent has said it once
    if settings.tokenizer is None or not settings.tokenizer.trust_remote_code:
        block_torch()
    try:
        encoder = Encoder(settings)
    except Exception as error:
        results.put(error)  # for the first block; the parent then closes the pipe
        threading.Event().wait()
    gc.freeze()  # what is loaded now stays; looking through it again and again costs several per cent
    while True:
        block = blocks.get()
        try:
            results.put(encoder.encode(block))
        except Exception as error:
            last_row = block.first_row + block.num_rows - 1
            error.add_note(f"in rows {block.first_row} to {last_row}:\n{traceback.format_exc()}")
            results.put(error)


def _listen(pipe: Connection, blocks: queue.SimpleQueue[Block]) -> None:
    """Take what comes at once, so that the parent never waits to send; end when it has gone."""
    try:
        while True:
            blocks.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _answer(pipe: Connection, results: queue.SimpleQueue[EncodedBlock | Exception]) -> None:
    """Send what is done as the parent comes to read it."""
    try:
        while True:
            pipe.send(results.get())
    except Exception:  # the parent has gone, or will hear that this process has
        os._exit(1)
