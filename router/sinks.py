"""The two ways in which an answer reaches a client: at once at its end, or as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, cast

import grpc.aio

from effuse.router.job import ClientGone
from effuse.v1 import generation_pb2 as pb

STALLED_S: Final = 60.0
"""A client that takes nothing for so long is gone, as far as its slot and its pages go."""

StreamContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateStreamResponse]


class Collected:
    """Keeps the answer for a unary call."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._text)

    async def commit(self, commit: pb.BlockCommit) -> None:
        """Final text and tokens."""
        self._text.append(commit.text)
        self.token_ids += commit.token_ids

    async def draft(self, draft: pb.BlockDraft) -> None:
        """Drafts are refused for unary calls."""
        raise AssertionError("a unary call has no drafts")


class Streamed:
    """Writes each event to a streaming call; a slow client slows its own request only."""

    def __init__(
        self, context: StreamContext, request_id: str, *, stalled_s: float = STALLED_S
    ) -> None:
        self._context = context
        self._request_id = request_id
        self._stalled_s = stalled_s
        self._writing: asyncio.Future[None] | None = None

    async def commit(self, commit: pb.BlockCommit) -> None:
        """Final text and tokens."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, commit=commit))

    async def draft(self, draft: pb.BlockDraft) -> None:
        """A block in flight."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, draft=draft))

    async def finished(self, finished: pb.Finished) -> None:
        """The last event."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, finished=finished))

    async def settle(self) -> None:
        """Returns once a status can be sent: grpcio takes none while a message waits to be read.

        Without a deadline by intent: nothing but the call itself is held any more, and a client
        that comes back reads how it ended; one that goes away ends this too.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self, message: pb.GenerateStreamResponse) -> None:
        write = cast(Awaitable[None], self._context.write(message))
        writing = self._writing = asyncio.ensure_future(write)
        writing.add_done_callback(_retrieve)
        # Unlike a timeout this leaves the write alone: see `settle`.
        await asyncio.wait({writing}, timeout=self._stalled_s)
        if not writing.done():
            raise ClientGone(f"the client has taken nothing for {self._stalled_s:g} s")
        try:
            writing.result()
        except (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise ClientGone("the client's call is over") from error


def _retrieve(writing: asyncio.Future[None]) -> None:
    """A write that fails after its request has ended concerns nobody."""
    if not writing.cancelled():
        writing.exception()
