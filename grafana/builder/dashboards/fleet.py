"""Fleet overview: does it go well, on every host, in every run?"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from grafana.builder.dashboards.panels import HOST, RUN, Panel, Section, build_dashboard

_RUN = 'run=~"$run"'
_HOST = 'host=~"$host"'
_COMMITTED = f"hiddenq_monitor_run_tokens_committed{{{_RUN}}}"
_UPLOADED = f"hiddenq_uploader_uploaded_bytes_total{{{_HOST}}}"


def dashboard() -> Dashboard:
    """The dashboard `hiddenq-fleet`."""
    return build_dashboard(
        uid="hiddenq-fleet",
        title="hiddenq: fleet overview",
        description="Every run and every host at a glance. Start here.",
        variables=(RUN, HOST),
        sections=(_GLANCE, _WORK, _WORKERS, _MIDDLE),
    )


_GLANCE = Section(
    title="At a glance",
    panels=(
        Panel(
            title="Done",
            description="Committed share of each run's tokens, by the ledger.",
            queries=(
                (f"hiddenq_monitor_run_tokens_committed{{{_RUN}}} / hiddenq_monitor_run_tokens{{{_RUN}}}", "{{run}}"),
            ),
            unit="percentunit",
            kind="stat",
            empty="no run",
            width=4,
            height=4,
        ),
        Panel(
            title="Tokens a second",
            description="Committed real tokens a second over the last 5 minutes, all runs chosen.",
            queries=((f"sum(hiddenq_monitor_run_tokens_per_second{{{_RUN}}})", "tokens/s"),),
            unit="cps",
            kind="stat",
            empty="no run",
            width=4,
            height=4,
        ),
        Panel(
            title="Time left",
            description="By tokens, at the present rate.",
            queries=((f"hiddenq_monitor_run_eta_seconds{{{_RUN}}}", "{{run}}"),),
            unit="s",
            kind="stat",
            empty="no rate, or done",
            width=4,
            height=4,
        ),
        Panel(
            title="GPU workers alive",
            description="Share of the registered, not drained GPU workers whose heartbeat is fresh.",
            queries=(
                (
                    f'sum(hiddenq_monitor_workers_live{{role="gpu_worker", {_HOST}}})'
                    f' / sum(hiddenq_monitor_workers_expected{{role="gpu_worker", {_HOST}}})',
                    "alive",
                ),
            ),
            unit="percentunit",
            kind="stat",
            empty="no worker",
            width=4,
            height=4,
            bad_below=1,
        ),
        Panel(
            title="Dead letters",
            description="Batches set aside after their last attempt: `hiddenq failed list`.",
            queries=((f"sum(hiddenq_monitor_dead_letters{{{_RUN}}})", "dead letters"),),
            unit="short",
            kind="stat",
            empty="no run",
            width=4,
            height=4,
            bad_above=1,
        ),
        Panel(
            title="Alerts firing",
            description="Critical and warning alerts that fire now.",
            queries=(
                (
                    'count(ALERTS{alertname=~"Hiddenq.*", alertstate="firing", severity!="info"})'
                    " or 0 * hiddenq_monitor_redis_up",
                    "firing",
                ),
            ),
            unit="short",
            kind="stat",
            empty="the monitor is gone",
            width=4,
            height=4,
            bad_above=1,
        ),
    ),
)

_WORK = Section(
    title="Work",
    panels=(
        Panel(
            title="Committed tokens a second",
            description="What reaches the object store, by run; twins don't count.",
            queries=((f"hiddenq_monitor_run_tokens_per_second{{{_RUN}}}", "{{run}}"),),
            unit="cps",
            kind="stacked",
            empty="no run",
        ),
        Panel(
            title="Tokens a second by GPU",
            description="What each GPU worker publishes to its spool.",
            queries=(
                (
                    f"rate(hiddenq_gpu_worker_tokens_total{{{_RUN}, {_HOST}}}[$__rate_interval])",
                    "{{host}} {{device}}",
                ),
            ),
            unit="cps",
            kind="stacked",
            empty="no GPU worker is scraped",
        ),
        Panel(
            title="Uploaded bytes a second",
            description="Bytes of committed shards, by host.",
            queries=(
                (
                    f"sum by (host) (rate(hiddenq_uploader_uploaded_bytes_total{{{_HOST}}}[$__rate_interval]))",
                    "{{host}}",
                ),
            ),
            unit="Bps",
            kind="stacked",
            empty="no uploader is scraped",
        ),
        Panel(
            title="Batches that wait",
            description="Depth of the extract queues. Falls to zero at the end of a run.",
            queries=((f'hiddenq_monitor_queue_depth{{queue="extract", {_RUN}}}', "{{run}}"),),
            unit="short",
            empty="no run",
        ),
        Panel(
            title="Under a lease, or waiting for another attempt",
            description="Jobs that a worker holds now, and jobs that failed and wait.",
            queries=(
                (f'hiddenq_monitor_queue_started{{queue="extract", {_RUN}}}', "extract {{run}}"),
                (f'hiddenq_monitor_queue_started{{queue="upload", {_HOST}}}', "upload {{host}}"),
                (f'hiddenq_monitor_queue_delayed{{queue="extract", {_RUN}}}', "extract delayed {{run}}"),
                (f'hiddenq_monitor_queue_delayed{{queue="upload", {_HOST}}}', "upload delayed {{host}}"),
            ),
            unit="short",
            empty="no run",
        ),
        Panel(
            title="Shards that wait for their upload",
            description="Depth of each spool's upload queue. Growing: uploads are slower than the GPUs.",
            queries=((f'hiddenq_monitor_queue_depth{{queue="upload", {_HOST}}}', "{{host}}"),),
            unit="short",
            empty="no spool",
        ),
    ),
)

_WORKERS = Section(
    title="Workers",
    panels=(
        Panel(
            title="Alive and expected",
            description="Expected: registered, neither drained nor forgotten.",
            queries=(
                (f"sum by (role) (hiddenq_monitor_workers_live{{{_HOST}}})", "{{role}} alive"),
                (f"sum by (role) (hiddenq_monitor_workers_expected{{{_HOST}}})", "{{role}} expected"),
            ),
            unit="short",
            empty="no worker",
        ),
        Panel(
            title="Workers",
            description="1 with a fresh heartbeat, 0 without; a dead one stays until it is drained or forgotten.",
            queries=((f"hiddenq_monitor_worker_up{{{_HOST}}}", "{{role}} {{host}} {{device}}"),),
            unit="short",
            kind="table",
            empty="no worker",
        ),
        Panel(
            title="Without progress",
            description="Seconds in which a GPU worker could have finished a batch and did not.",
            queries=((f"hiddenq_monitor_worker_stalled_seconds{{{_RUN}, {_HOST}}}", "{{host}} {{device}}"),),
            unit="s",
            empty="no GPU worker",
        ),
    ),
)

_MIDDLE = Section(
    title="Redis and the monitor",
    panels=(
        Panel(
            title="Redis answers",
            description="0 while Redis is away: every stage waits and keeps what it has finished.",
            queries=(("hiddenq_monitor_redis_up", "Redis"),),
            unit="short",
            kind="stat",
            empty="the monitor is gone",
            width=4,
            bad_below=1,
        ),
        Panel(
            title="Age of this picture",
            description="Since the monitor's last look at Redis that succeeded.",
            queries=(("time() - hiddenq_monitor_snapshot_timestamp_seconds", "age"),),
            unit="s",
            kind="stat",
            empty="the monitor is gone",
            width=4,
            bad_above=60,
        ),
        Panel(
            title="Redis memory",
            description="A full Redis refuses writes; then everything waits.",
            queries=(
                ("hiddenq_monitor_redis_memory_bytes", "used"),
                ("hiddenq_monitor_redis_memory_max_bytes > 0", "limit"),
            ),
            unit="bytes",
            empty="the monitor is gone",
        ),
        Panel(
            title="Scraped targets",
            description="Every target that discovery knows; 0: Prometheus can't reach it.",
            queries=((f'up{{job="hiddenq", {_HOST}}}', "{{role}} {{host}} {{device}}"),),
            unit="short",
            kind="states",
            empty="no target",
            bad_below=1,
        ),
    ),
)
