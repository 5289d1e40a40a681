"""The circuit opens for longer and longer, up to a bound, and closes with the first answer. A task
that is cancelled while Redis is called ends, whatever Redis answers.
"""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis_server

from effuse.placement.store import Circuit, Store


def test_pauses_double_up_to_the_most() -> None:
    now = 0.0
    circuit = Circuit(lambda: now, first_s=0.1, most_s=0.5)
    pauses = []
    for _ in range(5):
        circuit.failed("Redis: gone")
        pauses.append(round(circuit.open_until - now, 6))
        now = circuit.open_until
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_open_only_until_its_time_and_closed_by_an_answer() -> None:
    now = 0.0
    circuit = Circuit(lambda: now, first_s=1.0)
    circuit.failed("Redis: gone")
    assert circuit.is_open
    now = 1.0
    assert not circuit.is_open
    circuit.failed("Redis: gone")
    circuit.succeeded()
    assert not circuit.is_open
    assert circuit.failures == 0


def test_a_very_long_outage_does_not_overflow() -> None:
    circuit = Circuit(lambda: 0.0)
    for _ in range(5000):
        circuit.failed("Redis: gone")
    assert circuit.open_until == circuit.most_s


def test_who_is_cancelled_while_redis_is_asked_ends_then() -> None:
    """At whichever turn of the event loop: redis-py's write loses what comes in one of them."""

    async def go() -> None:
        with redis_server.running() as server, redis.Redis(port=server.port) as plain:
            async with Store(server.connection_url, "cancelled", timeout_s=20.0) as store:
                plain.set(store.keys.refused, "which is no set, so that to ask for it is refused")
                await store.workers()  # connects
                for turns in range(50):
                    for ask in (store.workers, lambda: store.share_refusals({}, 1)):
                        store.placement_circuit.succeeded()
                        task = asyncio.create_task(ask())
                        for _ in range(turns):
                            await asyncio.sleep(0)
                        if task.cancel():
                            with pytest.raises(asyncio.CancelledError):
                                await task
                assert await store.workers() == []

    asyncio.run(go())
