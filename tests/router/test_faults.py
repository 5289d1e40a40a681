"""Faults at random points of workers: every answer comes whole, whatever was tried for it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import grpc.aio
import pytest
from router.fake_model import ids_of
from router.fake_workers import FakeDecode, Point, raises
from router.fakes import FakeFleet, run

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

TEXT = "the answer is three"
PREFILL_POINTS = ["start", "computed", "reservation", "pushed"]
DECODE_POINTS = ["start", "reserved", "verified", *(f"commit {at}" for at in range(4)), "finish"]
FAULTS: list[errors.EffuseError] = [
    errors.PeerLost("the worker went away"),
    errors.EngineLost("the engine died"),
    errors.Starting("not ready"),
    errors.TransferFailed("a page's digest differs"),
    errors.Overloaded("no free pages"),
    errors.Draining("shutting down"),
    errors.Refused("meant for another life"),
]


def sometimes(draw: random.Random, share: float, counts: Counter[str]) -> Point:
    """A point that fails now and then, in one way or another."""

    async def act() -> None:
        if draw.random() < share:
            counts["faults"] += 1
            await raises(draw.choice(FAULTS))()
        elif draw.random() < 0.2:
            await asyncio.sleep(0)

    return act


def lies(decode: FakeDecode, draw: random.Random, counts: Counter[str]) -> None:
    """Lets a worker skip, repeat or change tokens now and then."""

    def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
        if response.HasField("commit") and draw.random() < 0.05:
            counts["lies"] += 1
            if draw.random() < 0.5:
                response.commit.token_offset += 2
            elif response.commit.token_offset:
                response.commit.token_offset -= 1
        return response

    decode.twist = twist


async def one(fleet: FakeFleet) -> tuple[grpc.StatusCode, list[int], str]:
    ids: list[int] = []
    text = ""
    output = pb.OutputOptions(token_ids=True)
    request = pb.GenerateStreamRequest(request=pb.GenerateRequest(prompt="?", output=output))
    try:
        async for event in fleet.generation.GenerateStream(request, timeout=30):
            assert event.commit.token_offset == (len(ids) if event.HasField("commit") else 0)
            ids += event.commit.token_ids
            text += event.commit.text
    except grpc.aio.AioRpcError as error:
        return error.code(), ids, error.details() or ""
    return grpc.StatusCode.OK, ids, text


@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_answered_whole_while_workers_fail_at_random(seed: int) -> None:
    draw, counts = random.Random(seed), Counter[str]()

    async def body(fleet: FakeFleet) -> None:
        for prefill in fleet.prefill:
            prefill.at = {p: sometimes(draw, 0.05, counts) for p in PREFILL_POINTS}
        for decode in fleet.decode:
            decode.at = {p: sometimes(draw, 0.04, counts) for p in DECODE_POINTS}
            lies(decode, draw, counts)
        want = ids_of(TEXT)
        for code, ids, text in await asyncio.gather(*(one(fleet) for _ in range(120))):
            counts[code.name] += 1
            assert (code, ids, text) == (grpc.StatusCode.OK, want, TEXT)
        await fleet.idle()
        assert all(c.in_flight.requests == 0 for c in fleet.router.fleet.candidates())

    run(body, num_prefill=2, num_decode=3)
    assert counts["OK"] == 120
    assert counts["faults"] > 20 and counts["lies"] > 5
