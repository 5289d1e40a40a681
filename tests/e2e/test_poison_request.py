"""A request that ends every engine it runs in ends few of them, and no request but itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis_server
from e2e.poison import MOST_LOST, NUM_OTHERS, POISONS, TIMES, carry_out
from slowness import patient

from effuse.protos.errors import Poisonous


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_it_ends_few_engines_and_no_request_but_itself(tmp_path: Path, poison: int) -> None:
    async def body(redis_url: str) -> None:
        async with asyncio.timeout(patient(120.0)):
            found = await carry_out(redis_url, tmp_path, 2 * NUM_OTHERS, poison)
        assert len(found.told) >= TIMES
        assert {type(error) for error in found.told} == {Poisonous}, found.told
        assert found.lost_engines == MOST_LOST
        assert not found.failures
        assert found.num_answers >= 2 * NUM_OTHERS

    with redis_server.running() as redis:
        asyncio.run(body(redis.connection_url))
