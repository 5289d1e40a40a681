"""Calls over HTTP to a fleet of fakes: by OpenAI's client, and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from router.fakes import FakeFleet
from router.fakes import run as run_fleet

TEXT = "the answer is three"
CHAT: list[Any] = [{"role": "user", "content": "how many?"}]


def run(body: Callable[[FakeFleet], Awaitable[None]], **settings: Any) -> None:
    async def closing(fleet: FakeFleet) -> None:
        try:
            await body(fleet)
        finally:
            while CLIENTS:
                await CLIENTS.pop().close()

    run_fleet(closing, http_port=0, **settings)


CLIENTS: list[openai.AsyncOpenAI] = []


def client_of(fleet: FakeFleet, key: str = "none") -> openai.AsyncOpenAI:
    """OpenAI's client, which is closed at the test's end."""
    url = f"http://127.0.0.1:{fleet.router.ports.http}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)
    CLIENTS.append(client)
    return client


async def raw(
    fleet: FakeFleet, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One call on a connection of its own: status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.router.ports.http)
    told = {"Host": "here", "Connection": "close", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in told.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    whole = await reader.read()
    writer.close()
    head_bytes, _, rest = whole.partition(b"\r\n\r\n")
    first, *lines = head_bytes.decode().split("\r\n")
    named = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), named, rest


async def post(
    fleet: FakeFleet, path: str, body: object, **headers: str
) -> tuple[int, dict[str, str], Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content_Type": "application/json", **headers}
    status, named, told = await raw(fleet, "POST", path, data, **sent)
    return status, named, json.loads(told)
