"""Prometheus metrics: declarations, text exposition format and the HTTP endpoint /metrics."""
