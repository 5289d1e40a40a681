"""The effuse command: up, generate, bench."""
