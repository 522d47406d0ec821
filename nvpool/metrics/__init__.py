"""Metrics for Prometheus: their declarations, their text format and GET /metrics."""
