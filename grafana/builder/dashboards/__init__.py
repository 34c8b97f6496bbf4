"""The four dashboards."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.builder.dashboards import fleet, gpu, run, uploads


def dashboards() -> list[Dashboard]:
    """All of them, built."""
    return [module.dashboard().build() for module in (fleet, gpu, uploads, run)]
