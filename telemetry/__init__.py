"""Metrics, log lines and traces of a process. Knows no role."""
