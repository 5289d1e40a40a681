"""What of a client's settings becomes a request, and what is refused before there is one."""

from __future__ import annotations

import pytest

import effuse
from effuse.client.options import Options
from effuse.client.params import make_request


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
        with pytest.raises(ValueError, match="prompt: expected a text, a Chat or token ids, got b"):
            make_request(raw, effuse.Params())


def test_settings_that_no_request_can_hold_are_named() -> None:
    params = effuse.Params(max_tokens=-1, seed=1 << 64, logit_bias={-5: 1.0}, top_k=7)
    with pytest.raises(ValueError, match=r"^max_tokens: .*-1; logit_bias: .*-5; seed: .*616$"):
        make_request("x", params)
    with pytest.raises(UnicodeEncodeError):
        make_request("\ud800", effuse.Params())


@pytest.mark.parametrize("token", ["of a file\n", "t\u00f6ken"])
def test_a_token_that_no_call_can_carry_is_refused_and_not_shown(token: str) -> None:
    for kind in (effuse.Client, effuse.AsyncClient):
        with pytest.raises(ValueError, match=r"^token: expected printable ASCII on one line$"):
            kind("127.0.0.1:1", token=token)
