"""The catalogue of bad input, as a table: the named field, and a part of its text."""

from __future__ import annotations

import msgspec
import pytest
from bad_input.requests import (
    Change,
    Facts,
    decoding,
    ids,
    prompt,
    sampling,
    stopping,
    wrong_requests,
)
from router.fake_model import BLOCK_SIZE, EOS, MASK, MAX_MODEL_LEN, PAD, VOCAB_SIZE, model_info

from effuse.config.decoding import DecodeSettings, DecodingDefaults, Sampling
from effuse.placement.records import ModelInfo
from effuse.protos.errors import InvalidRequest
from effuse.router.findings import Findings, check_model_name, check_request_id
from effuse.router.validation import Asked, fit, validate
from effuse.v1 import generation_pb2 as pb

FACTS = Facts(
    vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, mask=MASK, pad=PAD
)
BAD = wrong_requests(FACTS)


def good() -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="how many?")


def check(request: pb.GenerateRequest, *, is_stream: bool = True) -> Asked:
    return validate(request, model_info(), {PAD, MASK}, is_stream=is_stream)


@pytest.mark.parametrize(("change", "field", "text"), BAD.values(), ids=BAD.keys())
def test_bad_input_names_its_field(change: Change, field: str, text: str) -> None:
    request = good()
    change(request)
    with pytest.raises(InvalidRequest) as caught:
        check(request)
    assert {v.field for v in caught.value.violations} == {field}
    description = caught.value.violations[0].description
    assert text in description
    assert description.startswith("expected ") and ", got " in description
    assert len(description) < 250


GOOD: dict[str, Change] = {
    "50 white space": prompt(" \n\t"),
    "57 the mask's name": prompt("<|mask|>"),
    "60 nul": prompt("a\0b"),
    "61 odd characters": prompt("\ufeff\u202e\u200b\U0001f642"),
    "62 one character, many times": prompt("a" * 16 * MAX_MODEL_LEN),
    "ids up to the last": ids(VOCAB_SIZE - 1, 0),
    "the end of sequence inside": ids(1, EOS, 2),
    "greedy": sampling(temperature=0),
    "coolest": sampling(temperature=0.001),
    "warmest": sampling(temperature=100),
    "all tokens": sampling(top_p=1.0, top_k=0),
    "the whole vocabulary": sampling(top_k=VOCAB_SIZE),
    "any seed": sampling(seed=2**64 - 1),
    "81 sixteen stops": stopping(stop=["é" * 128, *(str(at) for at in range(15))]),
    "one token": stopping(max_tokens=1),
    "thresholds at their ends": decoding(
        confidence_threshold=0, block_add_threshold=1, full_activation_threshold=0
    ),
    "window of 64": decoding(window=64),
    "every block diffusion knob": decoding(
        algorithm=2, remasking=3, denoising_steps=BLOCK_SIZE, score=3, confidence_threshold=1
    ),
    "73 not a multiple of the block": stopping(max_tokens=BLOCK_SIZE + 1),
}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD.keys())
def test_good_input_passes(change: Change) -> None:
    request = good()
    change(request)
    check(request)


def test_every_field_that_is_wrong_is_named() -> None:
    request = good()
    for change in (prompt(""), sampling(top_p=2.0, temperature=-1), decoding(window=0, score=9)):
        change(request)
    with pytest.raises(InvalidRequest) as caught:
        check(request)
    assert {v.field for v in caught.value.violations} == {
        "prompt", "sampling.top_p", "sampling.temperature", "decoding.window", "decoding.score"
    }  # fmt: skip


def test_drafts_are_for_streams() -> None:
    request = good()
    request.output.drafts = True
    assert check(request).sent.output.drafts
    with pytest.raises(InvalidRequest, match="only GenerateStream"):
        check(request, is_stream=False)


def test_defaults_are_resolved() -> None:
    asked = check(good())
    settings = asked.settings
    assert (settings.algorithm, settings.window, settings.denoising_steps) == ("d2f", 4, BLOCK_SIZE)
    assert (settings.score, settings.remasking) == ("confidence", "low_confidence_dynamic")
    thresholds = (
        settings.confidence_threshold,
        settings.block_add_threshold,
        settings.full_activation_threshold,
    )
    assert thresholds == pytest.approx((0.9, 0.1, 0.95))
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0, 1, 0)
    assert asked.stop_token_ids == (EOS,)
    assert asked.most_tokens == asked.model.defaults.max_tokens


def sdar_like() -> ModelInfo:
    return msgspec.structs.replace(
        model_info(),
        defaults=DecodingDefaults(
            settings=DecodeSettings(
                algorithm="block_diffusion", denoising_steps=2, confidence_threshold=0.85
            ),
            sampling=Sampling(temperature=0.5, top_p=0.75, top_k=20),
            max_tokens=100,
        ),
    )


def test_a_models_own_defaults_are_taken_one_by_one() -> None:
    request = good()
    asked = validate(request, sdar_like(), is_stream=True)
    assert asked.settings == sdar_like().defaults.settings
    assert asked.sampling == sdar_like().defaults.sampling
    assert fit(10, asked) == 100
    sampling(temperature=0.0, seed=3)(request)
    decoding(denoising_steps=1, remasking=3)(request)
    stopping(max_tokens=120)(request)
    asked = validate(request, sdar_like(), is_stream=True)
    assert asked.sampling == Sampling(temperature=0.0, top_p=0.75, top_k=20, seed=3)
    assert (asked.settings.denoising_steps, asked.settings.remasking) == (1, "sequential")
    assert asked.settings.confidence_threshold == pytest.approx(0.85)
    assert fit(10, asked) == 120


def test_another_algorithm_takes_its_own_defaults() -> None:
    request = good()
    decoding(algorithm=1)(request)
    settings = validate(request, sdar_like(), is_stream=True).settings
    assert settings == DecodeSettings(algorithm="d2f", denoising_steps=BLOCK_SIZE)
    decoding(denoising_steps=2)(request)
    with pytest.raises(InvalidRequest, match=r"decoding\.denoising_steps"):
        validate(request, sdar_like(), is_stream=True)


def test_what_is_set_is_kept_zeros_too() -> None:
    request = good()
    decoding(algorithm=2, remasking=2, score=2, denoising_steps=1, confidence_threshold=0)(request)
    stopping(stop_token_ids=[7, 3, 7], ignore_eos=True, max_tokens=5, stop=["x"])(request)
    asked = check(request)
    assert asked.settings.algorithm == "block_diffusion"
    assert (asked.settings.remasking, asked.settings.score) == ("low_confidence_static", "margin")
    assert (asked.settings.denoising_steps, asked.settings.confidence_threshold) == (1, 0)
    assert (asked.stop_token_ids, asked.most_tokens) == ((3, 7), 5)
    assert asked.sent.stopping.stop == ["x"]


def of_length(max_tokens: int | None) -> Asked:
    request = good()
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return check(request)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"),
    [(10, None, MAX_MODEL_LEN - 10), (MAX_MODEL_LEN - 1, None, 1), (10, 20, 20), (255, 1, 1)],
)
def test_max_tokens_fits_the_context(prompt_len: int, max_tokens: int | None, fits: int) -> None:
    assert fit(prompt_len, of_length(max_tokens)) == fits


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "text"),
    [
        (MAX_MODEL_LEN, None, "at most 255 prompt tokens, so that one can be generated, got 256"),
        (250, 7, "at most 6: the prompt has 250 tokens and the model accepts 256 in all, got 7"),
        (0, None, "at least one token"),
    ],
)
def test_too_long_is_said_in_numbers(prompt_len: int, max_tokens: int | None, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        fit(prompt_len, of_length(max_tokens))


def test_the_least_length_fits_the_default_one_too() -> None:
    request = good()
    stopping(min_tokens=101)(request)
    asked = validate(request, sdar_like(), is_stream=True)
    with pytest.raises(InvalidRequest, match=r"stopping\.min_tokens: expected at most 100"):
        fit(10, asked)
    stopping(max_tokens=101)(request)
    assert fit(10, validate(request, sdar_like(), is_stream=True)) == 101


def test_what_changes_logits_is_kept() -> None:
    request = good()
    sampling(min_p=0.25, presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=10)(request)
    request.sampling.logit_bias.update({7: -100.0, 3: 2.5})
    stopping(min_tokens=5)(request)
    asked = check(request)
    assert asked.sampling == Sampling(
        min_p=0.25, presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=10,
        logit_bias=((3, 2.5), (7, -100.0)),
    )  # fmt: skip
    assert asked.sent.stopping.min_tokens == 5
    assert asked.sampling.edits_logits and not check(good()).sampling.edits_logits


@pytest.mark.parametrize("bad", ["", "a" * 129, "a b", "a\n", "ä", "a/b", "\x00", "a\x7f"])
def test_bad_request_ids(bad: str) -> None:
    findings = Findings()
    check_request_id(bad, findings)
    assert findings.violations[0].field == "request_id"
    assert findings.violations[0].description.isascii()


@pytest.mark.parametrize("bad", ["", "../etc", "a//b", "https://x/y", "n" * 10_000, "a b", "-x"])
def test_bad_model_names(bad: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_model_name(bad, "model")
    (violation,) = refused.value.violations
    assert violation.field == "model" and len(violation.description) < 200


@pytest.mark.parametrize("name", ["a", "Dream-org/Dream-v0", "sdar:1.7b", "a_b@c+d"])
def test_good_model_names(name: str) -> None:
    check_model_name(name, "model")
