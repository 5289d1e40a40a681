"""The two ways in which an answer reaches a client: at once at its end, or as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import grpc.aio

from effuse.protos.errors import Cancelled, EffuseError
from effuse.v1 import generation_pb2 as pb

STALLED_S: Final = 60.0
"""A client that takes nothing for so long is gone, as far as its slot and its pages go."""

Told = TypeVar("Told")


def events_of(answer: pb.GenerateResponse) -> list[pb.GenerateStreamResponse]:
    """What a stream says of a whole answer and of those beside it, the last event included."""
    events = []
    if answer.HasField("echo"):
        events.append(pb.GenerateStreamResponse(request_id=answer.request_id, echo=answer.echo))
    for index, one in enumerate((answer, *answer.others)):
        commit = pb.BlockCommit(
            num_tokens=one.usage.completion_tokens,
            text=one.text,
            token_ids=one.token_ids,
            forward_passes=one.stats.forward_passes,
            logprobs=one.logprobs,
        )
        about = pb.GenerateStreamResponse(request_id=answer.request_id, answer_index=index)
        if commit.num_tokens or commit.text:
            events.append(pb.GenerateStreamResponse(commit=commit))
            events[-1].MergeFrom(about)
        events.append(pb.GenerateStreamResponse(finished=_finished_of(one)))
        events[-1].MergeFrom(about)
    return events


def _finished_of(answer: pb.GenerateResponse) -> pb.Finished:
    finished = pb.Finished(
        finish_reason=answer.finish_reason,
        usage=answer.usage,
        stats=answer.stats,
        model=answer.model,
        seed=answer.seed,
    )
    _copy_stop(answer, finished)
    return finished


def _copy_stop(
    source: pb.Finished | pb.GenerateResponse, target: pb.Finished | pb.GenerateResponse
) -> None:
    match source.WhichOneof("matched_stop"):
        case "end_token_id":
            target.end_token_id = source.end_token_id
        case "stop_string":
            target.stop_string = source.stop_string


class ClientGone(Exception):
    """Nobody takes the answer any more."""


class Recipient(Protocol):
    """Who is told of an answer as it grows."""

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        """Tells one event; raises `ClientGone`."""


class WholeAnswer:
    """Gathers an answer, or several, for a unary call, and for who asks again."""

    def __init__(self) -> None:
        self._text: dict[int, list[str]] = {}
        self._said: dict[int, pb.GenerateResponse] = {}

    async def send(self, event: pb.GenerateStreamResponse) -> None:
        """Keeps what is final."""
        self.take(event)

    def take(self, event: pb.GenerateStreamResponse) -> None:
        """Keeps text, tokens, log-probabilities, the prompt and ends; nothing of drafts."""
        said = self._said.setdefault(event.answer_index, pb.GenerateResponse())
        if event.HasField("echo"):
            said.echo.CopyFrom(event.echo)
        elif event.HasField("commit"):
            self._text.setdefault(event.answer_index, []).append(event.commit.text)
            said.token_ids.extend(event.commit.token_ids)
            said.logprobs.extend(event.commit.logprobs)
        elif event.HasField("finished"):
            self._end(said, event)

    def one(self, index: int) -> pb.GenerateResponse:
        """An answer that has ended, without others."""
        return self._said[index]

    def response(self, request_id: str) -> pb.GenerateResponse:
        """The whole of it, once every answer has ended."""
        first, *others = (said for _, said in sorted(self._said.items()))
        first.request_id = request_id
        first.others.extend(others)
        return first

    def _end(self, said: pb.GenerateResponse, event: pb.GenerateStreamResponse) -> None:
        finished = event.finished
        said.request_id = event.request_id
        said.text = "".join(self._text.pop(event.answer_index, ()))
        said.finish_reason, said.model, said.seed = (
            finished.finish_reason, finished.model, finished.seed
        )  # fmt: skip
        said.usage.CopyFrom(finished.usage)
        said.stats.CopyFrom(finished.stats)
        _copy_stop(finished, said)


class AnswerStream(Generic[Told]):
    """Writes each event to a streaming call; a slow client slows its own request only."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Told], *, stalled_s: float = STALLED_S
    ) -> None:
        self._context = context
        self._stalled_s = stalled_s
        self._writing: asyncio.Future[None] | None = None

    async def send(self, event: Told) -> None:
        """Writes one event; raises `ClientGone` where it is not taken in `stalled_s` seconds."""
        write = cast(Awaitable[None], self._context.write(event))
        writing = self._writing = asyncio.ensure_future(write)
        writing.add_done_callback(_retrieve_error)
        # Unlike a timeout this leaves the write alone: see `settle`.
        await asyncio.wait({writing}, timeout=self._stalled_s)
        if not writing.done():
            raise ClientGone(f"the client has read nothing for {self._stalled_s:g} s")
        try:
            writing.result()
        except (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise ClientGone("the client's call ended") from error

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """For what is told here, to the last event: an error leaves once a status can be sent."""
        try:
            yield
        except EffuseError:
            await self.settle()
            raise
        except ClientGone as error:  # between the answer and its last event
            await self.settle()
            raise Cancelled("the client cancelled") from error

    async def settle(self) -> None:
        """Returns once a status can be sent: grpcio takes none while a message waits to be read.

        Without a deadline by intent: nothing but the call itself is held any more, and a client
        that comes back reads how it ended; one that goes away ends this too.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing})


def _retrieve_error(writing: asyncio.Future[None]) -> None:
    """A write that fails after its request has ended concerns nobody."""
    if not writing.cancelled():
        writing.exception()
