"""What Prometheus and Alertmanager are started with.

Invariant: Prometheus knows one address by name, the monitor's; every other target comes from its service discovery,
so adding a machine edits no file. A target's labels are those the monitor gives it (`target` is stable over restarts).
"""

from __future__ import annotations

from typing import Any

MONITOR = "127.0.0.1:9400"
ALERTMANAGER = "127.0.0.1:9093"
SCRAPE_SECONDS = 15
DISCOVERY_SECONDS = 10


def prometheus_configuration(
    *,
    monitor: str = MONITOR,
    alertmanager: str = ALERTMANAGER,
    rules: str = "rules/hiddenq.yaml",
    scrape_seconds: int = SCRAPE_SECONDS,
    discovery_seconds: int = DISCOVERY_SECONDS,
) -> dict[str, Any]:
    """`prometheus.yml`."""
    return {
        "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{scrape_seconds}s"},
        "rule_files": [rules],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": "hiddenq-monitor", "static_configs": [{"targets": [monitor]}]},
            {
                "job_name": "hiddenq",
                "honor_labels": True,
                "http_sd_configs": [{"url": f"http://{monitor}/sd", "refresh_interval": f"{discovery_seconds}s"}],
            },
        ],
    }


def alertmanager_configuration(
    *, webhook: str = "http://127.0.0.1:9099/", group_wait: str = "10s", group_interval: str = "1m", repeat: str = "4h"
) -> dict[str, Any]:
    """`alertmanager.yml`: one receiver; a cause silences its effects.

    A worker that is gone also looks stalled, and while Redis or the monitor is away everything looks still.
    """
    return {
        "route": {
            "receiver": "people",
            "group_by": ["alertname", "run"],
            "group_wait": group_wait,
            "group_interval": group_interval,
            "repeat_interval": repeat,
        },
        "inhibit_rules": [
            {
                "source_matchers": ['alertname = "HiddenqGpuWorkerMissing"'],
                "target_matchers": ['alertname =~ "HiddenqGpuStalled|HiddenqGpuStraggler"'],
                "equal": ["target"],
            },
            {
                "source_matchers": ['alertname =~ "HiddenqRedisDown|HiddenqMonitorDown"'],
                "target_matchers": [
                    'alertname =~ "HiddenqGpuStalled|HiddenqGpuWorkerMissing|HiddenqUploaderMissing|'
                    'HiddenqNothingFinishing|HiddenqUploadBacklogGrowing"'
                ],
            },
        ],
        "receivers": [{"name": "people", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
    }
