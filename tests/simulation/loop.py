"""asyncio on the virtual clock: coroutines of routers run unchanged."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple, Unpack

from .clock import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualLoop(asyncio.BaseEventLoop):
    """As much of an event loop as timers, tasks and events need. An uncaught exception ends the
    run, like one that an action of the clock raises.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @contextmanager
    def running(self) -> Iterator[None]:
        """It is the running loop meanwhile, and closed then."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            self.close()

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Runs it now, after earlier requests."""
        return self.call_at(self._clock.now, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Runs it at that moment."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.after(max(0.0, when - self._clock.now), lambda: _run(handle))
        return handle

    def create_task(self, coro: Coroutine[Any, Any, T], **named: Any) -> asyncio.Task[T]:  # type: ignore[override]
        """A task whose end is checked."""
        task = asyncio.Task(coro, loop=self, **named)
        task.add_done_callback(_check)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ends the run. Leftovers at its end do not matter."""
        if "exception" in context and not self.is_closed():
            raise context["exception"]


def _run(handle: asyncio.TimerHandle) -> None:
    if not handle.cancelled():
        handle._run()


def _check(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.result()
