"""The alert rules, evaluated by Prometheus's own `promtool` on stories told in series.

Proves: each alert is silent before its symptom, pending for as long as a restart may take, firing with exactly the
labels that a person needs, resolved afterwards, and silent on stories that come close; and that losing the monitor's
series neither resolves what fires nor raises anything but the alert that says so.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.builder.alerts import alerts
from grafana.builder.files import ROOT
from tests.grafana.alert_cases import CASES
from tests.grafana.alert_cases.case import GPU, MONITOR, OTHER, RUN, Case, Labels, Series, gpu, monitor, selector
from tests.grafana.programs import program

RULES = ROOT / "rules" / "hiddenq.yaml"


def run_promtool(folder: Path, tests: list[dict[str, Any]], *, only: str | None = None) -> None:
    """Run stories against the committed rules, or (quicker) one rule of them."""
    file, rules = folder / "stories.yaml", RULES
    if only:
        content = yaml.safe_load(RULES.read_text())
        (group,) = content["groups"]
        group["rules"] = [rule for rule in group["rules"] if rule["alert"] == only]
        rules = folder / "rules.yaml"
        rules.write_text(yaml.safe_dump(content))
    story = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}
    file.write_text(yaml.safe_dump(story, sort_keys=False))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def story(series: Series, *checks: dict[str, Any]) -> dict[str, Any]:
    lines = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": lines, "promql_expr_test": list(checks)}


def on_at(minute: int, alert: str, state: str, severity: str, labels: list[Labels]) -> dict[str, Any]:
    """At that minute the alert is in that state for exactly these labels."""
    common = {"alertname": alert, "alertstate": state, "severity": severity}
    samples = [{"labels": selector("ALERTS", {**one, **common}), "value": 1} for one in labels]
    expr = f'ALERTS{{alertname="{alert}", alertstate="{state}"}}'
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}


def off_at(minute: int, alert: str) -> dict[str, Any]:
    """At that minute the alert is neither pending nor firing."""
    return {"expr": f'ALERTS{{alertname="{alert}"}}', "eval_time": f"{minute}m", "exp_samples": []}


def not_firing_until(minute: int, alert: str) -> dict[str, Any]:
    """In all of the minutes until then the alert has not fired once."""
    expr = f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[{minute}m])'
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": []}


def test_promtool_accepts_the_rules_and_prometheus_its_configuration(tmp_path: Path) -> None:
    for command in (["check", "rules", str(RULES)], ["check", "config", str(ROOT / "prometheus.yml")]):
        done = subprocess.run([program("promtool"), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_amtool_accepts_alertmanagers_configuration() -> None:
    command = [program("amtool"), "check-config", str(ROOT / "alertmanager.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_story() -> None:
    assert sorted(case.alert for case in CASES) == sorted(alert.name for alert in alerts())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_alert_is_silent_then_pending_then_firing_then_resolved_and_silent_on_near_misses(
    case: Case, tmp_path: Path
) -> None:
    checks = [
        off_at(case.silent_at, case.alert),
        on_at(case.firing_at, case.alert, "firing", case.severity, case.firing),
        off_at(case.resolved_at, case.alert),
    ]
    if case.pending_at is not None:
        checks.append(on_at(case.pending_at, case.alert, "pending", case.severity, case.firing))
        checks.append(on_at(case.pending_at, case.alert, "firing", case.severity, []))
    assert case.near_misses
    near = [story(series, not_firing_until(60, case.alert)) for series in case.near_misses.values()]
    run_promtool(tmp_path, [story(case.series, *checks), *near], only=case.alert)


def test_alert_that_fires_stays_on_while_the_monitor_is_away_and_nothing_is_said_twice(tmp_path: Path) -> None:
    """The source of a firing alert is lost for ten minutes and comes back: one alert, from beginning to end."""
    series = {
        monitor("redis_up"): "1x20 stale _x8 1x30",
        monitor("worker_up", **GPU): "1x5 0x14 stale _x8 0x30",
        monitor("worker_up", **OTHER): "1x20 stale _x8 1x30",
    }
    firing = [{**GPU, **MONITOR}]
    checks = [on_at(minute, "HiddenqGpuWorkerMissing", "firing", "critical", firing) for minute in range(10, 45)]
    since = {
        "expr": 'changes(ALERTS_FOR_STATE{alertname="HiddenqGpuWorkerMissing"}[35m])',
        "eval_time": "44m",
        "exp_samples": [
            {"labels": selector("", {**firing[0], "alertname": "HiddenqGpuWorkerMissing", "severity": "critical"}),
             "value": 0}
        ],
    }  # fmt: skip
    said = on_at(29, "HiddenqMonitorDown", "firing", "critical", [{}])
    run_promtool(tmp_path, [story(series, *checks, since, said)])


def test_a_dead_worker_whose_own_series_are_gone_is_missed_all_the_same(tmp_path: Path) -> None:
    """One of four dies and its target goes: what it exported is stale, and what Redis expects is not."""
    fleet = [{**GPU, "device": f"cuda:{number}", "target": f"s1:GPU-{number}"} for number in range(4)]
    series = {monitor("redis_up"): "1x30"}
    for number, worker in enumerate(fleet):
        lives = number != 2
        series[monitor("worker_up", **worker)] = "1x30" if lives else "1x5 0x25"
        series[gpu("batches_total", worker)] = "0+5x30" if lives else "0+5x5 stale"
        series[selector("up", {**worker, "job": "hiddenq"})] = "1x30" if lives else "1x5 stale"
    missed = on_at(12, "HiddenqGpuWorkerMissing", "firing", "critical", [{**fleet[2], **MONITOR}])
    run_promtool(tmp_path, [story(series, missed)])


def test_a_restart_of_everything_within_two_minutes_pages_nobody(tmp_path: Path) -> None:
    series = {
        monitor("redis_up"): "1x10 0 1x30",
        monitor("worker_up", **GPU): "1x10 0x1 1x30",
        monitor("worker_stalled_seconds", **GPU): "0x10 60 0x30",
        monitor("batch_p99_seconds", **RUN): "10x60",
        monitor("run_complete", **RUN): "0x60",
        monitor("run_batches_committed", **RUN): "0+3x60",
    }
    fired = {
        "expr": 'count_over_time(ALERTS{alertstate="firing"}[40m])',
        "eval_time": "40m",
        "exp_samples": [],
    }
    run_promtool(tmp_path, [story(series, fired)])


def test_a_straggler_is_told_with_the_reason_its_clocks_are_held_down(tmp_path: Path) -> None:
    alert = next(one for one in alerts() if one.name == "HiddenqGpuStraggler")
    case = next(one for one in CASES if one.alert == alert.name)
    expected = {
        "exp_labels": {**case.firing[0], "severity": "warning"},
        "exp_annotations": {
            "summary": "GPU node1 cuda:0: 4 tokens/s, under 60% of the fleet's median",
            "description": alert.description,
            "details": "Throttled: hardware_thermal ",
            "runbook": "grafana/RUNBOOK.md#hiddenqgpustraggler",
            "dashboard": "/d/hiddenq-gpu",
        },
    }
    told = {"eval_time": "32m", "alertname": alert.name, "exp_alerts": [expected]}
    series = case.series | {gpu("throttled", reason="hardware_thermal"): "1x60"}
    run_promtool(tmp_path, [{**story(series), "alert_rule_test": [told]}])


def test_the_text_of_an_alert_names_host_gpu_and_time(tmp_path: Path) -> None:
    alert = next(one for one in alerts() if one.name == "HiddenqGpuStalled")
    series = {
        monitor("redis_up"): "1x20",
        monitor("batch_p99_seconds", **RUN): "100x20",
        monitor("worker_stalled_seconds", **GPU): "400x20",
    }
    expected = {
        "exp_labels": {**GPU, **MONITOR, "severity": "critical"},
        "exp_annotations": {
            "summary": "GPU node1 cuda:0: no batch finished for 6m 40s though there is work",
            "description": alert.description,
            "runbook": "grafana/RUNBOOK.md#hiddenqgpustalled",
            "dashboard": "/d/hiddenq-gpu",
        },
    }
    told = {"eval_time": "5m", "alertname": alert.name, "exp_alerts": [expected]}
    run_promtool(tmp_path, [{**story(series), "alert_rule_test": [told]}])
