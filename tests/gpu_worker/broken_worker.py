"""A worker whose device dies (`dead`) or hangs (`hang`) at its first batch; run as a program by test_batch_faults."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from gpu_worker import WorkerSettings, pipeline, serve, startup
from gpu_worker.decoder import Decoder, find_decoder
from hiddenq.telemetry import configure_logging


def main(kind: str, settings: str) -> int:
    """Serve with a broken layer."""

    def break_layer(_module: Any, inputs: Any, _output: Any) -> None:
        if inputs[0].shape[1] not in (7, 24):
            if kind == "hang":
                time.sleep(600)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def find_and_break(*arguments: Any) -> Decoder:
        decoder = find_decoder(*arguments)
        decoder.layers[1].register_forward_hook(break_layer)
        return decoder

    mock.patch.object(startup, "find_decoder", find_and_break).start()
    mock.patch.object(pipeline, "is_dead", return_value=True).start()  # what a GPU with a sticky error answers
    configure_logging()
    return serve(WorkerSettings.model_validate_json(settings))


sys.exit(main(sys.argv[1], sys.argv[2]))
