"""Alerts of GPU workers: one that has work and makes no progress, is gone, slow, or met what a GPU should not."""

from __future__ import annotations

from grafana.builder.alerts.alert import Alert, Timing, held
from hiddenq.monitor.thresholds import STALL_FACTOR, STARTING_SECONDS, STRAGGLER_SHARE


def _gpu(family: str) -> str:
    return f'hiddenq_monitor_{family}{{role="gpu_worker"}}'


def of_gpu_workers(timing: Timing) -> tuple[Alert, ...]:
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
