"""An event loop on a virtual clock: if all tasks wait, the wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps, timeouts and deadlines pass at once, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._virtual_s = max(
                self._virtual_s,
                self._scheduled[0].when(),  # type: ignore[attr-defined]
            )
        super()._run_once()  # type: ignore[misc]


def run_virtually(body: Coroutine[Any, Any, Result]) -> Result:
    """The result of `body`, run on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)
