"""Alerts of a run: nothing of it is committed, some of it failed, it ends later than it seemed, it is complete."""

from __future__ import annotations

from grafana.builder.alerts.alert import Alert, held


def of_runs() -> tuple[Alert, ...]:
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
