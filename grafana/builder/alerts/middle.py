"""Alerts of what all stages need: Redis, the monitor, and Prometheus's way to its targets."""

from __future__ import annotations

from grafana.builder.alerts.alert import Alert, Timing, held
from hiddenq.monitor.thresholds import REDIS_FULL_SHARE


def of_the_middle(timing: Timing) -> tuple[Alert, ...]:
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
