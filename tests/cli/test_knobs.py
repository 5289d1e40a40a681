"""Flags become a request that only has the given settings."""

from __future__ import annotations

import argparse

import pytest

from effuse.cli.arguments import add_knobs, params_from
from effuse.client.params import Params, make_request
from effuse.v1 import generation_pb2


def _parse(*flags: str) -> Params:
    parser = argparse.ArgumentParser()
    add_knobs(parser)
    return params_from(parser, parser.parse_args(flags))


def test_nothing_given_leaves_every_knob_unset() -> None:
    assert _parse() == Params()
    request = make_request("hello", Params())
    assert request.prompt == "hello"
    assert not request.HasField("request_id") and not request.parse_special_tokens
    for message in (request.sampling, request.stopping, request.decoding, request.output):
        assert not [field for field, value in message.ListFields() if value]


def test_every_flag_reaches_its_field() -> None:
    knobs = _parse(
        *("--model", "m", "--n", "3", "--max-tokens", "9", "--stop", "a", "--stop", "b"),
        *("--stop-token-id", "3", "--ignore-eos", "--temperature", "0.5", "--top-p", "0.25"),
        *("--top-k", "4", "--seed", "18446744073709551615", "--algorithm", "block_diffusion"),
        *("--window", "2", "--confidence-threshold", "0.75", "--block-add-threshold", "0.5"),
        *("--full-activation-threshold", "1", "--score", "margin"),
        *("--remasking", "sequential", "--denoising-steps", "6", "--block-length", "8"),
        *("--steps", "16", "--cfg-scale", "1.5", "--logits-eos-inf", "--confidence-eos-eot-inf"),
        *("--alg", "entropy", "--eps", "0.25", "--alg-temp", "0.5", "--cache", "dual"),
        *("--parse-special-tokens", "--min-tokens", "5", "--min-p", "0.25"),
        *("--presence-penalty", "-0.5", "--frequency-penalty", "1", "--repetition-penalty", "1.5"),
        *("--logit-bias", "7=-100", "--logit-bias", "8=0.5", "--logprobs", "3", "--echo"),
        *("--priority", "high"),
    )
    request = make_request("p", knobs, request_id="r", drafts=True)
    assert (request.model, request.request_id, request.output.drafts) == ("m", "r", True)
    assert request.parse_special_tokens
    assert (request.output.logprobs, request.output.echo) == (3, True)
    assert request.priority == generation_pb2.PRIORITY_HIGH
    assert request.stopping == generation_pb2.StoppingParams(
        max_tokens=9, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, min_tokens=5
    )
    assert request.sampling == generation_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        seed=2**64 - 1,
        min_p=0.25,
        presence_penalty=-0.5,
        frequency_penalty=1,
        repetition_penalty=1.5,
        logit_bias={7: -100, 8: 0.5},
    )
    assert request.decoding == generation_pb2.DecodingParams(
        algorithm=generation_pb2.ALGORITHM_BLOCK_DIFFUSION,
        window=2,
        confidence_threshold=0.75,
        block_add_threshold=0.5,
        full_activation_threshold=1.0,
        score=generation_pb2.SCORE_MARGIN,
        remasking=generation_pb2.REMASKING_SEQUENTIAL,
        denoising_steps=6,
        block_length=8,
        steps=16,
        cfg_scale=1.5,
        logits_eos_inf=True,
        confidence_eos_eot_inf=True,
        alg=generation_pb2.ALG_ENTROPY,
        eps=0.25,
        alg_temp=0.5,
        cache=generation_pb2.CACHE_DUAL,
    )


@pytest.mark.parametrize(
    ("flag", "most"),
    [
        ("--top-k", 2**31 - 1),
        ("--max-tokens", 2**31 - 1),
        ("--stop-token-id", 2**32 - 1),
        ("--window", 64),
    ],
)
def test_a_number_beyond_its_bounds_is_refused(
    flag: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_request("p", _parse(flag, str(most)))
    with pytest.raises(SystemExit):
        _parse(flag, str(most + 1))
    told = capsys.readouterr().err
    assert f"to {most}" in told and f"got {most + 1}" in told


@pytest.mark.parametrize("given", ["nan", "inf", "-0.1", "much", "1e-9"])
def test_a_temperature_that_is_none_is_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parse(f"--temperature={given}")
    assert "expected a number from 0.001 to 100, or 0 for greedy" in capsys.readouterr().err


def test_zero_is_a_value_and_not_the_default() -> None:
    request = make_request("p", _parse("--temperature", "0", "--confidence-threshold", "0"))
    assert request.sampling.HasField("temperature")
    assert request.decoding.HasField("confidence_threshold")
