"""Run progress: how far, how fast, until when, and what was left behind."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from grafana.builder.dashboards.panels import RUN, Panel, Section, build_dashboard

_RUN = 'run=~"$run"'


def dashboard() -> Dashboard:
    """The dashboard `hiddenq-run`."""
    return build_dashboard(
        uid="hiddenq-run",
        title="hiddenq: run progress",
        description="Totals are the ledger's: a batch counts once, when its shard is in the store and verified.",
        variables=(RUN,),
        sections=(_TOTALS, _PROGRESS, _REST),
    )


def _monitor(name: str) -> str:
    return f"hiddenq_monitor_{name}{{{_RUN}}}"


def _stat(title: str, description: str, expr: str, unit: str, empty: str = "no run") -> Panel:
    return Panel(
        title=title,
        description=description,
        queries=((expr, "{{run}}"),),
        unit=unit,
        kind="stat",
        empty=empty,
        width=4,
        height=4,
    )


def _series(title: str, description: str, unit: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title=title, description=description, queries=queries, unit=unit, empty="no run")


_TOTALS = Section(
    title="Totals",
    panels=(
        _stat(
            "Done",
            "Committed share of the tokens.",
            f"{_monitor('run_tokens_committed')} / {_monitor('run_tokens')}",
            "percentunit",
        ),
        _stat("Samples", "Samples in committed shards.", _monitor("run_samples_committed"), "short"),
        _stat("Batches", "Committed batches.", _monitor("run_batches_committed"), "short"),
        _stat("In the store", "Bytes of committed shards.", _monitor("run_committed_bytes"), "bytes"),
        _stat("Time left", "By tokens, at the present rate.", _monitor("run_eta_seconds"), "s", "no rate, or done"),
        _stat("Complete", "1 when every batch is committed.", _monitor("run_complete"), "short"),
    ),
)

_PROGRESS = Section(
    title="Progress",
    panels=(
        _series(
            "Samples",
            "Committed, and what the run is to have.",
            "short",
            (_monitor("run_samples_committed"), "{{run}} committed"),
            (_monitor("run_samples"), "{{run}} in all"),
        ),
        _series(
            "Tokens",
            "Committed, and what the run is to have.",
            "short",
            (_monitor("run_tokens_committed"), "{{run}} committed"),
            (_monitor("run_tokens"), "{{run}} in all"),
        ),
        _series(
            "Batches",
            "Committed, and what the run is to have.",
            "short",
            (_monitor("run_batches_committed"), "{{run}} committed"),
            (_monitor("run_batches"), "{{run}} in all"),
        ),
        _series(
            "Samples a second",
            "Committed over the last 5 minutes, and over the last hour.",
            "cps",
            (_monitor("run_samples_per_second"), "{{run}} now"),
            (f"deriv({_monitor('run_samples_committed')}[1h])", "{{run}} over an hour"),
        ),
        _series(
            "Tokens a second",
            "Committed over the last 5 minutes, and over the last hour.",
            "cps",
            (_monitor("run_tokens_per_second"), "{{run}} now"),
            (f"deriv({_monitor('run_tokens_committed')}[1h])", "{{run}} over an hour"),
        ),
        _series(
            "Time left",
            "A straight line down is a steady run; a step up is a slip.",
            "s",
            (_monitor("run_eta_seconds"), "{{run}}"),
        ),
    ),
)

_REST = Section(
    title="What is between",
    panels=(
        _series(
            "Executions and commits",
            "Batches that the workers published a second (twins included) and batches committed a second.",
            "cps",
            (f"sum by (run) (rate(hiddenq_gpu_worker_batches_total{{{_RUN}}}[$__rate_interval]))", "{{run}} executed"),
            (f"deriv({_monitor('run_batches_committed')}[5m])", "{{run}} committed"),
        ),
        _series(
            "Jobs",
            "Batches that wait, run, or wait for their next attempt.",
            "short",
            (f'hiddenq_monitor_queue_depth{{queue="extract", {_RUN}}}', "{{run}} wait"),
            (f'hiddenq_monitor_queue_started{{queue="extract", {_RUN}}}', "{{run}} run"),
            (f'hiddenq_monitor_queue_delayed{{queue="extract", {_RUN}}}', "{{run}} delayed"),
        ),
        _series(
            "Oldest batch that waits",
            "Its age in the extract queue.",
            "s",
            (f'hiddenq_monitor_queue_oldest_seconds{{queue="extract", {_RUN}}}', "{{run}}"),
        ),
        Panel(
            title="Dead letters",
            description="`hiddenq failed list` says why; `hiddenq failed retry` tries again.",
            queries=((_monitor("dead_letters"), "{{run}}"),),
            unit="short",
            empty="no run",
            bad_above=1,
        ),
        _series(
            "Batch time, 99th percentile",
            "Over the run's newest 500 batches; what the stall alert measures by.",
            "s",
            (_monitor("batch_p99_seconds"), "{{run}}"),
        ),
    ),
)
