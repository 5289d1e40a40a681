"""One streamed request whose every event somebody sees; for `generate`, the demo and `bench`.

Not here: flags, drawing, averages; what a program of one's own would use (`effuse.AsyncClient`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from effuse.client.answer import Answer, Event, Gathering
from effuse.v1 import generation_pb2

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub


def _ignore(_: Event) -> None:
    return


async def ask(
    stub: "GenerationServiceAsyncStub",
    request: generation_pb2.GenerateRequest,
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] = _ignore,
) -> Answer:
    """Send `request` and gather its answer; `on_event` sees every event as it comes.

    Raises grpc.aio.AioRpcError with the server's status, and StreamBroken.
    """
    gathering = Gathering()
    async for event in stub.GenerateStream(request, timeout=timeout_s):
        on_event(event)
        gathering.take(event)
    return gathering.answer(request.request_id)


def explain(error: grpc.aio.AioRpcError) -> str:
    """The status and its message on one line."""
    return f"{error.code().name}: {error.details() or 'no details'}"
