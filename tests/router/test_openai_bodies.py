"""Long bodies of OpenAI's HTTP API: read beside the loop, or refused before they are read."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from router.fakes import FakeFleet
from router.http_calls import CHAT, TEXT, post, run

from effuse.protos.errors import InvalidRequest
from effuse.router.few_at_once import MOST_WAITING
from effuse.router.openai_bodies import AT_ONCE_BYTES, SPARE_BYTES, BodyReader
from effuse.router.openai_requests import MOST_PROMPTS, request_of
from effuse.router.tenants import Tenant, line_of

CHATS, TEXTS, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/tokenize"
LONG = "a" * 240  # tokens
ESCAPED = "\\u0061" * 240


class Reads:
    """Counts the bodies that are read, and how often the loop turns meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lasts_s: float = 0.0) -> None:
        self.count = self.turns = self.most_turns = 0
        self._lasts_s = lasts_s
        monkeypatch.setattr("effuse.router.openai_bodies.request_of", self._read)

    def _read(self, *args: Any) -> Any:
        self.count += 1
        began, ends = self.turns, time.monotonic() + self._lasts_s
        while self.turns < began + 10 and time.monotonic() < ends:
            time.sleep(0.01)
        self.most_turns = max(self.most_turns, self.turns - began)
        return request_of(*args)

    async def tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("route", [CHATS, TEXTS, TOKENS])
def test_the_loop_turns_while_a_long_body_is_read(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(fleet: FakeFleet) -> None:
        reads = Reads(monkeypatch, lasts_s=10.0)
        ticking = asyncio.create_task(reads.tick())
        sent = {"prompt": "how many?"} if route == TEXTS else {"messages": CHAT}
        status, _, told = await post(fleet, route, {**sent, "user": "u" * AT_ONCE_BYTES})
        assert status == 200, told
        assert reads.most_turns >= 10
        ticking.cancel()

    run(body)


@pytest.mark.parametrize("route", [CHATS, TEXTS, TOKENS])
def test_a_body_longer_than_any_model_takes_is_not_read(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(fleet: FakeFleet) -> None:
        reads = Reads(monkeypatch)
        extra = '{"role":"user","content":"a","x":[%s[]]}' % ("[]," * ((4 << 20) // 3 - 100))
        sent = f'{{"messages":[{extra}]}}'.encode()
        status, _, told = await post(fleet, route, sent)
        assert status == 400 and "the model accepts 256 tokens" in told["error"]["message"]
        assert reads.count == 0
        name = "effuse_refused_total"
        assert route == TOKENS or fleet.metric(name, status="INVALID_ARGUMENT", quota="false") == 1

    run(body)


@pytest.mark.parametrize(
    ("route", "sent"),
    [
        (CHATS, {"messages": [{"role": "user", "content": LONG}]}),
        (CHATS, {"messages": [{"role": "user", "content": "why"}], "tools": [{"name": LONG * 16}]}),
        (TEXTS, {"prompt": [LONG] * MOST_PROMPTS}),
        (TEXTS, {"prompt": [[65] * len(LONG)] * MOST_PROMPTS}),
        (TOKENS, {"messages": [{"role": "user", "content": LONG}]}),
    ],
    ids=["chat", "tools", "texts", "ids", "tokenize"],
)
def test_no_right_body_is_too_long(route: str, sent: dict[str, Any]) -> None:
    """Whatever escapes, spaces and notes it has."""

    async def body(fleet: FakeFleet) -> None:
        noted = json.dumps({**sent, "max_tokens": 4, "user": "u" * (SPARE_BYTES // 2)})
        written = noted.replace(LONG, ESCAPED).replace(" ", " " * 20_000, 50)
        status, _, told = await post(fleet, route, written.encode())
        assert status == 200, told

    run(body)


def test_a_tenant_without_room_has_no_body_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    team = Tenant("team", max_requests=1)
    keys.write_text(line_of("a-token", team) + "\n")

    async def body(fleet: FakeFleet) -> None:
        reads, sent = Reads(monkeypatch), {"prompt": "how many?"}
        with fleet.router.quotas.running(team):
            status, _, told = await post(fleet, TEXTS, sent, Authorization="Bearer a-token")
        assert (status, reads.count) == (429, 0)
        assert "1 requests of this key's tenant run or wait" in told["error"]["message"]
        status, _, told = await post(fleet, TEXTS, sent, Authorization="Bearer a-token")
        assert (status, told["choices"][0]["text"]) == (200, TEXT)

    run(body, keys=keys)


@pytest.mark.parametrize("body", [b'{"prompt": [[]], "x": 1}', b'{"messages": 5}'])
def test_the_collector_rests_until_a_body_is_checked(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a refusal keeps none of the body's values, of which there may be a million."""
    collects = []

    def read(*args: Any) -> Any:
        collects.append(gc.isenabled())
        return request_of(*args)

    monkeypatch.setattr("effuse.router.openai_bodies.request_of", read)
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        reader = BodyReader(SimpleNamespace(longest=256))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(reader.read(body))
        assert collects == [False] and gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
    trace = refused.value.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals["__name__"]
        assert module != "effuse.router.openai_requests"
        assert "found" not in trace.tb_frame.f_locals
        trace = trace.tb_next


def test_a_null_chat_is_a_prompt() -> None:
    reader = BodyReader(SimpleNamespace(longest=256))  # type: ignore[arg-type]
    wanted = asyncio.run(reader.read(b'{"messages": null, "prompt": "a"}'))
    assert wanted.endpoint == "completion"


def test_a_burst_of_long_bodies_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the queue of requests refuses, by the operator's limits."""
    may_end = threading.Event()

    def read(*args: Any) -> Any:
        assert may_end.wait(30)
        return request_of(*args)

    monkeypatch.setattr("effuse.router.openai_bodies.request_of", read)
    sent = json.dumps({"prompt": "how many?", "user": "u" * AT_ONCE_BYTES}).encode()

    async def burst() -> None:
        reader = BodyReader(SimpleNamespace(longest=256))  # type: ignore[arg-type]
        calls = [asyncio.create_task(reader.read(sent)) for _ in range(2 * MOST_WAITING)]
        await asyncio.sleep(0)
        may_end.set()
        assert all(len(one.requests) == 1 for one in await asyncio.gather(*calls))

    asyncio.run(burst())
