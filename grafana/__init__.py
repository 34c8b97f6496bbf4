"""Dashboards, alert rules and their provisioning, built in Python; the generated files are committed beside it."""
