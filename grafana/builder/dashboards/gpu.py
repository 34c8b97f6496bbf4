"""GPU workers: which GPU is slow, stuck or unwell, and in which stage the time goes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from grafana.builder.dashboards.panels import GPU, HOST, RUN, Panel, Section, build_dashboard

_ONE = 'run=~"$run", host=~"$host", device=~"$gpu"'
_NAME = "{{host}} {{device}}"
_NONE = "no GPU worker is scraped"
_NO_NVML = "no GPU, or NVML is missing"


def dashboard() -> Dashboard:
    """The dashboard `hiddenq-gpu`."""
    return build_dashboard(
        uid="hiddenq-gpu",
        title="hiddenq: GPU workers",
        description="Each GPU: rate, stages, memory, health.",
        variables=(RUN, HOST, GPU),
        sections=(_RATE, _STAGES, _DEVICE, _TROUBLE, _WHO),
    )


def _metric(name: str, more: str = "") -> str:
    return f"hiddenq_gpu_worker_{name}{{{_ONE}{more}}}"


def _rate(name: str, more: str = "") -> str:
    return f"rate({_metric(name, more)}[$__rate_interval])"


def _series(title: str, description: str, expr: str, unit: str, legend: str = _NAME, empty: str = _NONE) -> Panel:
    return Panel(title=title, description=description, queries=((expr, legend),), unit=unit, empty=empty)


_RATE = Section(
    title="Rate",
    panels=(
        _series(
            "Tokens a second", "Real tokens published to the spool, without padding.", _rate("tokens_total"), "cps"
        ),
        _series("Samples a second", "Samples published to the spool.", _rate("samples_total"), "cps"),
        _series("Batches a second", "Batches published to the spool.", _rate("batches_total"), "cps"),
        _series(
            "Share of the median",
            "Tokens a second over the median of the run's GPUs. A straggler is under 60 %.",
            f"{_rate('tokens_total')} / on (run) group_left () quantile by (run) (0.5, {_rate('tokens_total')} > 0)",
            "percentunit",
        ),
        _series(
            "Useful MFU",
            "2 x parameters x real tokens a second over what the GPU was measured to do.",
            _metric("useful_mfu_ratio"),
            "percentunit",
        ),
        _series(
            "Padding",
            "Share of the tokens run through the model that were padding.",
            f"1 - {_rate('tokens_total')} / ({_rate('padded_tokens_total')} > 0)",
            "percentunit",
        ),
        _series("Written bytes a second", "Shards written to the spool.", _rate("written_bytes_total"), "Bps"),
        _series(
            "Busy share",
            "Share of time in which the GPU had a batch to run. Low with batches waiting: the host is too slow.",
            _rate("gpu_busy_seconds_total"),
            "percentunit",
        ),
        _series(
            "Without work",
            "Share of time with nothing to run: an empty queue, or a producer that is too slow.",
            _rate("claim_wait_seconds_total"),
            "percentunit",
        ),
    ),
)

_STAGES = Section(
    title="Where the time goes",
    panels=(
        Panel(
            title="Stage times, mean",
            description="Seconds a batch spends in each stage, over all GPUs chosen.",
            queries=(
                (
                    f"sum by (stage) ({_rate('stage_seconds_sum')})"
                    f" / (sum by (stage) ({_rate('stage_seconds_count')}) > 0)",
                    "{{stage}}",
                ),
            ),
            unit="s",
            empty=_NONE,
        ),
        Panel(
            title="Stage times, 99th percentile",
            description="The slow end, where stalls begin.",
            queries=((f"histogram_quantile(0.99, sum by (stage, le) ({_rate('stage_seconds_bucket')}))", "{{stage}}"),),
            unit="s",
            empty=_NONE,
        ),
        Panel(
            title="Batch times",
            description="From one finished batch to the next; the stall alert measures by the run's 99th percentile.",
            queries=(
                (
                    f"histogram_quantile(0.5, sum by (host, device, le) ({_rate('batch_seconds_bucket')}))",
                    f"p50 {_NAME}",
                ),
                ('hiddenq_monitor_batch_p99_seconds{run=~"$run"}', "p99 of {{run}}"),
            ),
            unit="s",
            empty=_NONE,
        ),
        _series(
            "Since the last finished batch",
            "Counts on while there is no work, too; the next panel counts only what should not be.",
            f"time() - ({_metric('last_batch_timestamp_seconds')} > 0)",
            "s",
            empty="no batch finished yet",
        ),
        _series(
            "Without progress",
            "Seconds in which the worker could have finished a batch and did not.",
            f"hiddenq_monitor_worker_stalled_seconds{{{_ONE}}}",
            "s",
        ),
        Panel(
            title="State",
            description="What each worker says it does.",
            queries=((f"{_metric('state')} == 1", "{{host}} {{device}} {{state}}"),),
            unit="short",
            kind="states",
            empty=_NONE,
        ),
        _series(
            "Starting",
            "Seconds that a live worker has been loading its model; 0 once it is ready.",
            f"hiddenq_monitor_worker_starting_seconds{{{_ONE}}}",
            "s",
        ),
    ),
)

_DEVICE = Section(
    title="Device",
    panels=(
        Panel(
            title="Memory",
            description="In use on the device, the most this process held, and the device's size.",
            queries=(
                (_metric("memory_used_bytes"), f"{_NAME} used"),
                (_metric("memory_peak_bytes"), f"{_NAME} peak"),
                (_metric("memory_total_bytes"), f"{_NAME} total"),
            ),
            unit="bytes",
            empty=_NO_NVML,
        ),
        _series(
            "Utilisation",
            "Share of time a kernel ran, by NVML. A hang shows 100 %: no proof of progress.",
            _metric("utilization_ratio"),
            "percentunit",
            empty=_NO_NVML,
        ),
        _series(
            "Temperature",
            "GPU temperature.",
            _metric("temperature_celsius"),
            "celsius",
            empty=_NO_NVML,
        ),
        _series("Power", "GPU power draw.", _metric("power_watts"), "watt", empty=_NO_NVML),
        Panel(
            title="Clocks held down",
            description="1 while the driver holds the clocks down for the reason.",
            queries=((f"{_metric('throttled')} == 1", "{{host}} {{device}} {{reason}}"),),
            unit="short",
            kind="states",
            empty="not throttled",
            bad_above=1,
        ),
        Panel(
            title="Fast kernels",
            description="1: the model's fast kernels are in use; 0: a slow path, at half speed or less.",
            queries=((_metric("fast_kernels"), _NAME),),
            unit="short",
            kind="states",
            empty=_NONE,
            bad_below=1,
        ),
    ),
)

_TROUBLE = Section(
    title="Trouble",
    panels=(
        _series(
            "Failed executions",
            "By error class. Attempts are counted only where the batch can be blamed.",
            f"increase({_metric('failures_total')}[$__rate_interval])",
            "short",
            legend="{{host}} {{device}} {{error}}",
            empty="no failure",
        ),
        _series(
            "Splits for memory",
            "Batches that did not fit and were run in parts.",
            f"increase({_metric('oom_splits_total')}[$__rate_interval])",
            "short",
        ),
        _series(
            "Non-finite batches",
            "Batches refused for NaN or Inf.",
            f"increase({_metric('nonfinite_batches_total')}[$__rate_interval])",
            "short",
        ),
        _series(
            "Leases lost",
            "Executions dropped because another owns the batch now: the process was stopped, or Redis was away.",
            f"increase({_metric('leases_lost_total')}[$__rate_interval])",
            "short",
        ),
        _series(
            "Uncorrected ECC errors",
            "Since the driver loaded.",
            _metric("ecc_uncorrected_errors"),
            "short",
            empty="no ECC memory, or NVML is missing",
        ),
        _series(
            "XID events",
            "Since the worker's start, by number.",
            _metric("xid_errors_total"),
            "short",
            legend="{{host}} {{device}} XID {{xid}}",
            empty="no XID event",
        ),
    ),
)

_WHO = Section(
    title="Who",
    panels=(
        Panel(
            title="GPU workers",
            description="GPU, model, attention kernel and spool of each worker.",
            queries=((_metric("info"), ""),),
            unit="short",
            kind="table",
            empty=_NONE,
            width=24,
        ),
    ),
)
