"""Refusals of OpenAI's HTTP API: each one names the field of the body that is at fault."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from router.fake_model import MASK
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, until
from router.http_calls import CHAT, post, run

from effuse.protos import errors


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ({"max_completion_tokens": 256}, "max_completion_tokens"),
        ({"max_tokens": 256}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"first_block_within": -1}, "first_block_within"),
        ({"request_class": "x"}, "request_class"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
        ({"model": "no name"}, "model"),
        ({"top_p": 2}, "top_p"),
        ({"n": 99}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"a": json.loads("[" * 101 + "]" * 101)}]}, "tools"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
        ({"messages": "hi"}, "messages"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"": 1}, "''"),
        ({"window": 2, "algorithm": "block_diffusion"}, "window"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_bad_field_is_named(sent: dict[str, object], param: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        status, _, told = await post(fleet, "/v1/chat/completions", {"messages": CHAT, **sent})
        error = told["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert param.partition("[")[0] in error["message"]
        assert not fleet.decode[0].requests and not fleet.prefill[0].prompts

    run(body)


@pytest.mark.parametrize("count", [0, 1])
def test_log_probabilities_of_the_prompt_are_refused(count: int) -> None:
    """OpenAI's API puts them before those of the answer, and harnesses add them up."""

    async def body(fleet: FakeFleet) -> None:
        sent = {"prompt": [65, 66], "echo": True, "max_tokens": 1}
        assert (await post(fleet, "/v1/completions", sent))[0] == 200
        status, _, told = await post(fleet, "/v1/completions", {**sent, "logprobs": count})
        assert (status, told["error"]["param"]) == (400, "echo")

    run(body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_full_of_faults_gets_a_short_response(path: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        unknown = {f"{at:x}": 1 for at in range(20_000)}
        status, _, told = await post(fleet, path, unknown)
        assert (status, told["error"]["param"]) == (400, "0")
        assert len(json.dumps(told)) < 16_000

    run(body)


@pytest.mark.parametrize("field", ["role", "content"])
def test_a_value_on_many_levels_is_refused_as_any_other(field: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        for levels in range(900, 995):
            deep = '{"a":' * levels + "1" + "}" * levels
            sent = {"role": '"user"', "content": '"a"', field: deep}
            message = ",".join(f'"{name}":{value}' for name, value in sent.items())
            data = f'{{"messages":[{{{message}}}]}}'.encode()
            status, _, told = await post(fleet, "/v1/chat/completions", data)
            assert (status, told["error"]["type"]) == (400, "invalid_request_error"), levels

    run(body)


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/v1/completions", {"prompt": "how many?"}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}, "messages"),
    ],
)
def test_a_prompt_is_named_that_a_worker_or_the_whole_fleet_refuses(
    path: str, sent: dict[str, object], param: str
) -> None:
    async def body(fleet: FakeFleet) -> None:
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        prefill.at["start"] = raises(errors.InvalidRequest.of("prompt", "needs 9 pages"))
        _, _, told = await post(fleet, path, sent)
        assert told["error"]["param"] == param
        assert told["error"]["message"] == f"{param}: needs 9 pages"
        small = msgspec.structs.replace(decode.record.capacity, max_num_batched_tokens=1)
        decode.record = msgspec.structs.replace(decode.record, capacity=small)
        await fleet.announce()
        status, _, told = await post(fleet, path, sent)
        assert (status, told["error"]["param"]) == (400, param)
        assert told["error"]["message"].startswith(f"{param}: expected at most 1 prompt tokens")

    run(body)


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        (["a", ""], "prompt[1]"),
        (["a", "b", "c" * 300], "prompt[2]"),  # only its ids show it
        ([[1], [1, MASK]], "prompt[1][1]"),
        ([[1, MASK]], "prompt[0][1]"),
        ([1, MASK], "prompt[1]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_at_fault_is_named_by_its_place(
    prompts: list[object], param: str, stream: bool
) -> None:
    async def body(fleet: FakeFleet) -> None:
        sent = {"prompt": prompts, "stream": stream}
        status, _, told = await post(fleet, "/v1/completions", sent)
        assert (status, told["error"]["param"]) == (400, param)
        assert told["error"]["message"].startswith(f"{param}: expected")

    run(body)


def test_ids_and_names_are_named_that_are_taken_or_unknown() -> None:
    async def body(fleet: FakeFleet) -> None:
        go = asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(go)
        sent = {"prompt": "how many?", "request_id": "mine"}
        first = asyncio.create_task(post(fleet, "/v1/completions", sent))
        await until(lambda: bool(fleet.decode[0].running))
        status, _, told = await post(fleet, "/v1/completions", sent)
        assert (status, told["error"]["param"]) == (409, "request_id")
        go.set()
        assert (await first)[0] == 200
        status, _, told = await post(fleet, "/v1/completions", {"prompt": "a", "model": "other"})
        assert (status, told["error"]["param"]) == (404, "model")

    run(body)
