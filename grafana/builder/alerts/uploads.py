"""Alerts of uploads: what is finished does not get into the store, and the spool or its disk fills."""

from __future__ import annotations

from grafana.builder.alerts.alert import Alert, Timing, held
from hiddenq.monitor.thresholds import SPOOL_FULL_SHARE, UPLOAD_OLD_SECONDS


def of_uploads(timing: Timing) -> tuple[Alert, ...]:
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
