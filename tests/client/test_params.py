"""The settings of a client in its request, and those that are refused before there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from router.fake_model import model_info

import effuse
from effuse.client.credentials import Credentials, read_target
from effuse.client.params import NAMES, make_request, make_tokenize_request
from effuse.client.retries import Options
from effuse.config.decoding import ALGORITHMS, SAMPLING, SETTINGS, STOPPING
from effuse.protos.errors import InvalidRequest
from effuse.protos.tls import TlsFiles
from effuse.router.validation import validate
from effuse.v1 import generation_pb2 as pb


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"timeout_s": float("nan")},
                                   {"timeout_s": 1e-10}, {"timeout_s": float("inf")},
                                   {"max_attempts": 0}, {"max_attempts": 6}])  # fmt: skip
def test_options_that_grpc_would_drop(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]


def test_a_call_may_take_longer_than_its_client_s_but_not_longer_than_grpc_counts() -> None:
    options = Options(timeout_s=5.0)
    assert (options.deadline_s(None), options.deadline_s(1e9), options.deadline_s(-1)) == (
        5,
        1e9,
        -1,
    )
    with pytest.raises(ValueError, match="above 0, at most 1000000000, got inf"):
        options.deadline_s(float("inf"))


def test_a_name_that_is_unknown_is_refused_here() -> None:
    with pytest.raises(ValueError, match="algorithm: expected one of d2f, block_diffusion"):
        make_request("x", effuse.Params(algorithm="ddim"))  # type: ignore[arg-type]


def test_a_text_is_never_taken_for_a_list() -> None:
    assert make_request("x", effuse.Params(stop="end")).stopping.stop == ["end"]
    for raw in (b"hello", bytearray(b"hello")):
        with pytest.raises(TypeError, match=r"^prompt: expected a string, .* token ids, got b"):
            make_request(raw, effuse.Params())


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "NoneType"), (5, "int"), ({"role": "user", "content": "hi"}, "dict"),
        ([1, "a"], "list of int, str"), (["a"], "list of str"), ([1.5], "list of float"),
        ([{"role": "user", "content": "hi"}, 5], "list of dict, int"), ([[1]], "list of list"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_in_one_line(wrong: Any, got: str) -> None:
    form = "a string, a Chat, a list of messages, or a list of token ids"
    for make in (
        lambda: make_request(wrong, effuse.Params()),
        lambda: make_tokenize_request(wrong, None, False),
    ):
        with pytest.raises(TypeError, match=rf"^prompt: expected {form}, got {got}$"):
            make()


def test_a_list_of_messages_is_a_chat() -> None:
    said = [{"role": "user", "content": "hi"}]
    chat = effuse.Chat().user("hi")
    assert make_request(said, effuse.Params()).chat == chat.to_input()
    assert make_tokenize_request(said, None, False).chat == chat.to_input()
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content: expected a string"):
        make_request([{"role": "user"}], effuse.Params())
    with pytest.raises(TypeError, match="a list of messages, got token ids"):
        make_tokenize_request([1, 2], None, False)  # type: ignore[list-item]


def test_ids_are_whole_numbers_that_a_request_holds() -> None:
    assert make_request(range(3), effuse.Params()).prompt_token_ids.ids == [0, 1, 2]
    for wrong in (-1, 1 << 32):
        with pytest.raises(ValueError, match=rf"^prompt: expected token ids .*, got {wrong}$"):
            make_request([1, wrong], effuse.Params())


@pytest.mark.parametrize("wrong", [{"max_tokens": 5}, None, "greedy"])
def test_what_are_no_params_are_refused_in_one_line(wrong: Any) -> None:
    got = type(wrong).__name__
    with pytest.raises(TypeError, match=rf"^params: expected effuse\.Params, got {got}$"):
        make_request("x", wrong)


def test_settings_that_no_router_takes_are_named() -> None:
    with pytest.raises(ValueError, match=r"^max_tokens: .*-1; logit_bias: .*-5; seed: .*616$"):
        effuse.Params(max_tokens=-1, seed=1 << 64, logit_bias={-5: 1.0}, top_k=7)
    with pytest.raises(ValueError, match="prompt: expected whole characters"):
        make_request("\ud800", effuse.Params())


WRONG: list[dict[str, Any]] = [
    {"temperature": -1}, {"temperature": 1e-4}, {"temperature": float("nan")}, {"temperature": "1"},
    {"temperature": True}, {"top_p": 0}, {"top_p": 1e-46}, {"top_p": 1.1}, {"top_k": -1},
    {"top_k": 2.0}, {"min_p": 2}, {"presence_penalty": 3}, {"frequency_penalty": -3},
    {"repetition_penalty": 0}, {"n": 0}, {"n": 65}, {"logprobs": 21}, {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"stop": ""}, {"stop": "a" * 257}, {"stop": ["a", "a"]}, {"stop": [1]}, {"stop": 5},
    {"stop": [str(one) for one in range(17)]}, {"stop": ["\ud800"]}, {"stop_token_ids": [-1]},
    {"stop_token_ids": range(65)}, {"stop_token_ids": ["a"]}, {"stop_token_ids": 5},
    {"logit_bias": {1: 101}}, {"logit_bias": {"a": 1}}, {"logit_bias": [1]},
    {"logit_bias": dict.fromkeys(range(513), 1.0)}, {"window": 0}, {"confidence_threshold": 2},
    {"denoising_steps": 0}, {"entropy_bound": -1}, {"steps": 65537}, {"cfg_scale": 101},
    {"eps": -1}, {"alg_temp": -1}, {"factor": -1}, {"max_post_steps": 1025}, {"block_length": 0},
    {"editing_threshold": 2}, {"score": "best"}, {"remasking": 1}, {"alg": "x"}, {"cache": "x"},
    {"priority": "urgent"}, {"algorithm": []}, {"ignore_eos": "no"}, {"echo": 2}, {"model": 5},
    {"model": "\ud800"}, {"min_tokens": 5, "max_tokens": 4},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_bad_value_is_refused_when_it_is_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}(\[\d\])?: "):
        effuse.Params(**wrong)


def test_good_values_at_the_limits_are_taken_by_a_router() -> None:
    """Each limit is the router's own."""
    for name, bounds in {**SAMPLING, **SETTINGS, **STOPPING}.items():
        if name not in ("answer_index", "denoising_steps", "max_tokens", "min_tokens", "top_k"):
            for value in (bounds.low, bounds.high):
                if value in bounds:
                    given: dict[str, Any] = {name: value}
                    asked = make_request("x", effuse.Params(**given))
                    assert said_against(asked, name) == []


def said_against(request: pb.GenerateRequest, name: str) -> list[str]:
    algorithms = [one for one, traits in ALGORITHMS.items() if name in traits.settings]
    if algorithms:
        request.decoding.algorithm = NAMES["algorithm"][algorithms[0]]
    try:
        validate(request, model_info(), is_stream=False)
    except InvalidRequest as error:
        return [one.field for one in error.violations if one.field.endswith(name)]
    return []


def test_a_list_may_be_given_and_changed_later() -> None:
    stops, ids = ["a"], [7]
    params = effuse.Params(stop=stops, stop_token_ids=ids)
    stops.append("b")
    assert params == effuse.Params(stop=("a",), stop_token_ids=(7,)) and hash(params)
    assert make_request("x", effuse.Params(stop="a")).stopping.stop == ["a"]


@pytest.mark.parametrize("token", ["of a file\n", "t\u00f6ken", "two\nlines", "a\0"])
def test_a_token_that_no_call_can_carry_is_refused_and_not_shown(token: str) -> None:
    for kind in (effuse.Client, effuse.AsyncClient):
        with pytest.raises(ValueError, match=r"^token: expected printable ASCII on one line$"):
            kind("127.0.0.1:1", token=token)


@pytest.mark.parametrize("token", ["effuse-abc\n", " effuse-abc\r\n", "effuse-abc"])
def test_a_token_may_come_from_a_file_as_it_stands_there(token: str) -> None:
    assert Credentials(token=token).metadata() == (("authorization", "Bearer effuse-abc"),)
    for kind in (effuse.Client, effuse.AsyncClient):
        kind("127.0.0.1:1", token=token)


SYSTEM, OURS = TlsFiles(), TlsFiles(ca=Path("ca.pem"))


@pytest.mark.parametrize(
    ("target", "tls", "found"),
    [
        ("host:1", None, ("host:1", None)), ("host:1", OURS, ("host:1", OURS)),
        ("dns:///host:1", None, ("dns:///host:1", None)),
        ("http://host:1", None, ("host:1", None)), ("http://host:1/", None, ("host:1", None)),
        ("http://host", None, ("host:80", None)), ("https://host", None, ("host:443", SYSTEM)),
        ("https://host:1", OURS, ("host:1", OURS)), ("HTTPS://[::1]:1", None, ("[::1]:1", SYSTEM)),
    ],
)  # fmt: skip
def test_a_url_says_whether_it_is_tls(
    target: str, tls: TlsFiles | None, found: tuple[str, TlsFiles | None]
) -> None:
    assert read_target(target, tls) == found


@pytest.mark.parametrize(
    ("target", "tls", "form"),
    [
        ("http://", None, "http://HOST:PORT"), ("http://host:1/v1", None, "http://HOST:PORT"),
        ("http://host:0x1", None, "http://HOST:PORT"), ("http://host:99999", None, "http://HOST"),
        ("https://me@host:1", None, "https://HOST:PORT"), ("http://host:1", OURS, "https:// with"),
        ("https://host:1?a=b", None, "https://HOST:PORT"),
    ],
)  # fmt: skip
def test_a_url_of_more_than_a_router_is_refused(
    target: str, tls: TlsFiles | None, form: str
) -> None:
    for kind in (effuse.Client, effuse.AsyncClient):
        with pytest.raises(
            ValueError, match=f"^target: expected {form}.*, got '{re.escape(target)}"
        ):
            kind(target, tls=tls)
