"""Engines are killed and frozen one on top of the other while one is ready: no request fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import redis_server
from e2e.overlapping import carry_out

FAULTS = 8


def test_no_request_fails_while_a_worker_is_ready(tmp_path: Path) -> None:
    with redis_server.running() as redis:
        found = asyncio.run(carry_out(redis.connection_url, tmp_path, FAULTS, seed=5))
    assert sum(found.faults.values()) == FAULTS and len(found.faults) == 2, found.faults
    assert not found.failures, found.tell()
    assert not found.wrong and found.gaps
