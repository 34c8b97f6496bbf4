"""Every alert, once: what Prometheus evaluates and what Grafana evaluates come from here.

Invariant: an alert watches a symptom that only real progress clears. Heartbeats and utilisation clear none. A symptom
read from the monitor outlives the monitor: `held` keeps its last value for a quarter of an hour when, and only when,
the monitor's own series are gone, so losing it neither resolves an alert nor hides one (and has an alert of its own).

Texts use Prometheus's templates: `$labels`, `$value`. Thresholds are those of `hiddenq status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hiddenq.monitor.thresholds import (
    REDIS_FULL_SHARE,
    SPOOL_FULL_SHARE,
    STALL_FACTOR,
    STALL_FLOOR_SECONDS,
    STARTING_SECONDS,
    STRAGGLER_SHARE,
    UPLOAD_OLD_SECONDS,
)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert."""

    name: str
    expr: str
    for_seconds: int
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str
    dashboard: Literal["fleet", "gpu", "uploads", "run"]
    """Where to look first."""
    details: str = ""
    """What only Prometheus can look up while it writes the text."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a test on the clock makes shorter; everyone else takes the defaults."""

    floor_seconds: float = STALL_FLOOR_SECONDS
    """Least time without a finished batch that counts as a stall."""
    restart_seconds: int = 120
    """A restart within this pages nobody."""
    window: str = "10m"
    """Over which rates of single workers are taken."""
    interval_seconds: int = 15
    """Between two evaluations."""


DEFAULT_TIMING = Timing()


def held(selector: str) -> str:
    """The monitor's series, or its last value of up to 15 minutes while the monitor itself is gone."""
    return f"({selector} or (last_over_time({selector}[15m]) and on() absent(hiddenq_monitor_redis_up)))"


def alerts(timing: Timing = DEFAULT_TIMING) -> tuple[Alert, ...]:
    """All alerts, critical ones first within each subject."""
    return (*_of_gpu_workers(timing), *_of_runs(), *_of_uploads(timing), *_of_the_middle(timing))


def _gpu(family: str) -> str:
    return f'hiddenq_monitor_{family}{{role="gpu_worker"}}'


def _of_gpu_workers(timing: Timing) -> tuple[Alert, ...]:
    window = timing.window
    tokens = f"rate(hiddenq_gpu_worker_tokens_total[{window}])"
    waits = 'hiddenq_gpu_worker_state{state=~"starting|paused|waiting|draining|sick"}'
    had_work = (
        f"(max by (run, target) (max_over_time({waits}[{window}])) == 0\n"
        f'    and on (run) min_over_time(hiddenq_monitor_queue_depth{{queue="extract"}}[{window}]) > 0)'
    )
    ecc = "hiddenq_gpu_worker_ecc_uncorrected_errors[1h]"
    ecc_errors = f"max_over_time({ecc}) - min_over_time({ecc})"
    per_gpu = "run, host, device, target"
    return (
        Alert(
            name="HiddenqGpuStalled",
            expr=f"{held(_gpu('worker_stalled_seconds'))}\n"
            f"  > on (run) group_left ()\n"
            f"clamp_min({STALL_FACTOR:g} * {held('hiddenq_monitor_batch_p99_seconds')}, {timing.floor_seconds:g})",
            for_seconds=0,
            severity="critical",
            summary="GPU {{ $labels.host }} {{ $labels.device }}: no batch finished for "
            "{{ $value | humanizeDuration }} though there is work",
            description="It has work (a batch in hand, or batches that wait) and has finished none for longer than "
            f"{STALL_FACTOR:g} times the run's 99th percentile and {timing.floor_seconds:g} s.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqGpuWorkerMissing",
            expr=f"{held(_gpu('worker_up'))} == 0",
            for_seconds=timing.restart_seconds,
            severity="critical",
            summary="GPU worker {{ $labels.host }} {{ $labels.device }} is gone",
            description="It is registered, neither drained nor forgotten, and its heartbeat has stopped.",
            dashboard="fleet",
        ),
        Alert(
            name="HiddenqGpuWorkerSick",
            expr=f'max_over_time(hiddenq_gpu_worker_state{{state="sick"}}[{window}]) == 1',
            for_seconds=60,
            severity="critical",
            summary="GPU worker {{ $labels.host }} {{ $labels.device }} has stopped claiming",
            description="Too many of its batches failed in a row; the others go on.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqGpuWorkerStuckStarting",
            expr=f"{held('hiddenq_monitor_worker_starting_seconds')} > {STARTING_SECONDS:g}",
            for_seconds=0,
            severity="warning",
            summary="{{ $labels.role }} {{ $labels.host }} {{ $labels.device }} has been starting for "
            "{{ $value | humanizeDuration }}",
            description="It is alive and has not become ready: a download or a disk under the model hangs.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqGpuStraggler",
            expr=f"(\n  {tokens}\n"
            f"    < on (run) group_left ()\n"
            f"  {STRAGGLER_SHARE:g} * quantile by (run) (0.5, {tokens} and on (target)\n    {had_work})\n"
            f") > 0 and on (target)\n    {had_work}",
            for_seconds=600,
            severity="warning",
            summary="GPU {{ $labels.host }} {{ $labels.device }}: {{ $value | humanize }} tokens/s, under "
            f"{STRAGGLER_SHARE:.0%} of the fleet's median",
            description="It had work all the time and is slow: clocks held down, another process on the GPU, or a slow "
            "host.",
            details="{{ with printf \"hiddenq_gpu_worker_throttled{target='%s'} == 1\" $labels.target | query }}"
            "Throttled: {{ range . }}{{ .Labels.reason }} {{ end }}"
            "{{ else }}Not throttled, as far as the driver says.{{ end }}",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqGpuThrottled",
            expr=f'avg_over_time(hiddenq_gpu_worker_throttled{{reason!="power_cap"}}[{window}]) > 0.5',
            for_seconds=600,
            severity="warning",
            summary="GPU {{ $labels.host }} {{ $labels.device }} is throttled: {{ $labels.reason }}",
            description="Its clocks have been held down for more than half of the time.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqGpuErrors",
            expr=f"sum by ({per_gpu}) ({ecc_errors}) > 0\n"
            f"  or sum by ({per_gpu}) (hiddenq_gpu_worker_xid_errors_total) > 0",
            for_seconds=0,
            severity="warning",
            summary="GPU {{ $labels.host }} {{ $labels.device }}: {{ $value | humanize }} hardware errors",
            description="Uncorrected ECC errors in the last hour, or XID events since the worker's start; "
            "the card may fall off the bus next.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqSlowKernels",
            expr="hiddenq_gpu_worker_fast_kernels == 0",
            for_seconds=300,
            severity="warning",
            summary="GPU worker {{ $labels.host }} {{ $labels.device }} runs without the model's fast kernels",
            description="A hybrid model on its slow path: half speed or less.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqNonFiniteStates",
            expr=f"sum by ({per_gpu}) (increase(hiddenq_gpu_worker_nonfinite_batches_total[1h])) > 0",
            for_seconds=0,
            severity="warning",
            summary="GPU {{ $labels.host }} {{ $labels.device }} met NaN or Inf in hidden states",
            description="Such batches are not published; the dead letter names sample and layer.",
            dashboard="gpu",
        ),
        Alert(
            name="HiddenqOomSplits",
            expr=f"sum by ({per_gpu}) (increase(hiddenq_gpu_worker_oom_splits_total[30m])) > 5\n"
            f"  and sum by ({per_gpu}) (increase(hiddenq_gpu_worker_oom_splits_total[30m]))\n"
            f"    > 0.02 * sum by ({per_gpu}) (increase(hiddenq_gpu_worker_batches_total[30m]))",
            for_seconds=0,
            severity="warning",
            summary="GPU {{ $labels.host }} {{ $labels.device }} split {{ $value | humanize }} batches for memory "
            "in half an hour",
            description="More than 2 % of its batches do not fit: slower, and a sign of fragmentation or of another "
            "process on the GPU.",
            dashboard="gpu",
        ),
    )


def _of_runs() -> tuple[Alert, ...]:
    work = (
        'sum by (run) (hiddenq_monitor_queue_depth{queue="extract"} + hiddenq_monitor_queue_started{queue="extract"})'
    )
    committed, complete = held("hiddenq_monitor_run_batches_committed"), held("hiddenq_monitor_run_complete")
    return (
        Alert(
            name="HiddenqNothingFinishing",
            expr=f"({committed} == hiddenq_monitor_run_batches_committed offset 15m)\n"
            f"  and on (run) ({complete} == 0)\n"
            f"  and on (run) (min_over_time(({work})[15m:1m]) > 0)",
            for_seconds=0,
            severity="critical",
            summary="Run {{ $labels.run }}: not one batch committed for a quarter of an hour",
            description="There are batches to do, and nothing of them reaches the object store, on any host.",
            dashboard="fleet",
        ),
        Alert(
            name="HiddenqDeadLetters",
            expr=f"{held('hiddenq_monitor_dead_letters')} > 0",
            for_seconds=0,
            severity="warning",
            summary="Run {{ $labels.run }}: {{ $value | humanize }} dead letters",
            description="Batches set aside after their last attempt. The run goes on and ends incomplete.",
            dashboard="run",
        ),
        Alert(
            name="HiddenqRunEtaSlipping",
            expr="hiddenq_monitor_run_eta_seconds - (hiddenq_monitor_run_eta_seconds offset 1h) + 3600\n"
            "  > 0.25 * (hiddenq_monitor_run_eta_seconds offset 1h) > 900",
            for_seconds=900,
            severity="warning",
            summary="Run {{ $labels.run }} will end {{ $value | humanizeDuration }} later than it seemed an hour ago",
            description="The end has moved by more than a quarter of what was left.",
            dashboard="run",
        ),
        Alert(
            name="HiddenqRunFinished",
            expr="(hiddenq_monitor_run_complete == 1)\n"
            "  and on (run) (min_over_time(hiddenq_monitor_run_complete[1h]) == 0)",
            for_seconds=0,
            severity="info",
            summary="Run {{ $labels.run }} is complete",
            description="Every batch is committed. Said for an hour.",
            dashboard="run",
        ),
    )


def _of_uploads(timing: Timing) -> tuple[Alert, ...]:
    depth = held('hiddenq_monitor_queue_depth{queue="upload"}')
    uploader_up = held('hiddenq_monitor_worker_up{role="uploader"}')
    oldest = held('hiddenq_monitor_queue_oldest_seconds{queue="upload"}')
    return (
        Alert(
            name="HiddenqStoreErrors",
            expr="max by (host, spool_id) (max_over_time(hiddenq_uploader_store_away[1m])) == 1\n"
            f"  or sum by (host, spool_id) (increase(hiddenq_uploader_errors_total[{timing.window}])) > 2",
            for_seconds=timing.restart_seconds,
            severity="critical",
            summary="Uploads from {{ $labels.host }} fail: the object store can't be used",
            description="Shards stay in the spool, no attempt is used up; GPU workers pause when it is full.",
            dashboard="uploads",
        ),
        Alert(
            name="HiddenqUploaderMissing",
            expr=f"{uploader_up} == 0",
            for_seconds=timing.restart_seconds,
            severity="warning",
            summary="Uploader {{ $labels.target }} on {{ $labels.host }} is gone",
            description="It is registered, neither drained nor forgotten, and its heartbeat has stopped.",
            dashboard="uploads",
        ),
        Alert(
            name="HiddenqUploadBacklogGrowing",
            expr=f"{depth} > 20\n"
            f'  and on (spool_id) deriv(hiddenq_monitor_queue_depth{{queue="upload"}}[15m]) > 0\n'
            f"  and on (spool_id) {oldest} > {UPLOAD_OLD_SECONDS:g}",
            for_seconds=300,
            severity="warning",
            summary="{{ $labels.host }}: {{ $value | humanize }} finished shards wait for their upload, and more come",
            description="Uploads are slower than the GPUs; the spool fills and GPU workers will pause.",
            dashboard="uploads",
        ),
        Alert(
            name="HiddenqSpoolNearFull",
            expr=f"{held('hiddenq_monitor_spool_bytes')} / on (spool_id, host)\n"
            f"  ({held('hiddenq_monitor_spool_high_mark_bytes')} > 0) > {SPOOL_FULL_SHARE:g}",
            for_seconds=600,
            severity="warning",
            summary="{{ $labels.host }}: the spool is at {{ $value | humanizePercentage }} of its high mark",
            description="At 100 % the GPU workers of the host pause until uploads have made room.",
            dashboard="uploads",
        ),
        Alert(
            name="HiddenqDiskFullSoon",
            expr="predict_linear(hiddenq_monitor_spool_disk_free_bytes[2h], 6 * 3600) < 0\n"
            "  and deriv(hiddenq_monitor_spool_disk_free_bytes[30m]) < 0",
            for_seconds=900,
            severity="warning",
            summary="{{ $labels.host }}: the spool's disk will be full within 6 hours",
            description="Over two hours it has lost space at that pace. hiddenq itself stays under the high mark.",
            dashboard="uploads",
        ),
        Alert(
            name="HiddenqSpoolAway",
            expr=f"{held('hiddenq_monitor_spool_alive')} == 0\n  and on (spool_id) {depth} > 0",
            for_seconds=timing.restart_seconds,
            severity="warning",
            summary="Host {{ $labels.host }} is away with finished shards in its spool",
            description="No process on that spool has a heartbeat. After 10 minutes its batches are made again "
            "elsewhere; if it comes back before, nothing is lost.",
            dashboard="uploads",
        ),
    )


def _of_the_middle(timing: Timing) -> tuple[Alert, ...]:
    return (
        Alert(
            name="HiddenqRedisDown",
            expr="hiddenq_monitor_redis_up == 0",
            for_seconds=timing.restart_seconds,
            severity="critical",
            summary="Redis does not answer",
            description="Every stage waits and keeps what it has finished; nothing is lost, nothing moves.",
            dashboard="fleet",
        ),
        Alert(
            name="HiddenqRedisNearFull",
            expr=f"{held('hiddenq_monitor_redis_memory_bytes')}\n"
            f"  / ({held('hiddenq_monitor_redis_memory_max_bytes')} > 0) > {REDIS_FULL_SHARE:g}",
            for_seconds=300,
            severity="critical",
            summary="Redis is at {{ $value | humanizePercentage }} of its memory",
            description="A full Redis refuses writes; every stage then waits.",
            dashboard="fleet",
        ),
        Alert(
            name="HiddenqMonitorDown",
            expr="absent(hiddenq_monitor_redis_up)",
            for_seconds=timing.restart_seconds,
            severity="critical",
            summary="`hiddenq monitor` is gone: nobody watches",
            description="Alerts that read it hold their last state for 15 minutes. No new worker is discovered.",
            dashboard="fleet",
        ),
        Alert(
            name="HiddenqTargetUnreachable",
            expr='(up{job="hiddenq"} == 0) and on (target) (hiddenq_monitor_worker_up == 1)',
            for_seconds=180,
            severity="warning",
            summary="{{ $labels.role }} {{ $labels.host }} {{ $labels.device }} works, but Prometheus can't scrape it",
            description="A firewall, or an address that Prometheus does not know: set HIDDENQ_ADVERTISE_ADDRESS.",
            dashboard="fleet",
        ),
    )
