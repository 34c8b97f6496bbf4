"""Uploads and spools: does what the GPUs make reach the store, and is there room until it does?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from grafana.builder.dashboards.panels import HOST, Panel, Section, build_dashboard

_HOST = 'host=~"$host"'
_NONE = "no uploader is scraped"


def dashboard() -> Dashboard:
    """The dashboard `hiddenq-uploads`."""
    return build_dashboard(
        uid="hiddenq-uploads",
        title="hiddenq: uploads and spools",
        description="From the spool to the object store, by host.",
        variables=(HOST,),
        sections=(_UPLOADS, _SPOOL, _TROUBLE),
    )


def _metric(name: str) -> str:
    return f"hiddenq_uploader_{name}{{{_HOST}}}"


def _by_host(name: str) -> str:
    return f"sum by (host) (rate({_metric(name)}[$__rate_interval]))"


def _series(title: str, description: str, expr: str, unit: str, legend: str = "{{host}}", empty: str = _NONE) -> Panel:
    return Panel(title=title, description=description, queries=((expr, legend),), unit=unit, empty=empty)


_UPLOADS = Section(
    title="Uploads",
    panels=(
        _series("Bytes a second", "Bytes of committed shards.", _by_host("uploaded_bytes_total"), "Bps"),
        _series(
            "Shards a second, by result",
            "committed: the batch is done; twin: it already was; quarantined, missing: it is made again.",
            f"sum by (host, result) (rate({_metric('files_total')}[$__rate_interval]))",
            "cps",
            legend="{{host}} {{result}}",
        ),
        _series(
            "Since the last commit",
            "Time since each host committed a shard.",
            f"time() - max by (host) ({_metric('last_commit_timestamp_seconds')} > 0)",
            "s",
            empty="nothing committed yet",
        ),
        _series(
            "Shards that wait",
            "Depth of each spool's upload queue.",
            f'hiddenq_monitor_queue_depth{{queue="upload", {_HOST}}}',
            "short",
            empty="no spool",
        ),
        _series(
            "Oldest shard that waits",
            "Its age in the queue.",
            f'hiddenq_monitor_queue_oldest_seconds{{queue="upload", {_HOST}}}',
            "s",
            empty="no spool",
        ),
        Panel(
            title="Stage times",
            description="Mean and 99th percentile of each stage of an upload.",
            queries=(
                (
                    f"sum by (stage) (rate({_metric('stage_seconds_sum')}[$__rate_interval]))"
                    f" / (sum by (stage) (rate({_metric('stage_seconds_count')}[$__rate_interval])) > 0)",
                    "{{stage}} mean",
                ),
                (
                    "histogram_quantile(0.99, sum by (stage, le) "
                    f"(rate({_metric('stage_seconds_bucket')}[$__rate_interval])))",
                    "{{stage}} p99",
                ),
            ),
            unit="s",
            empty=_NONE,
        ),
    ),
)

_SPOOL = Section(
    title="Spool",
    panels=(
        Panel(
            title="Bytes in the spool",
            description="GPU workers pause above the high mark and go on below the low mark.",
            queries=(
                (f"max by (host, spool_id) ({_metric('spool_bytes')})", "{{host}} in the spool"),
                (f"max by (host, spool_id) ({_metric('spool_high_mark_bytes')})", "{{host}} high mark"),
                (f"max by (host, spool_id) ({_metric('spool_low_mark_bytes')})", "{{host}} low mark"),
            ),
            unit="bytes",
            empty=_NONE,
        ),
        Panel(
            title="Share of the high mark",
            description="As the newest report in Redis says, so it is known even when nothing on the host is scraped.",
            queries=(
                (
                    f"hiddenq_monitor_spool_bytes{{{_HOST}}} / (hiddenq_monitor_spool_high_mark_bytes{{{_HOST}}} > 0)",
                    "{{host}}",
                ),
            ),
            unit="percentunit",
            empty="no spool",
            bad_above=0.9,
        ),
        Panel(
            title="Files in the spool",
            description="Finished shards that are not committed yet.",
            queries=(
                (f"max by (host, spool_id) ({_metric('spool_files')})", "{{host}} by the uploader"),
                (f"hiddenq_monitor_spool_files{{{_HOST}}}", "{{host}} by the newest report"),
            ),
            unit="short",
            empty=_NONE,
        ),
        _series(
            "Oldest file in the spool",
            "Age of the oldest finished shard on the disk.",
            f"max by (host, spool_id) ({_metric('spool_oldest_seconds')})",
            "s",
        ),
        Panel(
            title="Disk left",
            description="Free bytes on the spool's disk, and where a line through the last 2 hours will be in 6 hours.",
            queries=(
                (f"hiddenq_monitor_spool_disk_free_bytes{{{_HOST}}}", "{{host}} by the newest report"),
                (f"min by (host, spool_id) ({_metric('disk_free_bytes')})", "{{host}} by the uploader"),
                (
                    f"predict_linear(hiddenq_monitor_spool_disk_free_bytes{{{_HOST}}}[2h], 6 * 3600)",
                    "{{host}} in 6 hours",
                ),
            ),
            unit="bytes",
            empty="no spool",
        ),
        _series(
            "Quarantine",
            "Bytes of damaged shards set aside; their batches are made again.",
            f"max by (host, spool_id) ({_metric('quarantine_bytes')})",
            "bytes",
        ),
        Panel(
            title="Spools alive",
            description="0: no process on the spool has a heartbeat; after 10 minutes its batches are made again.",
            queries=((f"hiddenq_monitor_spool_alive{{{_HOST}}}", "{{host}}"),),
            unit="short",
            kind="states",
            empty="no spool",
            bad_below=1,
        ),
    ),
)

_TROUBLE = Section(
    title="Trouble",
    panels=(
        Panel(
            title="Store away",
            description="1 while an uploader can't use the object store. No attempt is used up.",
            queries=((f"max by (host) ({_metric('store_away')})", "{{host}}"),),
            unit="short",
            kind="states",
            empty=_NONE,
            bad_above=1,
        ),
        _series(
            "Runs that wait",
            "Runs left alone for a while because their store refuses; `hiddenq status` says why. Other runs go on.",
            f"max by (host) ({_metric('waiting_runs')})",
            "short",
        ),
        _series(
            "Retries",
            "Store requests tried again, by error class.",
            f"sum by (host, error) (increase({_metric('retries_total')}[$__rate_interval]))",
            "short",
            legend="{{host}} {{error}}",
            empty="no retry",
        ),
        _series(
            "Errors",
            "Uploads that failed, by error class.",
            f"sum by (host, error) (increase({_metric('errors_total')}[$__rate_interval]))",
            "short",
            legend="{{host}} {{error}}",
            empty="no error",
        ),
        _series(
            "Failed aborts",
            "Multipart uploads that could not be aborted: their parts cost money until a lifecycle rule removes them.",
            _metric("failed_multipart_aborts_total"),
            "short",
        ),
        Panel(
            title="Uploaders",
            description="Host, spool and number of each uploader.",
            queries=((_metric("info"), ""),),
            unit="short",
            kind="table",
            empty=_NONE,
        ),
    ),
)
