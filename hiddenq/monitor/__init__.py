"""Watching a run: its status, its metrics, and how Prometheus finds the workers.

Consumes what `hiddenq.delivery` says about the fleet (queues, worker reports, ledger) and produces values for people
(`RunStatus`, `render`), for Prometheus (`/metrics`, `/sd`) and for browsers (`/`, `/api/status`). It imports
`hiddenq.contracts` and `hiddenq.delivery`, never a stage, and decides nothing: leases and the ledger do.
"""
