"""The Python clients against a router with planned faults, and the cost of `import effuse`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from client.fake_router import EVENTS, WHOLE, FakeRouter
from eventually import eventually

import effuse
from effuse.client.params import make_request
from effuse.protos.errors import Cancelled, DeadlineExceeded, InvalidRequest, PeerLost
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc, model_pb2_grpc


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def target(router: FakeRouter) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(router, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    router.cancelled.set()
    router.over.set()
    server.stop(0).wait(10)


def test_a_whole_answer(router: FakeRouter, target: str) -> None:
    with effuse.Client(target) as client:
        answer = client.generate("hello", effuse.Params(max_tokens=5, score="margin"))
        assert [model.name for model in client.models()] == ["m"]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", (1, 2, 3), "length")
    assert (answer.request_id, answer.model, answer.first_block_s) == ("r", "m", 0.25)
    assert answer.usage.completion_tokens == 3 and answer.total_s > 0
    (asked,) = router.asked
    params = effuse.Params(max_tokens=5, score="margin")
    assert asked == make_request("hello", params, token_ids=True)


def test_pieces_then_the_answer(router: FakeRouter, target: str) -> None:
    with effuse.Client(target) as client:
        stream = client.stream([7, 8])
        assert list(stream) == ["ab", "c"]
        answer = stream.answer
        assert client.stream("again").answer.text == "abc"  # without a loop of one's own
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", (1, 2, 3), "stop")
    assert (answer.seed, answer.stopped_by) == (9, "d")
    assert 0 < answer.first_block_s <= answer.total_s
    assert list(router.asked[0].prompt_token_ids.ids) == [7, 8]


def test_of_several_answers_the_pieces_are_the_first_ones(router: FakeRouter, target: str) -> None:
    second = pb.GenerateStreamResponse(
        answer_index=1, commit=pb.BlockCommit(text="xy", num_tokens=2, token_ids=[8, 9])
    )
    end = pb.GenerateStreamResponse(
        answer_index=1, finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, model="m")
    )
    router.events = [EVENTS[0], second, *EVENTS[1:], end]
    with effuse.Client(target) as client:
        stream = client.stream("hello", effuse.Params(n=2))
        assert list(stream) == ["ab", "c"]
        assert [one.text for one in stream.answer.answers] == ["abc", "xy"]
        assert stream.answer.others[0].finish_reason == "length"
        router.events.pop()
        with pytest.raises(effuse.StreamBroken):
            _ = client.stream("hello", effuse.Params(n=2)).answer
    assert router.asked[0].n == 2
    unary = pb.GenerateResponse(others=[WHOLE, pb.GenerateResponse(text="z")])
    assert [one.text for one in effuse.Answer.of(unary, 1.0).answers] == ["", "abc", "z"]


def test_a_message_streams_every_event(router: FakeRouter, target: str) -> None:
    request = make_request("hello", effuse.Params(), drafts=True)
    with effuse.Client(target) as client:
        stream = client.stream_of(request)
        assert [*stream.events()] == EVENTS
        assert stream.answer.text == "abc"

    async def ask() -> None:
        async with effuse.AsyncClient(target) as client:
            stream = client.stream_of(request)
            assert [event async for event in stream.events()] == EVENTS
            assert (await stream.answer).text == "abc"

    asyncio.run(ask())
    assert [one.output.drafts for one in router.asked] == [True, True]


def test_the_asyncio_client_says_the_same(target: str) -> None:
    async def ask() -> None:
        async with effuse.AsyncClient(target) as client:
            answer = await client.generate("hello")
            stream = client.stream("hello")
            assert [piece async for piece in stream] == ["ab", "c"]
            last = await stream.answer
            assert (await client.stream("hello").answer).text == "abc"
            assert [model.name for model in await client.models()] == ["m"]
        assert isinstance(last, effuse.Answer)
        assert (last.text, last.token_ids) == ("abc", (1, 2, 3)) and answer.text == "abc"

    asyncio.run(ask())


def test_a_request_is_cancelled_by_its_id_and_texts_are_ids(target: str) -> None:
    with effuse.Client(target) as client:
        assert client.cancel("mine") and not client.cancel("another")
        assert client.tokenize("ab") == client.tokenize(effuse.Chat().user("ab")) == (97, 98)
        assert client.detokenize((97, 98)) == "ab"

    async def ask() -> None:
        async with effuse.AsyncClient(target) as client:
            assert await client.cancel("mine") and not await client.cancel("another")
            assert await client.tokenize("ab") == (97, 98)
            assert await client.detokenize((97, 98)) == "ab"

    asyncio.run(ask())


def test_a_request_may_be_named(router: FakeRouter, target: str) -> None:
    with effuse.Client(target) as client:
        client.generate("a", request_id="mine")
        list(client.stream("a", request_id="mine"))
    assert [request.request_id for request in router.asked] == ["mine", "mine"]


def test_all_pages_of_workers_are_read(target: str) -> None:
    async def ask() -> list[str]:
        async with effuse.AsyncClient(target) as client:
            return [worker.worker_id for worker in await client.workers()]

    with effuse.Client(target) as client:
        assert [worker.worker_id for worker in client.workers()] == ["w0", "w1", "w2"]
    assert asyncio.run(ask()) == ["w0", "w1", "w2"]


def test_a_call_that_nobody_took_is_tried_again(router: FakeRouter, target: str) -> None:
    router.failures = 2
    with effuse.Client(target) as client:
        assert client.generate("hello").text == "abc"
    assert len(router.asked) == 3


@pytest.mark.parametrize(
    ("code", "attempts", "calls"),
    [(grpc.StatusCode.UNAVAILABLE, 1, 1), (grpc.StatusCode.UNAVAILABLE, 2, 2),
     (grpc.StatusCode.INTERNAL, 4, 1)],
)  # fmt: skip
def test_others_are_not(
    router: FakeRouter, target: str, code: grpc.StatusCode, attempts: int, calls: int
) -> None:
    router.failures, router.code = 9, code
    with effuse.Client(target, max_attempts=attempts) as client, pytest.raises(PeerLost):
        client.generate("hello")
    assert len(router.asked) == calls


def test_a_client_without_a_router_states_why(router: FakeRouter, target: str) -> None:
    with (
        effuse.Client("127.0.0.1:1", max_attempts=1) as alone,
        pytest.raises(PeerLost, match=r"^no router answers on 127.0.0.1:1: .*refused"),
    ):
        alone.generate("hello")
    router.failures = 1
    with (
        effuse.Client(target, max_attempts=1) as client,
        pytest.raises(PeerLost, match=rf"^{target} closed the call with UNAVAILABLE: told to fail"),
    ):
        client.generate("hello")


# The second is the address of a fleet that listens on all.
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "dns:///localhost", "ipv4:127.0.0.1"])
def test_no_proxy_of_the_environment_stands_before_a_router_of_this_machine(
    host: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target.replace("127.0.0.1", host)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # without a listener
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def ask() -> str:
        async with effuse.AsyncClient(target, max_attempts=1) as client:
            return (await client.generate("hello")).text

    with effuse.Client(target, max_attempts=1) as client:
        assert client.generate("hello").text == asyncio.run(ask()) == "abc"


def test_what_is_wrong_is_told_by_field(target: str) -> None:
    with (
        effuse.Client(target) as client,
        pytest.raises(InvalidRequest, match="top_k: at most 6") as told,
    ):
        client.generate("hello", effuse.Params(top_k=7))
    assert isinstance(told.value, effuse.EffuseError)


def test_a_prompt_that_no_message_holds_is_not_sent_again(target: str) -> None:
    with effuse.Client(target) as client, pytest.raises(InvalidRequest, match="larger than max"):
        client.generate("a" * (5 << 20))


def test_a_stream_without_its_end_is_no_answer(router: FakeRouter, target: str) -> None:
    router.events[-1] = pb.GenerateStreamResponse(request_id="r")
    with effuse.Client(target) as client, pytest.raises(effuse.StreamBroken, match="request 'r'"):
        list(client.stream("hello"))


def test_a_deadline_ends_a_stream_at_both_sides(router: FakeRouter, target: str) -> None:
    router.hangs = True
    router.events.pop()
    with effuse.Client(target) as client:
        for _ in range(5):  # a busy machine may bring it there too late
            with pytest.raises(DeadlineExceeded):
                list(client.stream("hello", timeout_s=0.3))
            if router.cancelled.wait(10):
                break
    assert router.cancelled.is_set()


CALLS: list[Callable[[effuse.Client], object]] = [
    lambda client: client.generate("hello"),
    lambda client: list(client.stream("hello")),
    lambda client: client.cancel("mine"),
    lambda client: client.tokenize("hello"),
    lambda client: client.detokenize([65]),
    lambda client: client.models(),
    lambda client: client.workers(),
]


def test_a_second_is_a_second(target: str) -> None:
    with effuse.Client(target, timeout_s=1.0) as client:
        for call in CALLS:
            for tries_left in reversed(range(20)):  # a machine may stand still for a second
                try:
                    assert call(client)
                    break
                except DeadlineExceeded:
                    assert tries_left


def test_a_call_has_its_own_time_or_else_the_clients(router: FakeRouter, target: str) -> None:
    async def ask() -> None:
        async with effuse.AsyncClient(target, timeout_s=5000.0) as client:
            for timeout_s in (None, 9000.0):
                await client.generate("hello", timeout_s=timeout_s)
                async for _ in client.stream("hello", timeout_s=timeout_s):
                    pass

    with effuse.Client(target, timeout_s=5000.0) as client:
        for timeout_s in (None, 9000.0):
            client.generate("hello", timeout_s=timeout_s)
            assert client.stream("hello", timeout_s=timeout_s).answer
    asyncio.run(ask())
    assert [round(left_s, -3) for left_s in router.left_s] == [5000, 5000, 9000, 9000] * 2


def test_a_stream_can_be_ended(router: FakeRouter, target: str) -> None:
    router.hangs = True
    with effuse.Client(target) as client:
        stream = client.stream("hello")
        assert next(iter(stream)) == "ab"
        stream.cancel()
        assert router.cancelled.wait(10)


def test_closing_a_client_ends_its_streams(router: FakeRouter, target: str) -> None:
    router.hangs = True
    with effuse.Client(target) as client:
        pieces = iter(client.stream("hello"))
        assert next(pieces) == "ab"
        client.close()
        with pytest.raises(Cancelled):
            list(pieces)
    assert len(router.asked) == 1


@pytest.mark.parametrize("was_used", [False, True])
def test_a_closed_client_refuses_calls(target: str, was_used: bool) -> None:
    sync, calls = effuse.Client(target), effuse.AsyncClient(target)

    async def ask() -> None:
        if was_used:
            await calls.generate("hello")
        await calls.close()
        await calls.close()
        for call in (calls.generate("a"), calls.cancel("a"), anext(calls.stream("a"))):
            with pytest.raises(Cancelled, match=f"the client of {target} is closed"):
                await call

    asyncio.run(ask())
    if was_used:
        sync.generate("hello")
    sync.close()
    for begin in (sync.generate, sync.stream, sync.tokenize, sync.cancel):
        with pytest.raises(Cancelled, match=f"the client of {target} is closed"):
            begin("a")
    with pytest.raises(Cancelled, match="is closed"):
        next(sync.watch_requests())


def test_leaving_an_asyncio_stream_ends_it(router: FakeRouter, target: str) -> None:
    router.hangs = True

    async def leave() -> None:
        async with effuse.AsyncClient(target) as client:
            stream = client.stream("hello")
            assert await anext(stream) == "ab"
            await stream.aclose()
            with pytest.raises(Cancelled, match="closed before its answer"):
                await stream.answer

    asyncio.run(leave())
    assert router.cancelled.wait(10)


def test_closing_an_asyncio_client_cancels_nobodys_task(router: FakeRouter, target: str) -> None:
    router.takes_s = 60.0

    async def ask() -> None:
        client = effuse.AsyncClient(target)
        tasks = [asyncio.create_task(client.generate("hello")) for _ in range(2)]
        await eventually(lambda: len(router.asked) == 2)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1], timeout=10)
        await client.close()
        await asyncio.wait(tasks, timeout=10)
        assert tasks[0].cancelled()
        assert not tasks[1].cancelled() and isinstance(tasks[1].exception(), Cancelled)

    asyncio.run(ask())


def test_leaving_the_loop_over_an_asyncio_stream_ends_it(router: FakeRouter, target: str) -> None:
    router.hangs = True

    async def leave() -> None:
        async with effuse.AsyncClient(target) as client:
            async for piece in client.stream("hello"):
                assert piece == "ab"
                break
            assert await asyncio.to_thread(router.cancelled.wait, 10)

    asyncio.run(leave())


def test_an_asyncio_client_belongs_to_the_loop_that_uses_it_first(target: str) -> None:
    client = effuse.AsyncClient(target)

    async def ask() -> str:
        assert [piece async for piece in client.stream("hello")] == ["ab", "c"]
        return (await client.generate("hello")).text

    async def close() -> None:
        await effuse.AsyncClient(target).close()
        await client.close()

    assert asyncio.run(ask()) == "abc"
    for use in (ask, close):
        with pytest.raises(
            RuntimeError, match=r"^this client belongs to the first event loop .*loop$"
        ):
            asyncio.run(use())


def test_a_target_may_be_a_url(target: str) -> None:
    with effuse.Client(f"http://{target}/") as client:
        assert client.generate("hello").text == "abc"

    async def ask() -> str:
        async with effuse.AsyncClient(f"HTTP://{target}") as client:
            return (await client.generate("hello")).text

    assert asyncio.run(ask()) == "abc"
