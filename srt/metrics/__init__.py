"""Prometheus metrics: one table of names, one registry."""
