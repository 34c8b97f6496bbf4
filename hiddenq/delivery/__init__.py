"""Delivery (being built)."""
