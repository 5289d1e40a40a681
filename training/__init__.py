"""Trains the bundled model. Not part of what is installed."""
