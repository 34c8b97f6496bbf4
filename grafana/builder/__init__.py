"""Builds what Prometheus, Alertmanager and Grafana read: `python -m grafana.builder` (`--check`: are they fresh?).

Consumes the metric catalogue (`hiddenq.contracts.metrics`) and the thresholds that `hiddenq status` uses; produces the
files under `grafana/`: dashboards, Prometheus rules, configuration, provisioning. Each alert is declared once, in
`alerts/`, and becomes a Prometheus rule and a Grafana-managed one.
"""
