"""Waiting for another process, if there is no event to wait for."""

from __future__ import annotations

import asyncio
import itertools
import select
from collections.abc import Awaitable, Callable

from slowness import patient


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 30) -> None:
    """Returns once the condition holds; TimeoutError names nothing but fails the test.

    `within_s` is for quiet cores: a slow machine has longer.
    """
    async with asyncio.timeout(patient(within_s)):
        for _ in itertools.count():
            found = condition()
            if found is True or (not isinstance(found, bool) and await found):
                return
            await asyncio.sleep(0.005)


def is_readable(descriptor: int, within_s: float = 0.0) -> bool:
    """Whether there is something to read within this time.

    `select.select` takes no descriptor above 1023, and a process with many NIXL agents has some.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
