"""The two ways in which an answer reaches a client: at once at its end, or as it grows."""

from __future__ import annotations

import asyncio

import grpc.aio

from effuse.router.job import ClientGone
from effuse.v1 import generation_pb2 as pb

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

    def __init__(self, context: StreamContext, request_id: str) -> None:
        self._context = context
        self._request_id = request_id

    async def commit(self, commit: pb.BlockCommit) -> None:
        """Final text and tokens."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, commit=commit))

    async def draft(self, draft: pb.BlockDraft) -> None:
        """A block in flight."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, draft=draft))

    async def finished(self, finished: pb.Finished) -> None:
        """The last event."""
        await self._write(pb.GenerateStreamResponse(request_id=self._request_id, finished=finished))

    async def _write(self, message: pb.GenerateStreamResponse) -> None:
        try:
            await self._context.write(message)
        except (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise ClientGone("the client's call is over") from error
