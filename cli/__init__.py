"""The effuse command: up, generate, bench and others."""
