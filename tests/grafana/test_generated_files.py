"""The committed files are what the code builds, and nothing in them is left half said."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from grafana.builder.alerts import alerts
from grafana.builder.files import ROOT, generated_files
from hiddenq.contracts.metrics import MONITOR_FAMILIES, GpuWorkerMetrics, UploaderMetrics
from tests.grafana.queries import alert_queries, annotation_queries, dashboards, metric_names, panel_queries, panels

UNITS = {"short", "bytes", "Bps", "s", "percentunit", "cps", "celsius", "watt"}


def catalogue() -> set[str]:
    """Every metric of the catalogue, by the name of its family."""
    registry = CollectorRegistry()
    GpuWorkerMetrics(registry)
    UploaderMetrics(registry)
    kinds = {"counter": "_total"}
    names = {family.name + kinds.get(family.type, "") for family in registry.collect()}
    return names | {family.full_name for family in MONITOR_FAMILIES}


def used() -> set[str]:
    queries = [*panel_queries(), *alert_queries(), *annotation_queries()]
    return {re.sub(r"_(bucket|sum|count)$", "", name) for query in queries for name in metric_names(query.expr)}


def test_the_committed_files_are_what_the_code_builds() -> None:
    stale = [name for name, text in generated_files().items() if (ROOT / name).read_text() != text]
    assert stale == [], "run `python -m grafana.builder`"


def test_the_check_of_the_command_agrees() -> None:
    command = [sys.executable, "-m", "grafana.builder", "--check"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_no_file_is_left_over_from_an_older_builder() -> None:
    folders = ("dashboards", "rules", "provisioning")
    found = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert found <= set(generated_files())


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda one: one["uid"])
def test_every_panel_has_unit_description_link_empty_state_and_its_own_place(dashboard: dict[str, Any]) -> None:
    places: set[tuple[int, int]] = set()
    ids: set[int] = set()
    for panel in panels(dashboard):
        title = panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, title
        assert defaults["noValue"], title
        assert panel["description"].endswith((".", "`.")), title
        assert panel["links"], title
        assert panel["datasource"] == {"type": "prometheus", "uid": "hiddenq-prometheus"}, title
        ids.add(panel["id"])
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert max(x for x, _ in cells) < 24, title
        assert not cells & places, f"{title} lies over another panel"
        places |= cells
    assert len(ids) == len(list(panels(dashboard)))


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda one: one["uid"])
def test_every_dashboard_has_variables_links_and_marks_alerts_and_deploys(dashboard: dict[str, Any]) -> None:
    assert dashboard["templating"]["list"]
    assert all(one["includeAll"] and one["allValue"] == ".*" for one in dashboard["templating"]["list"])
    assert [one["name"] for one in dashboard["annotations"]["list"]] == ["Alerts", "Deploys", "Workers joined"]
    assert dashboard["links"][0]["tags"] == ["hiddenq"]


def test_variables_exist_for_run_host_and_gpu() -> None:
    names = {one["name"] for dashboard in dashboards() for one in dashboard["templating"]["list"]}
    assert names == {"run", "host", "gpu"}


def test_every_metric_of_the_catalogue_is_used_by_a_dashboard_or_an_alert() -> None:
    assert catalogue() - used() == set()


def test_no_query_names_a_metric_that_nobody_exports() -> None:
    assert used() - catalogue() == {"up", "ALERTS"}


def test_grafanas_alerts_are_the_prometheus_rules() -> None:
    (rules,) = yaml.safe_load((ROOT / "rules" / "hiddenq.yaml").read_text())["groups"]
    (managed,) = yaml.safe_load((ROOT / "provisioning" / "alerting" / "rules.yaml").read_text())["groups"]
    assert len(rules["rules"]) == len(managed["rules"]) == len(alerts())
    assert int(managed["interval"].removesuffix("s")) % 10 == 0, "Grafana refuses other intervals"
    for rule, copy in zip(rules["rules"], managed["rules"], strict=True):
        query, math, threshold = copy["data"]
        assert copy["title"] == rule["alert"]
        assert query["model"]["expr"] == rule["expr"]
        assert copy["for"] == rule["for"]
        assert copy["labels"] == rule["labels"]
        assert copy["annotations"]["summary"] == rule["annotations"]["summary"].replace("$value", "$values.A.Value")
        assert (query["datasourceUid"], math["datasourceUid"]) == ("hiddenq-prometheus", "__expr__")
        assert copy["condition"] == threshold["refId"] == "C"
        assert threshold["model"]["conditions"][0]["evaluator"] == {"params": [0], "type": "gt"}
        assert (copy["noDataState"], copy["execErrState"]) == ("OK", "KeepLast")
    assert len({copy["uid"] for copy in managed["rules"]}) == len(managed["rules"])


def test_the_contact_point_comes_from_the_environment_and_no_secret_is_committed() -> None:
    text = (ROOT / "provisioning" / "alerting" / "contact_points.yaml").read_text()
    found = yaml.safe_load(text)
    assert {one["receivers"][0]["type"] for one in found["contactPoints"]} == {"webhook", "email", "slack"}
    for one in found["contactPoints"]:
        assert all(value.startswith("${") for value in one["receivers"][0]["settings"].values())
    assert found["policies"][0]["receiver"] == "${HIDDENQ_CONTACT_POINT}"


def test_every_alert_has_severity_summary_and_a_section_that_says_what_to_type() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "RUNBOOK.md").read_text(), re.M | re.S))
    assert set(sections) == {alert.name for alert in alerts()}
    for alert in alerts():
        text = sections[alert.name]
        assert alert.severity in ("critical", "warning", "info")
        assert alert.summary
        assert alert.description.endswith(".")
        assert re.search(r"^- (Type|Mend|Look|As)", text, re.M), alert.name
        assert "`" in text or "](#" in text, f"{alert.name}: nothing to type"


def test_the_docs_name_every_metric_and_every_alert() -> None:
    text = (ROOT.parent / "docs" / "monitoring.md").read_text()
    assert [name for name in sorted(catalogue()) if f"`{name}`" not in text] == []
    assert [alert.name for alert in alerts() if f"| [{alert.name}](" not in text] == []
    assert "No real Grafana server has loaded" in text
