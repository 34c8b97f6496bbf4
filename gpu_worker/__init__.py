"""The GPU stage: batches from the extract queue in, finished shards in the spool and jobs on its upload queue out.

Imports `hiddenq.contracts`, `.storage`, `.delivery`, `.telemetry`, `.model_identity`, `.model_files` and
`.dequantized`, torch and Transformers; never another stage. torch itself is imported by `serve`, after the environment
of its allocator and caches is set.

    settings.py     what a worker is told             service.py      `serve`: start, run, drain, exit status
    startup.py      ready for the first batch         runs.py         a run as this worker serves it
    loading.py      checkpoint → decoder              decoder.py      where its layers are, proved by a probe
    quantization.py whether one can run here          experts.py      how they run, what a token uses of them
    kernels.py      attention, fast kernels           compilation.py  what is compiled
    inputs.py       token rows → padded rows          extraction.py   one forward pass → states
    gather.py       states → the shard's bytes        memory.py       what fits; splitting
    pipeline.py     the threads around the GPU        writing.py      pinned bytes → spool → queue
    selfcheck.py    one sample alone                  gpu.py          what NVML says
    report.py       what the worker says of itself    failures.py     failures in a row
    feed.py         claims, made ready                engine.py       the device's side of the pipeline
    warmup.py       proof and tuning at start         rotary.py       scaling that forgets earlier batches
    run_table.py    the runs that a worker serves   gather_triton.py the gather on a GPU
    target_head.py  embedding, norm and lm_head     head_probe.py   what they do, found by trying
"""

from gpu_worker.settings import WorkerSettings

__all__ = ["WorkerSettings", "serve"]


def serve(settings: WorkerSettings) -> int:
    """Run one GPU worker until it is told to stop; returns the process's exit status.

    Raises:
        UserError: what the user has to mend: settings, model, Redis, store.
    """
    settings.set_environment()
    from gpu_worker.service import serve as run

    return run(settings)
