"""When a client tries again: its pauses, and their effect on real connections."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from client.fake_router import FakeRouter
from slowness import patient

import effuse
from effuse.cli.ports import free_port
from effuse.client import retries
from effuse.client.retries import REPEATED_KEY, SPAN_S, Options, Retries, is_name
from effuse.protos.errors import (
    Cancelled,
    Draining,
    EffuseError,
    InvalidRequest,
    PeerLost,
    Unavailable,
    to_status,
)
from effuse.v1 import generation_pb2_grpc


class Status(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code


def ended(error: EffuseError, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> EffuseError:
    """The exception of a call that ended with this status."""
    error.__cause__ = Status(code)
    return error


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pauses(error: Callable[[], EffuseError], attempts: int, limit_s: float = 1e6) -> list[float]:
    """Those of a call whose attempts all end immediately, without chance."""
    clock, found = Clock(), []
    one = Retries(attempts, clock.now + limit_s, clock, chance=lambda: 0.0)
    while (pause_s := one.pause_s(ended(error()))) is not None:
        found.append(pause_s)
        clock.now += pause_s
    return found


@pytest.mark.parametrize("attempts", [2, 3, 4, 5])
@pytest.mark.parametrize("error", [PeerLost, Unavailable, Draining, Cancelled])
def test_the_attempts_span_ten_seconds_with_pauses_that_grow(
    error: type[EffuseError], attempts: int
) -> None:
    found = pauses(lambda: error("no"), attempts)
    assert len(found) == attempts - 1
    assert sum(found) >= 10.0 and found == sorted(found)
    assert pauses(lambda: error("no"), 1) == []


def test_a_pause_is_as_long_as_was_asked_for_and_within_the_deadline() -> None:
    assert pauses(lambda: Unavailable("no", retry_after_s=7.0), 4)[0] == 7.0
    assert pauses(lambda: Unavailable("no", retry_after_s=7.0), 4, limit_s=6.0) == []
    assert sum(pauses(lambda: PeerLost("no"), 5, limit_s=5.0)) < 5.0


def test_chance_makes_pauses_longer_and_never_shorter() -> None:
    clock = Clock()
    one = Retries(4, clock.now + 1e6, clock, chance=lambda: 1.0)
    pause_s = one.pause_s(ended(Unavailable("no")))
    assert pause_s is not None and pause_s > SPAN_S / 7


@pytest.mark.parametrize(
    "error",
    [
        ended(InvalidRequest.of("n", "wrong"), grpc.StatusCode.INVALID_ARGUMENT),
        ended(Unavailable("given up", retryable=False)),
        ended(PeerLost("broke off"), grpc.StatusCode.INTERNAL),
        Cancelled("its client was closed"),  # no status of gRPC
    ],
)
def test_what_fails_again_is_not_repeated(error: EffuseError) -> None:
    assert Retries(4, time.monotonic() + 100).pause_s(error) is None


def test_repeated_attempts_say_so() -> None:
    one = Retries(4, time.monotonic() + 100)
    assert not one.metadata
    one.pause_s(ended(PeerLost("no")))
    assert one.metadata == ((REPEATED_KEY, "1"),)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("routers:50051", True), ("http://routers:50051", True), ("http://127.0.0.1:1", False),
        ("dns:///routers.effuse.svc:50051", True), ("routers", True),
        ("dns://10.0.0.10:53/routers.effuse:50051", True), ("localhost:50051", False),
        ("127.0.0.1:50051", False), ("[::1]:50051", False), ("ipv4:10.0.0.1:1", False),
        ("unix:/run/router", False), ("unix:///run/router", False), ("dns:///localhost.:1", False),
    ],
)  # fmt: skip
def test_calls_to_a_name_are_spread_over_all_that_it_stands_for(
    target: str, expected: bool
) -> None:
    assert is_name(target) is expected
    config = dict(Options().channel_arguments(target))["grpc.service_config"]
    assert ("loadBalancingConfig" in json.loads(str(config))) is expected


# Against real connections.


@contextmanager
def serving(router: FakeRouter, port: int) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(router, server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait(10)


def until_lost(client: effuse.Client) -> None:
    """Waits until the client's connection has ended: a call that still begins on it would wait, as
    the process that served it goes on."""
    lost = threading.Event()

    def note(state: grpc.ChannelConnectivity) -> None:
        if state is not grpc.ChannelConnectivity.READY:
            lost.set()

    client._channel.subscribe(note)
    assert lost.wait(patient(10))
    client._channel.unsubscribe(note)


@pytest.fixture
def port() -> int:
    """One that the kernel gives to nobody else while no router listens on it."""
    return free_port()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("attempts", [2, 4])
def test_a_router_that_is_replaced_is_waited_for(
    port: int, is_streamed: bool, attempts: int
) -> None:
    def ask(client: effuse.Client) -> str:
        return client.stream("a").answer.text if is_streamed else client.generate("a").text

    async def ask_too() -> str:
        async with effuse.AsyncClient(f"127.0.0.1:{port}", max_attempts=attempts) as client:
            if not is_streamed:
                return (await client.generate("a")).text
            return (await client.stream("a").answer).text

    router = FakeRouter()
    with (
        effuse.Client(f"127.0.0.1:{port}", max_attempts=attempts) as client,
        ThreadPoolExecutor() as threads,
    ):
        with serving(router, port):
            assert ask(client) == "abc"
        until_lost(client)
        asking = [threads.submit(ask, client), threads.submit(asyncio.run, ask_too())]
        time.sleep(2.0)
        assert not any(one.done() for one in asking)
        with serving(router, port):
            assert [one.result(30) for one in asking] == ["abc", "abc"]


def test_a_wait_for_the_next_attempt_ends_where_the_stream_is_cancelled(port: int) -> None:
    began = time.monotonic()
    with effuse.Client(f"127.0.0.1:{port}", max_attempts=2) as client:
        stream = client.stream("a")
        threading.Timer(0.5, stream.cancel).start()
        with pytest.raises(EffuseError):
            list(stream)
    assert time.monotonic() - began < SPAN_S


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_waits_for_its_next_attempt_ends_when_its_client_is_closed(
    port: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SOON_S", 30.0)
    began = time.monotonic()
    client, other = effuse.Client(f"127.0.0.1:{port}"), effuse.AsyncClient(f"127.0.0.1:{port}")
    threading.Timer(0.5, client.close).start()
    with pytest.raises(Cancelled):
        assert client.stream("a").answer if is_streamed else client.generate("a")

    async def ask_too() -> None:
        call = other.stream("a").answer if is_streamed else other.generate("a")
        asking = asyncio.ensure_future(call)
        await asyncio.sleep(0.5)
        await other.close()
        with pytest.raises(Cancelled):
            await asking

    asyncio.run(ask_too())
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_call_is_cancelled_if_its_client_is_closed_just_before_an_attempt(
    port: int, is_streamed: bool, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_s(one: Retries) -> float:
        if one.attempts == attempt:
            client.close()
        return one.deadline - one.now()

    monkeypatch.setattr(Retries, "left_s", property(left_s))
    client = effuse.Client(f"127.0.0.1:{port}")
    with pytest.raises(Cancelled, match="is closed"):
        assert client.stream("a").answer if is_streamed else client.generate("a")


def test_closing_a_client_while_calls_wait_fails_in_no_thread(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library polls the channel's state in a thread of its own."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: failed.append(told.exc_value))

    def close_soon(delay_s: float) -> None:
        client = effuse.Client(f"127.0.0.1:{port}")
        with ThreadPoolExecutor() as threads:
            asking = threads.submit(client.generate, "a")
            time.sleep(delay_s)
            client.close()
            assert isinstance(asking.exception(30), Cancelled)

    draw = random.Random(1)
    with ThreadPoolExecutor(8) as threads:
        for one in [threads.submit(close_soon, draw.uniform(0, 0.4)) for _ in range(80)]:
            one.result(60)
    time.sleep(0.5)  # a poll lasts 0.2 s
    assert not failed


def test_what_the_router_asks_for_is_waited(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SPAN_S", 0.1)

    class Busy(FakeRouter):
        def Generate(self, request: object, context: grpc.ServicerContext) -> object:  # type: ignore[override]
            self.left_s.append(time.monotonic())
            if len(self.left_s) > 1:
                return super().Generate(request, context)  # type: ignore[arg-type]
            status = to_status(Unavailable("soon", retry_after_s=1.2))
            context.set_trailing_metadata(
                (("grpc-status-details-bin", status.SerializeToString()),)
            )
            return context.abort(grpc.StatusCode.UNAVAILABLE, "soon")

    busy = Busy()
    with serving(busy, port), effuse.Client(f"127.0.0.1:{port}") as client:
        assert client.generate("a").text == "abc"
    assert busy.left_s[1] - busy.left_s[0] >= 1.2
