"""Values of a wrong kind: one clear line that names the argument, before anything is sent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import effuse
from effuse.client.params import ids_of, make_request, make_tokenize_request
from effuse.client.retries import Options
from effuse.protos.errors import Cancelled
from effuse.v1 import generation_pb2 as pb

HALF = "\ud800"
PARAMS = effuse.Params()


@pytest.mark.parametrize(
    "wrong", [None, 5, "x", [None], ["x"], {"role": "user", "content": "x"}, b"x"]
)
def test_messages_of_a_chat(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages(\[0\])?: expected .*, got "):
        effuse.Chat.of(wrong)


@pytest.mark.parametrize("wrong", [None, 5, "x", [None], ["x"], [{"role": "user", "content": "x"}]])
def test_messages_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages(\[0\])?: expected .*, got "):
        effuse.Chat(wrong)
    with pytest.raises(ValueError, match=r"^template_arguments: expected .*, got "):
        effuse.Chat(template_arguments=wrong)


@pytest.mark.parametrize("content", [None, 5, b"x", HALF])
def test_a_text_of_a_message(content: Any) -> None:
    for say in (effuse.Chat().user, effuse.Chat().system, effuse.Chat().assistant):
        with pytest.raises(ValueError, match=r"^messages\[0\].*expected .*, got "):
            say(content)


@pytest.mark.parametrize("prompt", [{5, 6}, frozenset({5}), [True, False], np.array([True])])
def test_ids_that_have_no_order_or_are_none(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompt: expected "):
        make_request(prompt, PARAMS)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "max_tokens", "seed", "n", "logprobs", "min_tokens"]
)
def test_an_array_is_no_number(name: str) -> None:
    values: list[Any] = [np.array([1]), np.array(1)]
    for wrong in values:
        with pytest.raises(ValueError, match=rf"^{name}: expected "):
            effuse.Params(**{name: wrong})


def test_a_value_is_shown_in_one_line_that_ends() -> None:
    values: list[Any] = [10**400, "x" * 4000, np.zeros((50, 50)), "a\nb"]
    for wrong in values:
        for name in ("temperature", "max_tokens", "algorithm", "echo"):
            with pytest.raises(ValueError, match=rf"^{name}: expected ") as caught:
                effuse.Params(**{name: wrong})
            assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: make_request(HALF, PARAMS), "prompt"),
        (lambda: make_request("x", PARAMS, request_id=HALF), "request_id"),
        (lambda: make_request("x", PARAMS, request_id=5), "request_id"),  # type: ignore[arg-type]
        (lambda: make_tokenize_request("x", 5, False), "model"),  # type: ignore[arg-type]
        (lambda: ids_of("token_ids", ["a"]), "token_ids"),
        (lambda: ids_of("token_ids", "abc"), "token_ids"),
        (lambda: ids_of("token_ids", [-1]), "token_ids"),
        (lambda: ids_of("token_ids", 5), "token_ids"),
        (lambda: Options(timeout_s="5"), "timeout_s"),  # type: ignore[arg-type]
        (lambda: Options().deadline_s("5"), "timeout_s"),  # type: ignore[arg-type]
        (lambda: Options().deadline_s(Decimal("sNaN")), "timeout_s"),  # type: ignore[arg-type]
        (lambda: Options().deadline_s(np.array([5, 6])), "timeout_s"),  # type: ignore[arg-type]
        (lambda: Options(max_attempts="5"), "max_attempts"),  # type: ignore[arg-type]
        *((lambda wrong=wrong: effuse.Client(wrong), "target") for wrong in ("", None, 5)),
    ],
)
def test_the_argument_is_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected .*, got "):
        call()


@pytest.mark.parametrize(("name", "wrong"), [("tls", True), ("tls", "ca.pem"), ("token", 5)])
@pytest.mark.parametrize("kind", [effuse.Client, effuse.AsyncClient])
def test_credentials_of_another_kind(kind: Callable[..., object], name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: expected \w+, got \w+$"):
        kind("127.0.0.1:1", **{name: wrong})


async def _done(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("request_id", lambda client: client.cancel(5)),
        ("request_id", lambda client: client.cancel(HALF)),
        ("model", lambda client: client.detokenize([5], model=5)),
        ("request", lambda client: client.stream_of(None)),
        ("request", lambda client: client.stream_of(pb.GenerateStreamRequest())),
    ],
)
@pytest.mark.parametrize("kind", [effuse.Client, effuse.AsyncClient])
def test_the_argument_of_a_call_is_named(
    kind: Callable[..., Any], name: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected .*, got "):
        asyncio.run(_done(call(kind("127.0.0.1:1"))))


@pytest.mark.parametrize("wrong", [float("nan"), 1e300, "a", None, True, -1])
def test_an_interval_that_is_no_number_of_seconds(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^interval_s: expected seconds .*, got "):
        next(effuse.Client("127.0.0.1:1").watch_requests(wrong))


@pytest.mark.parametrize("given", [Decimal("5"), Fraction(5), np.float32(5)])
def test_seconds_of_other_types_of_numbers(given: Any) -> None:
    options = Options(timeout_s=given)
    found = [options.timeout_s, options.deadline_s(None), options.deadline_s(given)]
    assert found == [5.0] * 3 and {type(one) for one in found} == {float}
    assert options.retries(None).left_s <= 5.0 and options.retries(given).left_s <= 5.0


@pytest.mark.parametrize("given", [Decimal("0.25"), Fraction(1, 4), np.float32(0.25)])
def test_an_interval_of_another_type_of_number(given: Any) -> None:
    client = effuse.Client("127.0.0.1:1")
    client.close()
    with pytest.raises(Cancelled):
        next(client.watch_requests(given))


def test_params_stay_as_they_were_checked() -> None:
    biases, stops, ids = {5: 1.0}, ["a"], [6]
    params = effuse.Params(logit_bias=biases, stop=stops, stop_token_ids=ids)
    biases[5], biases[6] = 1e9, 2.0
    stops.append("")
    ids.append(-1)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: 1.0}, ("a",), (6,))
