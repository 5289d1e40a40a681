"""HTTP surfaces: the API of a router, and the pages that a fleet shows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fuzz.http_bodies import TOKEN, Drawn, drawn_call
from fuzz.services import Misbehaved, held_by
from fuzz.surface import Face, RanLate
from router.fakes import FakeFleet, fake_fleet

from effuse.protos.errors import REQUEST_ID_KEY
from effuse.router.tenants import Tenant, line_of

DEADLINE_S: Final = 60.0
PIECE_S: Final = 0.02
"""How long a response to a request of false framing is awaited: it need not come."""

OURS: Final = frozenset({"server_error"})
"""Errors in streams that bad input may never have."""

ALLOWED: Final = frozenset({503, 504})
"""The only statuses of servers that bad input may have."""

ERROR_FIELDS: Final = {"message", "type", "param", "code"}
OF_NO_FIELD: Final = ("expected a body of JSON", "expected a JSON object")
"""How refusals of a body begin that blame no field."""
MOST_BODY: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as read; `is_whole`: its end has come."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool


def parsed(data: bytes) -> Iterator[Answer]:
    """The responses of one connection, without those of status 100."""
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        if not end:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status = first.split(" ")[:2]
        assert version == "HTTP/1.1", first
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
        if status == "100":
            continue
        is_whole = True
        if headers.get("transfer-encoding") == "chunked":
            body, data, is_whole = _unchunked(data)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, data, is_whole = data[:size], data[size:], len(data) >= size
        else:
            body, data = data, b""
        yield Answer(int(status), headers, body, is_whole)


def _unchunked(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while b"\r\n" in data:
        size, _, rest = data.partition(b"\r\n")
        num = int(size, 16)
        if len(rest) < num + 2:
            break
        body, data = body + rest[:num], rest[num + 2 :]
        if num == 0:
            return body, data, True
    return body, data, False


def check(answer: Answer) -> None:
    """Raises AssertionError for an answer that no input may get."""
    kind = answer.headers.get("content-type", "")
    assert answer.status < 500 or answer.status in ALLOWED, "a status of a failure of ours"
    if not answer.is_whole:
        return
    if kind.startswith("text/event-stream"):
        _check_events(answer.body)
        return
    assert kind == "application/json", f"a body of another type: {kind!r}"
    told = json.loads(answer.body)
    if answer.status >= 400 and "status" not in told:  # which is /health's
        _check_error(told)


def _check_error(told: Any) -> None:
    assert told.keys() == {"error"} and told["error"].keys() == ERROR_FIELDS, told
    assert told["error"]["message"], told
    assert told["error"]["type"] not in OURS, told
    if told["error"]["code"] == "invalid_request" and told["error"]["param"] is None:
        assert told["error"]["message"].startswith(OF_NO_FIELD), told


def _check_events(body: bytes) -> None:
    *events, rest = body.split(b"\n\n")
    assert not rest, "a part of an event"
    assert all(one.startswith(b"data: ") for one in events), events
    *events, last = [one.removeprefix(b"data: ") for one in events]
    for event in events:
        assert "choices" in json.loads(event), event
    if last != b"[DONE]":
        _check_error(json.loads(last))


@dataclass
class InnerHttp:
    """The HTTP port of a router in this process, in front of fake workers."""

    fleet: FakeFleet

    async def feed(self, draw: random.Random) -> str:
        drawn, leaves = drawn_call(draw), draw.random() < 0.05
        outcome = await self._call(drawn, leaves=leaves, pause=draw.random() < 0.05)
        for worker in self.fleet.workers:  # they keep their messages
            for kept in (getattr(worker, "requests", []), getattr(worker, "prompts", [])):
                kept.clear()
        return outcome

    async def _call(self, drawn: Drawn, *, leaves: bool, pause: bool = False) -> str:
        """`leaves`: the client closes the connection in the middle of the answer."""
        port = self.fleet.router.ports.http
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        deadline_s = PIECE_S if drawn.count is None else DEADLINE_S
        received = bytearray()
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(deadline_s):
                    middle = len(drawn.data) // 2 if pause else len(drawn.data)
                    writer.write(drawn.data[:middle])
                    await asyncio.sleep(0)
                    writer.write(drawn.data[middle:])
                    while piece := await reader.read(300 if leaves else 1 << 16):
                        received += piece
                        if leaves:
                            return "left"
                    return self._outcome(drawn, bytes(received), has_ended=True)
            return self._outcome(drawn, bytes(received), has_ended=False)
        finally:
            writer.transport.abort()

    def _outcome(self, drawn: Drawn, received: bytes, *, has_ended: bool) -> str:
        answers, told = list(parsed(received)), f"{drawn.data[:3000]!r} got {received[:2000]!r}"
        try:
            for answer in answers:
                check(answer)
                if answer.status != 400:  # h11's own has no call
                    assert REQUEST_ID_KEY in answer.headers or answer.status in (404, 405)
        except (AssertionError, ValueError, KeyError, AttributeError) as error:
            raise Misbehaved(f"{error}: {told}") from error
        if drawn.count is not None and (len(answers) != drawn.count or not has_ended):
            ends = any(one.headers.get("connection") == "close" for one in answers)
            if has_ended and not ends:
                raise Misbehaved(f"{len(answers)} answers, not {drawn.count}: {told}")
            if not has_ended:
                raise RanLate(told, functools.partial(self._again, drawn))
        return str(answers[0].status) if answers else "no answer"

    async def _again(self, drawn: Drawn) -> None:
        await self._call(drawn, leaves=False)

    def held(self) -> Mapping[str, int]:
        return held_by(self.fleet.router)


class HttpSurface:
    """Every route of OpenAI's API, of a router whose workers are fakes."""

    name, weight, at_once = "OpenAI's API", 120, 16

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        async with contextlib.AsyncExitStack() as stack:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="effuse-fuzz-"))
            keys = Path(home) / "keys"
            keys.write_text(f"{line_of(TOKEN, Tenant('team'))}\n")
            opened = fake_fleet(http_port=0, max_message_bytes=MOST_BODY, keys=keys)
            fleet = await stack.enter_async_context(opened)
            for worker in fleet.decode:
                worker.others = [worker.answer] * 63  # whatever `n` is drawn
            yield InnerHttp(fleet)
