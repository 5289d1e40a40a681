"""Trains the bundled model. It is not installed."""
