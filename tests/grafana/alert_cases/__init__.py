"""The story of every alert, one file a subject, as the alerts have."""

from __future__ import annotations

from tests.grafana.alert_cases import gpu, middle, run, uploads

CASES = (*gpu.CASES, *run.CASES, *uploads.CASES, *middle.CASES)
