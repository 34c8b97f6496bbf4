"""What Grafana reads at its start: the datasource, the dashboards' folder, the alerts and who hears of them.

Invariant: a Grafana-managed alert has the expression, the patience and the texts of the Prometheus rule of its name.
An expression answers with series only while something is wrong, so no data means that all is well; an evaluation that
fails keeps the last state, so losing Prometheus resolves nothing.
"""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders.alerting import Query, Rule
from grafana_foundation_sdk.builders.expr import (
    ExprTypeThresholdConditions,
    ExprTypeThresholdConditionsEvaluator,
    TypeMath,
    TypeThreshold,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.alerting import RelativeTimeRange

from grafana.builder.alerts import Alert, alerts
from grafana.builder.rules import runbook_anchor

DATASOURCE_UID = "hiddenq-prometheus"
FOLDER = "hiddenq"
INTERVAL_SECONDS = 20
"""Between two evaluations; Grafana takes multiples of 10 only."""


def datasources() -> dict[str, Any]:
    """The one datasource; its address comes from `PROMETHEUS_URL` of Grafana's environment."""
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "hiddenq",
                "uid": DATASOURCE_UID,
                "type": "prometheus",
                "access": "proxy",
                "url": "${PROMETHEUS_URL}",
                "isDefault": True,
                "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
            }
        ],
    }


def dashboard_providers() -> dict[str, Any]:
    """Where the dashboards lie: the folder that a container mounts."""
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "hiddenq",
                "folder": FOLDER,
                "type": "file",
                "allowUiUpdates": False,
                "options": {"path": "/var/lib/grafana/dashboards/hiddenq"},
            }
        ],
    }


def contact_points() -> dict[str, Any]:
    """Three ways to be told, each with its setting from Grafana's environment; `HIDDENQ_CONTACT_POINT` picks one."""
    receivers = {
        "webhook": ("webhook", {"url": "${HIDDENQ_ALERT_WEBHOOK_URL}"}),
        "mail": ("email", {"addresses": "${HIDDENQ_ALERT_MAIL_TO}"}),
        "slack": ("slack", {"url": "${HIDDENQ_ALERT_SLACK_URL}"}),
    }
    return {
        "apiVersion": 1,
        "contactPoints": [
            {"orgId": 1, "name": name, "receivers": [{"uid": f"hiddenq-{name}", "type": kind, "settings": settings}]}
            for name, (kind, settings) in receivers.items()
        ],
        "policies": [
            {"orgId": 1, "receiver": "${HIDDENQ_CONTACT_POINT}", "group_by": ["grafana_folder", "alertname", "run"]}
        ],
    }


def alert_rules() -> dict[str, Any]:
    """Every alert as a Grafana-managed rule."""
    rules = [_rule(alert) for alert in alerts()]
    return {
        "apiVersion": 1,
        "groups": [
            {"orgId": 1, "name": "hiddenq", "folder": FOLDER, "interval": f"{INTERVAL_SECONDS}s", "rules": rules}
        ],
    }


def _rule(alert: Alert) -> dict[str, Any]:
    """A = the expression, B = 1 where it answers, C = B above 0: Grafana's own way of importing a Prometheus rule."""
    found = Dataquery().expr(alert.expr).instant().ref_id("A")
    answers = TypeMath().expression("is_number($A) || is_nan($A) || is_inf($A)").ref_id("B")
    above_zero = ExprTypeThresholdConditionsEvaluator().type("gt").params([0])
    threshold = TypeThreshold().expression("B").ref_id("C")
    threshold.conditions([ExprTypeThresholdConditions().evaluator(above_zero)])
    prometheus, expression = DATASOURCE_UID, "__expr__"
    last_minutes = RelativeTimeRange(from_val=600, to=0)
    rule = (
        Rule(alert.name)
        .uid(f"hiddenq-{alert.name.removeprefix('Hiddenq').lower()}"[:40])
        .condition("C")
        .with_query(Query("A").datasource_uid(prometheus).model(found).relative_time_range(last_minutes))
        .with_query(Query("B").datasource_uid(expression).model(answers).relative_time_range(last_minutes))
        .with_query(Query("C").datasource_uid(expression).model(threshold).relative_time_range(last_minutes))
        .for_val(f"{alert.for_seconds}s")
        .no_data_state("OK")
        .labels({"severity": alert.severity})
        .annotations(
            {
                "summary": _template(alert.summary),
                "description": _template(alert.description),
                "runbook": runbook_anchor(alert),
                "dashboard": f"/d/hiddenq-{alert.dashboard}",
            }
        )
    )
    fields: dict[str, Any] = json.loads(JSONEncoder(sort_keys=False).encode(rule.build()))
    for name in ("orgID", "folderUID", "ruleGroup"):
        fields.pop(name, None)  # of the API, not of a provisioning file
    fields["execErrState"] = "KeepLast"  # Grafana has it since 10.4; the SDK's type leaves it out
    return fields


def _template(text: str) -> str:
    return text.replace("$value", "$values.A.Value")
