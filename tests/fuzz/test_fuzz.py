"""The short form of `make fuzz`: some hundred messages at every face of this process, and bugs
that are planted to be found. Fleets of processes have `tests/e2e/test_bad_input.py`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import zmq
from fuzz import services, surface
from fuzz.run import SURFACES, shares
from fuzz.services import FLEETS
from fuzz.surface import Report, Surface, feed
from google.protobuf.message import Message

from effuse.decode_worker.intake import Intake
from effuse.kvtransfer import zmq_sockets, zmq_transport
from effuse.placement import records
from effuse.protos import gate
from effuse.protos.errors import DeadlineExceeded
from effuse.router import openai_bodies
from effuse.router.metrics import Monitor
from effuse.router.shared_request import KnownRequests
from effuse.worker import supervisor
from effuse.worker.node_messages import FromNode, RankGone, RankStopped, ToNode
from effuse.worker.nodes import Event, Roll

INNER = {one.name: one for one in SURFACES if one not in FLEETS}
COUNT = 250  # of each surface
MOST = 1500  # in which each planted bug is found


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Refusals are logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fed(face: Surface, count: int) -> Report:
    async def main() -> Report:
        async with asyncio.timeout(120):
            return await feed(face, 1, count)

    return asyncio.run(main())


@pytest.mark.parametrize("name", INNER)
def test_nothing_that_strangers_say_breaks_it(name: str) -> None:
    report = fed(INNER[name], COUNT)
    assert not report.findings
    assert report.count == COUNT
    assert len(report.outcomes) > 1 or name == "NIXL notifications", report.outcomes


def test_a_million_is_shared_out() -> None:
    assert sum(shares(SURFACES, 1_000_000)) >= 1_000_000


def unguarded(
    deserialize: Callable[[bytes], Message],
) -> Callable[[bytes], Message]:
    return deserialize


@contextmanager
def watching_for_ever(monitor: Monitor) -> Iterator[None]:
    monitor.num_watchers += 1
    yield


def descriptor_of(frames: list[Any]) -> int:
    found: int = frames[0].get(zmq.SRCFD)
    return found


TAKE = Roll.take


def take_any(
    roll: Roll, sender: bytes, message: FromNode, now: float
) -> tuple[ToNode | None, Event | None]:
    answer, _ = TAKE(roll, sender, message, now)
    return answer, message if isinstance(message, RankGone | RankStopped) else None


class Other(Exception):
    """Is never raised."""


BUGS: dict[str, tuple[str, Any, str]] = {
    "bytes that do not parse": (
        "router", patch.object(gate, "_safe", unguarded), "Misbehaved"
    ),
    "watchers that stay": (
        "router", patch.object(Monitor, "watching", watching_for_ever), "watchers: 0 were held"
    ),
    "records that are no JSON": (
        "records in Redis", patch.object(records, "UNREADABLE", ()), "msgspec"
    ),
    "frames that are no message": (
        "frames of engines", patch.object(supervisor, "UNREADABLE", ()), "msgspec"
    ),
    "ids beyond the vocabulary": (
        "orders to decode engines", patch.object(Intake, "_check_ids", lambda *_: None), "INTERNAL"
    ),
    "what is no transfer message": (
        "ZMQ frames", patch.object(zmq_transport, "MalformedMessage", Other), "MalformedMessage"
    ),
    "bodies that are no JSON": (
        "OpenAI's API", patch.object(openai_bodies, "parse_body", json.loads), "a failure of ours"
    ),
    "ranks of another host": (
        "hosts of a group", patch.object(Roll, "take", take_any), "a report of rank"
    ),
    "peers of before": (
        "ZMQ and CURVE handshakes",
        patch.object(zmq_sockets, "descriptor_of", descriptor_of),
        "ZMQError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    name, planted, found = BUGS[bug]
    with planted, patch.object(surface, "PATIENCE", 5):
        report = fed(INNER[name], MOST)
    assert any(found in one for one in report.findings), report.findings


async def never_found(self: KnownRequests, request_id: str, tenant: str = "") -> None:
    await asyncio.Event().wait()


def test_a_hang_is_found_as_it_hangs_alone_too() -> None:
    with (
        patch.object(KnownRequests, "look_up", never_found),
        patch.object(services, "DEADLINE_S", 0.5),
        patch.multiple(surface, PATIENCE=5, MOST_FINDINGS=1),
    ):
        report = fed(INNER["router"], 400)
    assert report.outcomes["late"] == len(report.late) > 0
    (found,) = report.findings
    assert "asked again alone" in found and "Request DEADLINE_EXCEEDED" in found


def test_what_ran_late_once_is_none() -> None:
    find, left = KnownRequests.look_up, iter(range(2))

    async def late(self: KnownRequests, request_id: str, tenant: str = "") -> Any:
        if next(left, None) is not None:
            raise DeadlineExceeded("the machine had no time")
        return await find(self, request_id, tenant)

    with patch.object(KnownRequests, "look_up", late):
        report = fed(INNER["router"], 400)
    assert (len(report.late), report.findings) == (2, [])
