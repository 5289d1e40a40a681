"""Answers in one process: the decode worker's engine without fleet, wire or handoff."""
