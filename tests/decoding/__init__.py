"""Helpers of the decode tests: scripted candidates, an independent replay, and invariants."""
