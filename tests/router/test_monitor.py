"""Running requests as a viewer sees them: blocks, and no texts unless they may be shown."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import pytest
from router.asking import ask, failure, request
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until

from effuse.protos import errors
from effuse.protos.channels import monitor_stub
from effuse.router import metrics
from effuse.v1 import generation_pb2, worker_pb2
from effuse.v1 import monitor_pb2 as pb


@asynccontextmanager
async def watching(fleet: FakeFleet) -> AsyncIterator[AsyncIterator[pb.WatchRequestsResponse]]:
    """The view of a watcher that the router knows."""
    call = monitor_stub(fleet.channel).WatchRequests(
        pb.WatchRequestsRequest(interval=timedelta(seconds=0.05)), timeout=30
    )
    before = fleet.router.monitor.num_watchers
    await until(lambda: fleet.router.monitor.num_watchers > before)
    yield aiter(call)
    call.cancel()
    await until(lambda: fleet.router.monitor.num_watchers == before)


async def held(fleet: FakeFleet) -> tuple[asyncio.Task[object], asyncio.Event]:
    """A request whose first block is final and whose second one is a draft."""
    go, reached = asyncio.Event(), asyncio.Event()
    fleet.decode[0].at["commit 2"] = holds(go, reached)
    task = asyncio.create_task(stream(fleet))
    await reached.wait()
    return task, go


async def stream(fleet: FakeFleet) -> object:
    asked = generation_pb2.GenerateStreamRequest(request=request(request_id="secret"))
    call = fleet.generation.GenerateStream(asked, timeout=30)
    return [str(event.WhichOneof("event")) async for event in call]


def test_each_of_several_answers_is_seen_by_itself() -> None:
    async def body(fleet: FakeFleet) -> None:
        (worker,) = fleet.decode
        worker.others = [worker.answer]
        go, reached = asyncio.Event(), asyncio.Event()
        worker.at["commit 1"] = worker.at["1/commit 1"] = holds(go)
        worker.at["1/commit 0"] = holds(go, reached)
        async with watching(fleet) as looks:
            task = asyncio.create_task(ask(fleet, n=2, request_id="mine"))
            await reached.wait()
            async for look in looks:
                if [one.num_tokens for one in look.requests] == [4, 0]:
                    break
            assert [one.name for one in look.requests] == ["mine", "mine/1"]
            assert [one.attempt for one in look.requests] == [1, 1]
            assert look.num_running == 2
            go.set()
            await task

    run(body, show_requests=True)


@pytest.mark.parametrize("shown", [False, True])
def test_a_request_and_its_blocks_fill_in_before_who_watches(shown: bool) -> None:
    async def body(fleet: FakeFleet) -> None:
        async with watching(fleet) as looks:
            task, go = await held(fleet)
            async for look in looks:
                if look.requests and look.requests[0].num_tokens == 8:
                    break
            assert (look.router, look.num_running) == (fleet.router.id, 1)
            (told,) = look.requests
            assert (told.state, told.decode_worker, told.attempt) == ("decoding", "d0", 1)
            assert told.prompt_tokens == len("how many?") + 2
            (block,) = told.blocks
            assert (block.token_offset, block.num_tokens, block.masks) == (8, 4, b"\x0f")
            digest = hashlib.sha256(b"secret").hexdigest()[:12]
            assert told.name == ("secret" if shown else digest)
            assert (told.prompt, told.text) == (("how many?", "the answ") if shown else ("", ""))
            assert told.num_tokens == look.num_tokens == 8
            first = told.age.ToTimedelta().total_seconds()
            assert look.num_first_blocks == 1 and 0 < look.first_block_seconds <= first
            go.set()
            kinds = await task
            assert isinstance(kinds, list) and "draft" not in kinds, "it asked for none"
            async for look in looks:
                if not look.requests:
                    break
            assert look.num_tokens == len(fleet.decode[0].answer), "those of ended ones count"
            assert look.num_first_blocks == 1, "later blocks are no first ones"

    run(body, show_requests=shown, num_prefill=0)


def test_a_draft_is_shown_until_a_commit_says_otherwise() -> None:
    async def body(fleet: FakeFleet) -> None:
        async with watching(fleet) as looks:
            task, go = await held(fleet)
            running = fleet.router.requests.running_now()[0]
            await until(lambda: len(running.answer.token_ids) == 8)
            block = running.answer.frontier[0]
            newer = type(block)(token_ids=block.token_ids, masks=b"\x03", denoise_count=99)
            draft = worker_pb2.DecodeDraft(token_offset=8, block=newer)
            fleet.router.monitor.note_draft(running, draft)
            assert [one.masks for one in fleet.router.monitor.blocks(running)] == [b"\x03"]
            draft.block.denoise_count = 0  # before the commit
            fleet.router.monitor.note_draft(running, draft)
            assert [one.masks for one in fleet.router.monitor.blocks(running)] == [b"\x0f"]
            go.set()
            await task
            async for look in looks:
                if not look.requests:
                    break
            assert not fleet.router.monitor.blocks(running) or running.answer.frontier

    run(body, num_prefill=0)


def test_nobody_watches_and_no_draft_is_asked_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet)
        async with watching(fleet):
            await ask(fleet)
        await ask(fleet)
        assert [one.drafts for one in fleet.decode[0].requests] == [False, True, False]

    run(body, num_prefill=0)


def test_a_router_that_drains_lets_watchers_go() -> None:
    async def body(fleet: FakeFleet) -> None:
        async with watching(fleet) as looks:
            await anext(looks)
            fleet.stop.set()
            with pytest.raises(StopAsyncIteration):
                while True:
                    await anext(looks)

    run(body)


@pytest.mark.parametrize("interval_s", [-1.0, 0.01, 61.0])
def test_an_interval_is_checked(interval_s: float) -> None:
    async def body(fleet: FakeFleet) -> None:
        asked = pb.WatchRequestsRequest(interval=timedelta(seconds=interval_s))
        call = monitor_stub(fleet.channel).WatchRequests(asked, timeout=30)
        error = await failure(anext(aiter(call)))
        assert isinstance(error, errors.InvalidRequest)
        assert "0.05 s to 60 s" in error.message

    run(body)


def test_watchers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_WATCHERS", 1)

    async def body(fleet: FakeFleet) -> None:
        async with watching(fleet):
            call = monitor_stub(fleet.channel).WatchRequests(pb.WatchRequestsRequest(), timeout=30)
            error = await failure(anext(aiter(call)))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(body)
