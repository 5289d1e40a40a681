"""A streaming client that reads slowly, comes back late, or is gone: how its answer ends."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from router.fakes import FakeFleet, run, until

from effuse.protos.channels import generation_stub
from effuse.router.client import AnswerStream, ClientGone
from effuse.v1 import generation_pb2 as pb
from router import fake_model

NARROW = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]


class Context:
    """A call whose messages are taken when the test lets it."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.error: Exception | None = None
        self.is_busy = False
        self.texts: list[str] = []

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        if self.is_busy:
            raise grpc.aio.UsageError("a message is being written")
        self.is_busy = True
        await self.taken.wait()
        self.is_busy = False
        self.texts.append(message.commit.text)
        if self.error is not None:
            raise self.error


def stream_to(context: Context, stalled_s: float) -> AnswerStream:
    return AnswerStream(cast(Any, context), stalled_s=stalled_s)


def test_a_client_that_takes_nothing_is_gone_and_its_status_waits_for_it() -> None:
    async def go() -> None:
        context = Context()
        stream = stream_to(context, stalled_s=0.01)
        with pytest.raises(ClientGone, match="read nothing"):
            await stream.send(pb.GenerateStreamResponse(commit=pb.BlockCommit(text="a")))
        settling = asyncio.create_task(stream.settle())
        await asyncio.sleep(0)
        assert not settling.done()
        context.taken.set()
        await settling

    asyncio.run(go())


def test_a_write_that_has_ended_is_not_held() -> None:
    async def go() -> None:
        context = Context()
        context.taken.set()
        stream = stream_to(context, stalled_s=60.0)
        await stream.send(pb.GenerateStreamResponse(commit=pb.BlockCommit(text="a")))
        await asyncio.sleep(0)
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        loop = asyncio.get_running_loop()  # other tests may have left tasks of theirs
        assert not any(one.done() for one in tasks if one.get_loop() is loop)
        del stream

    asyncio.run(go())


def test_a_request_that_ends_leaves_its_write_alone() -> None:
    async def go() -> None:
        context = Context()
        stream = stream_to(context, stalled_s=60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.send(pb.GenerateStreamResponse(finished=pb.Finished()))
        context.error = grpc.aio.InternalError("the call is over")
        context.taken.set()
        await stream.settle()

    asyncio.run(go())


def test_one_event_is_written_at_a_time_also_after_its_sender_has_ended() -> None:
    async def go() -> None:
        context = Context()
        stream = stream_to(context, stalled_s=60.0)
        events = [pb.GenerateStreamResponse(commit=pb.BlockCommit(text=text)) for text in "abc"]
        senders = [asyncio.create_task(stream.send(event)) for event in events[:1]]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        senders[0].cancel()
        await asyncio.wait(senders)
        senders = [asyncio.create_task(stream.send(event)) for event in events[1:]]
        await asyncio.sleep(0.01)
        context.taken.set()
        await asyncio.gather(*senders)
        assert context.texts == ["a", "b", "c"]

    asyncio.run(go())


def test_a_call_that_is_over_is_a_client_that_is_gone() -> None:
    async def go() -> None:
        context = Context()
        context.error = grpc.aio.InternalError("the call is over")
        context.taken.set()
        with pytest.raises(ClientGone, match="ended"):
            await stream_to(context, stalled_s=60.0).send(pb.GenerateStreamResponse())

    asyncio.run(go())


def test_a_client_that_comes_back_late_reads_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The deadline passes before the first message is read: grpcio takes no status just then."""
    monkeypatch.setattr(fake_model, "MAX_MODEL_LEN", 20_000)

    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].answer = fake_model.ids_of("x" * 8000)
        options = pb.StoppingParams(max_tokens=8000)
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{fleet.router.ports.grpc}", NARROW
        ) as channel:
            asked = pb.GenerateRequest(request_id="r" * 128, prompt="how many?", stopping=options)
            request = pb.GenerateStreamRequest(request=asked)
            call = generation_stub(channel).GenerateStream(request)
            await until(lambda: _has_ended(fleet, "r" * 128))
            await fleet.idle()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(body, max_request_s=1.0)
    assert "Traceback" not in caplog.text


def _has_ended(fleet: FakeFleet, request_id: str) -> bool:
    found = fleet.router.requests.find(request_id)
    return found is not None and found.state == pb.REQUEST_STATE_CANCELLED
