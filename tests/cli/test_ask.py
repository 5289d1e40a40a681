"""A stream that ends without the end of the answer is an error, never an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from effuse.cli.generate import ask
from effuse.client.answer import Answer, Event, StreamBroken
from effuse.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

COMMITS = [
    Event(commit=pb.BlockCommit(token_offset=0, num_tokens=2, text="ab")),
    Event(commit=pb.BlockCommit(token_offset=2, num_tokens=1, text="c")),
]
END = Event(finished=pb.Finished(usage=pb.Usage(completion_tokens=3)))


class FakeStub:
    """Answers every request with the same events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    async def GenerateStream(
        self, _: pb.GenerateStreamRequest, timeout: float
    ) -> AsyncIterator[Event]:
        for event in self._events:
            yield event


def _ask(events: Sequence[Event], seen: list[Event]) -> Answer:
    stub = cast("GenerationServiceAsyncStub", FakeStub(events))
    return asyncio.run(ask(stub, pb.GenerateRequest(), timeout_s=5, on_event=seen.append))


def test_a_whole_answer() -> None:
    seen: list[Event] = []
    answer = _ask([*COMMITS, END], seen)
    assert answer.text == "abc"
    assert answer.usage.completion_tokens == 3
    assert answer.first_block_s <= answer.total_s
    assert seen == [*COMMITS, END]


def test_a_stream_cut_short() -> None:
    with pytest.raises(StreamBroken, match="without Finished"):
        _ask(COMMITS, [])
