"""One streamed request, as a client of the router sees it, with the client's own clock.

Used by `generate`, the demo and `bench`. Not here: flags, drawing, averages.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from effuse.v1 import generation_pb2

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

Event = generation_pb2.GenerateStreamResponse


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer and what it took, in seconds on the client's clock."""

    text: str
    usage: generation_pb2.Usage
    stats: generation_pb2.GenerationStats
    finish_reason: generation_pb2.FinishReason
    first_block_s: float  # from sending until the first final text arrived
    total_s: float  # from sending until the end of the stream


class StreamBroken(Exception):
    """The stream ended well but without saying that the answer is complete."""


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
    sent = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    finished: generation_pb2.Finished | None = None
    async for event in stub.GenerateStream(request, timeout=timeout_s):
        on_event(event)
        if event.HasField("commit"):
            pieces.append(event.commit.text)
            first = first or time.monotonic()
        elif event.HasField("finished"):
            finished = event.finished
    ended = time.monotonic()
    if finished is None:
        raise StreamBroken(f"request {request.request_id!r}: the stream ended without Finished")
    return Answer(
        text="".join(pieces),
        usage=finished.usage,
        stats=finished.stats,
        finish_reason=finished.finish_reason,
        first_block_s=(first or ended) - sent,
        total_s=ended - sent,
    )


def explain(error: grpc.aio.AioRpcError) -> str:
    """The status and its message on one line."""
    return f"{error.code().name}: {error.details() or 'no details'}"
