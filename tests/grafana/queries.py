"""Every query of every dashboard and alert, as it stands in the committed files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from grafana.builder.files import ROOT

SELECTOR = re.compile(r"\b(hiddenq_[a-z0-9_]+|up|ALERTS)(\{[^{}]*\})?")
FAMILY_SUFFIX = re.compile(r"_(bucket|sum|count|total|created)$")


@dataclass(frozen=True)
class Query:
    """One query and where it stands."""

    where: str
    expr: str


def dashboards() -> list[dict[str, Any]]:
    """The committed dashboards."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "dashboards").glob("*.json"))]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels, without the rows that hold them together."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", [])


def panel_queries() -> list[Query]:
    """Every target of every panel."""
    return [
        Query(f"{dashboard['uid']}: {panel['title']} [{target['refId']}]", target["expr"])
        for dashboard in dashboards()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def alert_queries() -> list[Query]:
    """The expression of every alert."""
    (group,) = yaml.safe_load((ROOT / "rules" / "hiddenq.yaml").read_text())["groups"]
    return [Query(rule["alert"], rule["expr"]) for rule in group["rules"]]


def annotation_queries() -> list[Query]:
    """What is marked on the graphs of every dashboard."""
    return [
        Query(f"{dashboard['uid']}: annotation {one['name']}", one["target"]["expr"])
        for dashboard in dashboards()
        for one in dashboard["annotations"]["list"]
    ]


def selectors(expr: str) -> set[str]:
    """Every selector in an expression, alone."""
    return {name + (matchers or "") for name, matchers in SELECTOR.findall(expr)}


def metric_names(expr: str) -> set[str]:
    """Every metric in an expression."""
    return {name for name, _ in SELECTOR.findall(expr)}


def filled(expr: str, **variables: str) -> str:
    """An expression as Grafana sends it: variables at their "All", a minute as the rate interval."""
    values = {"run": ".*", "host": ".*", "gpu": ".*", "__rate_interval": "1m", **variables}
    for name, value in values.items():
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr, f"an unknown variable is left: {expr}"
    return expr
