"""Calls to tokenize: few at once, few that wait, and none of a client that has left."""

from __future__ import annotations

import asyncio
import json
import threading

import grpc.aio
import pytest
from router.asking import ask, failure
from router.fakes import FakeFleet, until
from router.http_calls import post, run

from effuse.protos import errors
from effuse.router.few_at_once import MOST_WAITING
from effuse.v1 import model_pb2

TEXT = {"prompt": "how many?"}


async def begin(fleet: FakeFleet) -> asyncio.StreamWriter:
    """Posts a call whose answer nobody has read yet."""
    _, writer = await asyncio.open_connection("127.0.0.1", fleet.router.ports.http)
    body = json.dumps(TEXT).encode()
    head = f"Host: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"POST /v1/tokenize HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
    return writer


def num_waiting(fleet: FakeFleet) -> int:
    return fleet.router.tokenizer.turns.num_waiting


def test_a_client_that_leaves_waits_no_longer() -> None:
    async def body(fleet: FakeFleet) -> None:
        turns = fleet.router.tokenizer.turns
        await turns.acquire()
        writers = [await begin(fleet) for _ in range(3)]
        await until(lambda: num_waiting(fleet) == 3)
        for writer in writers[:2]:
            writer.close()
        await until(lambda: num_waiting(fleet) == 1)
        turns.release()
        await until(lambda: not num_waiting(fleet))
        writers[2].close()

    run(body)


def test_one_more_than_may_wait_is_refused_by_each_protocol() -> None:
    async def body(fleet: FakeFleet) -> None:
        turns = fleet.router.tokenizer.turns
        await turns.acquire()
        asked = model_pb2.TokenizeRequest(prompt="how many?")
        calls = [
            asyncio.ensure_future(fleet.models.Tokenize(asked, timeout=30))
            for _ in range(MOST_WAITING)
        ]
        await until(lambda: num_waiting(fleet) == MOST_WAITING)
        status, headers, told = await post(fleet, "/v1/tokenize", TEXT)
        assert (status, headers["retry-after"]) == (429, "1"), told
        ids = model_pb2.DetokenizeRequest(token_ids=[65])
        for call in (fleet.models.Tokenize(asked, timeout=30), fleet.models.Detokenize(ids)):
            error = await failure(call)
            assert isinstance(error, errors.Overloaded) and error.retry_after_s == 1
        assert (await ask(fleet)).text, "answers wait for none of them"
        turns.release()
        assert len(await asyncio.gather(*calls)) == MOST_WAITING

    run(body)


def test_a_turn_ends_with_its_thread_even_if_the_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a thread stays free for requests, however many callers leave."""
    monkeypatch.setattr("effuse.router.tokenizer.INLINE_BYTES", 100)

    async def body(fleet: FakeFleet) -> None:
        tokenizer, may_end, begun = fleet.router.tokenizer, threading.Event(), []
        original = tokenizer._encode

        def spy(text: str) -> list[int]:
            if text.startswith("slow"):
                begun.append(text)
                may_end.wait(30)
            return original(text)

        tokenizer._encode = spy  # type: ignore[method-assign]
        asked = model_pb2.TokenizeRequest(prompt="slow " * 40)
        leaves = fleet.models.Tokenize(asked, timeout=30)
        await until(lambda: len(begun) == 1)
        stays = asyncio.ensure_future(fleet.models.Tokenize(asked, timeout=30))
        await until(lambda: num_waiting(fleet) == 1)
        leaves.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await leaves
        assert (await ask(fleet, prompt="a long prompt " * 10)).text
        assert num_waiting(fleet) == 1 and len(begun) == 1
        may_end.set()
        assert (await stays).token_ids

    run(body)
