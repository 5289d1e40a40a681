"""What a process tells those who watch it: metrics, log lines, traces. Knows no role."""
