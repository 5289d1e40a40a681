"""OpenAI's HTTP API of a router, called by OpenAI's own client and by raw HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import Any

import openai
import pytest
from certificates import Authority
from router.asking import ask
from router.fake_model import ANSWER, PROMPT, ids_of
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, until
from router.http_calls import CHAT, TEXT, client_of, post, raw, run
from starlette.applications import Starlette

from effuse.client.chat import Chat
from effuse.client.params import Params, make_request
from effuse.protos import errors
from effuse.router.http_server import HttpServer
from effuse.router.tenants import Tenant, line_of
from effuse.v1 import generation_pb2 as pb


def test_a_chat_is_answered_whole_and_as_it_grows() -> None:
    async def body(fleet: FakeFleet) -> None:
        client = client_of(fleet)
        whole = await client.chat.completions.create(model="fake", messages=CHAT)
        (choice,) = whole.choices
        assert (choice.message.content, choice.finish_reason) == (TEXT, "stop")
        assert choice.message.role == "assistant" and whole.model == "fake"
        assert whole.usage is not None and whole.usage.completion_tokens == len(ids_of(TEXT))
        assert fleet.prefill[0].prompts[-1] == [PROMPT, *ids_of("how many?"), ANSWER]
        stream = await client.chat.completions.create(
            model="fake", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        *said, last = chunks
        texts = [choice.delta.content or "" for chunk in said for choice in chunk.choices]
        assert "".join(texts) == TEXT and len([text for text in texts if text]) > 1
        assert said[0].choices[0].delta.role == "assistant"
        assert said[-1].choices[0].finish_reason == "stop"
        assert last.choices == [] and last.usage == whole.usage
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        route = {"route": "/v1/chat/completions", "status": "200"}
        await until(lambda: fleet.metric("effuse_http_responses_total", **route) == 2)

    run(body)


def test_it_is_the_answer_that_grpc_gives() -> None:
    async def body(fleet: FakeFleet) -> None:
        settings: dict[str, object] = {
            "temperature": 0.7,
            "seed": 11,
            "max_tokens": 9,
            "stop": "zz",
            "n": 2,
        }
        fleet.decode[0].others = [ids_of("four")]
        await post(fleet, "/v1/completions", {"prompt": "how many?", **settings})
        over_http = fleet.decode[0].requests
        await fleet.idle()
        fleet.decode[0].requests = []
        await ask(
            fleet,
            n=2,
            sampling=pb.SamplingParams(temperature=0.7, seed=11),
            stopping=pb.StoppingParams(max_tokens=9, stop=["zz"]),
        )
        for one, other in zip(over_http, fleet.decode[0].requests, strict=True):
            for each in (one, other):
                each.ClearField("attempt")
                each.ClearField("group")
            assert one == other

    run(body)


def test_an_event_is_one_line_for_every_client() -> None:
    """Some clients end lines where `str.splitlines` does, which the standard of events does not."""

    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].answer = ids_of(text := "a\u2028b\u2029c\x85d")
        sent = json.dumps({"prompt": "how many?", "stream": True}).encode()
        headers = {"Content_Type": "application/json"}
        _, _, streamed = await raw(fleet, "POST", "/v1/completions", sent, **headers)
        lines = [line for line in streamed.decode().splitlines() if len(line) > len("1ff")]
        assert all(line.startswith("data: ") for line in lines)
        *chunks, end = (line.removeprefix("data: ") for line in lines)
        assert end == "[DONE]"
        assert "".join(json.loads(one)["choices"][0]["text"] for one in chunks) == text

    run(body)


def test_several_prompts_have_several_answers_each() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of("four")]
        client = client_of(fleet)
        whole = await client.completions.create(model="fake", prompt=["one?", "two?"], n=2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in whole.choices] == [TEXT, "four"] * 2
        by_ids = await client.completions.create(model="fake", prompt=[ids_of("a"), ids_of("b")])
        assert len(by_ids.choices) == 2
        assert sorted(fleet.prefill[0].prompts[-2:]) == sorted([ids_of("a"), ids_of("b")])
        stream = await client.completions.create(
            model="fake", prompt=["one?", "two?"], n=2, stream=True, echo=True
        )
        texts: dict[int, str] = {}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert texts == {
            0: f"one?{TEXT}", 1: "one?four", 2: f"two?{TEXT}", 3: "two?four",
        }  # fmt: skip

    run(body)


def test_the_id_of_several_prompts_is_that_of_the_first_everywhere() -> None:
    async def body(fleet: FakeFleet) -> None:
        sent = {"prompt": ["one?", "two?"]}
        _, headers, told = await post(fleet, "/v1/completions", sent)
        assert headers["x-request-id"] == told["id"]
        streamed = json.dumps(sent | {"stream": True}).encode()
        kind = "application/json"
        _, headers, data = await raw(fleet, "POST", "/v1/completions", streamed, Content_Type=kind)
        assert f'"id":"{headers["x-request-id"]}"'.encode() in data

    run(body)


def test_log_probabilities_stand_beside_their_tokens() -> None:
    async def body(fleet: FakeFleet) -> None:
        client = client_of(fleet)
        chat = await client.chat.completions.create(
            model="fake", messages=CHAT, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None and "".join(one.token for one in content) == TEXT
        assert all(len(one.top_logprobs) == 2 for one in content)
        plain = await client.completions.create(model="fake", prompt="how many?", logprobs=2)
        found = plain.choices[0].logprobs
        assert found is not None and found.tokens is not None and found.text_offset is not None
        assert "".join(found.tokens) == TEXT and found.text_offset[:3] == [0, 1, 2]

    run(body)


def test_tools_and_tool_calls_reach_the_template_as_over_grpc() -> None:
    tools = [{"z": 1.0, "a": [12345678901234567, "\u00e9"]}]
    call = {"function": {"name": "add", "arguments": {"b": 2.0, "a": 1}}}
    said = [
        *CHAT, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "3"}]},
    ]  # fmt: skip

    async def body(fleet: FakeFleet) -> None:
        sent = {"messages": said, "tools": tools, "chat_template_kwargs": {"loud": tools}}
        status, _, _ = await post(fleet, "/v1/chat/completions", sent)
        assert status == 200
        chat = Chat.of(said, loud=tools, tools=tools)
        await fleet.generation.Generate(make_request(chat, Params()), timeout=30)
        (prefill,) = fleet.prefill
        assert prefill.prompts[0] == prefill.prompts[1]
        written = ids_of(repr(tools))
        assert prefill.prompts[0][-len(written) :] == written

    run(body)


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"{", b"[]", b'{"messages": NaN}', b"\xff\xfe", b'"' * 9, b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": 5, "messages": []}',
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_refused(sent: bytes) -> None:
    async def body(fleet: FakeFleet) -> None:
        status, _, told = await post(fleet, "/v1/chat/completions", sent)
        assert status == 400 and told["error"]["type"] == "invalid_request_error"
        assert (await ask(fleet)).text == TEXT

    run(body)


def test_only_json_of_a_bounded_size_is_read() -> None:
    async def body(fleet: FakeFleet) -> None:
        route = "/v1/chat/completions"
        status, _, _ = await post(fleet, route, {}, Content_Type="text/plain")
        assert status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        status, _, told = await post(fleet, route, {"messages": CHAT, "user": "u" * 2000})
        assert status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and "1024" in told["error"]["message"]
        status, _, _ = await raw(fleet, "GET", route)
        assert status == HTTPStatus.METHOD_NOT_ALLOWED
        status, _, told = await raw(fleet, "GET", "/v2/nothing")
        assert status == HTTPStatus.NOT_FOUND and b'"error"' in told

    run(body, max_message_bytes=1024)


def test_models_tokens_and_health() -> None:
    async def body(fleet: FakeFleet) -> None:
        client = client_of(fleet)
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "effuse"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none/such")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="none-such", messages=CHAT)
        status, _, told = await post(fleet, "/v1/tokenize", {"messages": CHAT})
        assert status == 200 and told["tokens"] == [PROMPT, *ids_of("how many?"), ANSWER]
        assert told["count"] == len(told["tokens"])
        status, _, told = await post(fleet, "/v1/tokenize", {"prompt": "hi"})
        assert told["tokens"] == [PROMPT, *ids_of("hi"), ANSWER]
        assert (await raw(fleet, "GET", "/health"))[0] == 200

    run(body)


def test_health_is_bad_without_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        status, _, told = await raw(fleet, "GET", "/health")
        assert status == 503 and b"no live worker" in told
        route = {"route": "/health", "status": "503"}
        assert fleet.metric("effuse_http_responses_total", **route) == 1

    run(body, num_decode=0)


def test_a_token_is_asked_for_where_there_are_keys(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("a-token", Tenant("team", max_requests=1)) + "\n")

    async def body(fleet: FakeFleet) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client_of(fleet, "another").models.list()
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert (await raw(fleet, "GET", "/health"))[0] == 200
        client = client_of(fleet, "a-token")
        whole = await client.chat.completions.create(model="fake", messages=CHAT)
        assert whole.choices[0].message.content == TEXT
        assert fleet.metric("effuse_tenant_requests_total", tenant="team", status="OK") == 1
        with pytest.raises(openai.BadRequestError):  # two answers count as two requests
            await client.chat.completions.create(model="fake", messages=CHAT, n=2)

    run(body, keys=keys)


def test_each_of_several_prompts_counts_as_a_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("a-token", Tenant("team", max_requests=3)) + "\n")

    async def body(fleet: FakeFleet) -> None:
        client, go = client_of(fleet, "a-token"), asyncio.Event()
        with pytest.raises(openai.BadRequestError, match="expected at most 3 answers") as never:
            await client.completions.create(model="fake", prompt=["a", "b"], n=2)
        assert never.value.param == "prompt" and not fleet.prefill[0].prompts
        fleet.decode[0].at["commit 1"] = holds(go)
        first = asyncio.create_task(client.completions.create(model="fake", prompt=["a", "b"]))
        await until(lambda: len(fleet.decode[0].running) == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests of this key's tenant"):
            await client.completions.create(model="fake", prompt=["c", "d"])
        assert fleet.metric("effuse_refused_total", status="RESOURCE_EXHAUSTED", quota="true") == 1
        go.set()
        assert len((await first).choices) == 2

    run(body, keys=keys)


def test_the_limit_of_a_key_holds_for_calls_of_one_moment(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("a-token", Tenant("team", max_requests=2)) + "\n")

    async def body(fleet: FakeFleet) -> None:
        client, go = client_of(fleet, "a-token"), asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go)
        asked = [
            client.completions.create(model="fake", prompt=f"{number}?") for number in range(20)
        ]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await until(lambda: len(fleet.decode[0].running) == 2)
        await until(lambda: sum(task.done() for task in tasks) == 18)
        go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in found if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 18
        assert "2 requests of this key's tenant run or wait; its limit is 2" in str(refused[0])

    run(body, keys=keys)


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event())
        client = client_of(fleet)
        stream = await client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        async for _ in stream:
            break
        assert fleet.router.requests.num_running == 1
        await stream.close()
        await client.close()
        await fleet.idle()
        assert fleet.metric("effuse_requests_total", model_name="fake", status="CANCELLED") == 1

    run(body)


def test_a_failure_is_a_status_before_the_first_block_and_an_event_behind_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = raises(errors.CallerError("not like that"))
        client = client_of(fleet)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        fleet.decode[0].at = {"commit 1": raises(errors.CallerError("not like that"))}
        stream = await client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        with pytest.raises(openai.APIError, match="not like that"):
            async for _ in stream:
                pass

    run(body)


def test_running_calls_end_before_the_server_does() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event())
        client = client_of(fleet)
        stream = await client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        fleet.stop.set()
        await until(lambda: fleet.router.monitor.is_over.is_set())
        with pytest.raises(openai.APIError):  # the part that the drain's end cuts off
            async for _ in chunks:
                pass
        await client.close()

    run(body, drain_s=0.2)


def test_a_port_that_is_taken_is_named() -> None:
    first = HttpServer(Starlette())
    port = first.listen("127.0.0.1", 0, shares_port=False)
    assert first.taken is not None
    with first.taken, pytest.raises(OSError, match=f"127.0.0.1:{port}.*in use"):
        HttpServer(Starlette()).listen("127.0.0.1", port, shares_port=False)


def test_certificates_are_taken_anew_when_they_change(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "ca")
    files = authority.sign("router", "localhost")
    context = ssl.create_default_context(cafile=str(authority.cert))

    async def serial(fleet: FakeFleet) -> object:
        port = fleet.router.ports.http
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        shown = writer.get_extra_info("peercert")["serialNumber"]
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        return shown

    async def body(fleet: FakeFleet) -> None:
        before = await serial(fleet)
        authority.sign("router", "localhost")
        while await serial(fleet) == before:  # noqa: ASYNC110  # bounded by the test's deadline
            await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.router.ports.http)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await reader.read() == b""  # plain text gets no answer
        writer.close()

    run(body, tls_cert=files.cert, tls_key=files.key)
