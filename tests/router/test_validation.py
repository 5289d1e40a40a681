"""The catalogue of bad input, as a table: which field is named, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from router.fake_model import BLOCK_SIZE, EOS, MASK, MAX_MODEL_LEN, PAD, VOCAB_SIZE, model_info

from effuse.config.decoding import DecodeSettings, DecodingDefaults, Sampling
from effuse.placement.records import ModelInfo
from effuse.protos.errors import InvalidRequest
from effuse.router.findings import Findings, check_model_name, check_request_id
from effuse.router.validation import Asked, fit, validate
from effuse.v1 import generation_pb2 as pb

Change = Callable[[pb.GenerateRequest], object]


def good() -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="how many?")


def check(request: pb.GenerateRequest, *, is_stream: bool = True) -> Asked:
    return validate(request, model_info(), {PAD, MASK}, is_stream=is_stream)


def sampling(**fields: float) -> Change:
    return lambda r: r.sampling.MergeFrom(pb.SamplingParams(**fields))  # type: ignore[arg-type]


def bias(**added: float) -> Change:
    by_id = {int(name.removeprefix("id_")): value for name, value in added.items()}
    return lambda r: r.sampling.logit_bias.update(by_id)


def stopping(**fields: object) -> Change:
    return lambda r: r.stopping.MergeFrom(pb.StoppingParams(**fields))  # type: ignore[arg-type]


def decoding(**fields: object) -> Change:
    return lambda r: r.decoding.MergeFrom(pb.DecodingParams(**fields))  # type: ignore[arg-type]


def prompt(text: str) -> Change:
    return lambda r: setattr(r, "prompt", text)


def ids(*token_ids: int) -> Change:
    return lambda r: r.prompt_token_ids.CopyFrom(pb.TokenIds(ids=token_ids))


BAD: dict[str, tuple[Change, str, str]] = {
    "6 nothing set": (lambda r: r.Clear(), "prompt", "none of them"),
    "49 empty prompt": (prompt(""), "prompt", "at least one character"),
    "49 no ids": (ids(), "prompt_token_ids.ids", "at least one id"),
    "51 too many bytes": (prompt("é" * 9 * MAX_MODEL_LEN), "prompt", f"{18 * MAX_MODEL_LEN} bytes"),
    "52 too many ids": (
        ids(*[1] * MAX_MODEL_LEN), "prompt_token_ids.ids", f"at most {MAX_MODEL_LEN - 1} ids"
    ),
    "55 id beyond the vocabulary": (
        ids(1, VOCAB_SIZE), "prompt_token_ids.ids[1]", f"{VOCAB_SIZE}, got {VOCAB_SIZE}"
    ),
    "55 id of 32 bits": (ids(2**32 - 1), "prompt_token_ids.ids[0]", "got 4294967295"),
    "56 the mask id": (ids(1, 2, MASK), "prompt_token_ids.ids[2]", f"the mask id {MASK}"),
    "59 padding": (ids(PAD), "prompt_token_ids.ids[0]", f"reserved id {PAD}"),
    "66 temperature nan": (sampling(temperature=math.nan), "sampling.temperature", "got nan"),
    "67 temperature inf": (sampling(temperature=math.inf), "sampling.temperature", "got inf"),
    "67 temperature -inf": (sampling(temperature=-math.inf), "sampling.temperature", "got -inf"),
    "67 temperature negative": (sampling(temperature=-0.1), "sampling.temperature", "got -0.1"),
    "67 temperature huge": (sampling(temperature=1e30), "sampling.temperature", "to 100"),
    "67 temperature denormal": (sampling(temperature=1e-40), "sampling.temperature", "or 0 for"),
    "68 top_p nan": (sampling(top_p=math.nan), "sampling.top_p", "above 0, at most 1, got nan"),
    "68 top_p 0": (sampling(top_p=0.0), "sampling.top_p", "got 0"),
    "68 top_p negative": (sampling(top_p=-1.0), "sampling.top_p", "got -1"),
    "68 top_p above 1": (sampling(top_p=1.01), "sampling.top_p", "got 1.01"),
    "69 top_k above the vocabulary": (
        sampling(top_k=VOCAB_SIZE + 1), "sampling.top_k", f"from 0 to {VOCAB_SIZE}"
    ),
    "min_p above 1": (sampling(min_p=1.5), "sampling.min_p", "from 0 to 1, got 1.5"),
    "min_p nan": (sampling(min_p=math.nan), "sampling.min_p", "got nan"),
    "presence": (sampling(presence_penalty=2.5), "sampling.presence_penalty", "from -2 to 2"),
    "frequency": (sampling(frequency_penalty=-math.inf), "sampling.frequency_penalty", "got -inf"),
    "repetition 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "from 0.1"),
    "bias nan": (bias(id_5=math.nan), "sampling.logit_bias[5]", "from -1e+02 to 100, got nan"),
    "bias beyond the vocabulary": (
        bias(**{f"id_{VOCAB_SIZE}": 1}), "sampling.logit_bias", f"vocabulary size {VOCAB_SIZE}"
    ),
    "bias of the mask": (bias(**{f"id_{MASK}": 1}), "sampling.logit_bias", f"the mask id {MASK}"),
    "bias of padding": (bias(**{f"id_{PAD}": 1}), "sampling.logit_bias", f"reserved id {PAD}"),
    "too many biases": (
        bias(**{f"id_{at}": 1 for at in range(513)}), "sampling.logit_bias", "at most 512 ids"
    ),
    "min_tokens above max_tokens": (
        stopping(max_tokens=4, min_tokens=5), "stopping.min_tokens", "from 0 to 4, got 5"
    ),
    "min_tokens above the context": (
        stopping(min_tokens=MAX_MODEL_LEN), "stopping.min_tokens", f"to {MAX_MODEL_LEN - 1}"
    ),
    "71 max_tokens 0": (stopping(max_tokens=0), "stopping.max_tokens", "from 1 to"),
    "72 max_tokens 2**31": (stopping(max_tokens=2**31), "stopping.max_tokens", "got 2147483648"),
    "72 max_tokens 2**32-1": (stopping(max_tokens=2**32 - 1), "stopping.max_tokens", "4294967295"),
    "74 steps 0": (
        decoding(algorithm=2, denoising_steps=0), "decoding.denoising_steps", "from 1 to"
    ),
    "74 steps above the block size": (
        decoding(algorithm=2, denoising_steps=BLOCK_SIZE + 1),
        "decoding.denoising_steps",
        f"1 to {BLOCK_SIZE}, the model's block size, got {BLOCK_SIZE + 1}",
    ),
    "74 window 0": (decoding(window=0), "decoding.window", "from 1 to 64"),
    "74 window 65": (decoding(window=65), "decoding.window", "from 1 to 64"),
    "76 confidence nan": (
        decoding(confidence_threshold=math.nan), "decoding.confidence_threshold", "got nan"
    ),
    "76 confidence negative": (
        decoding(confidence_threshold=-0.5), "decoding.confidence_threshold", "from 0 to 1"
    ),
    "76 confidence above 1": (
        decoding(confidence_threshold=1.5), "decoding.confidence_threshold", "got 1.5"
    ),
    "76 block add inf": (
        decoding(block_add_threshold=math.inf), "decoding.block_add_threshold", "got inf"
    ),
    "76 activation above 1": (
        decoding(full_activation_threshold=2), "decoding.full_activation_threshold", "got 2"
    ),
    "77 remasking unknown": (
        decoding(algorithm=2, remasking=9), "decoding.remasking", "unknown value 9"
    ),
    "80 too many stops": (
        stopping(stop=[str(at) for at in range(17)]), "stopping.stop", "at most 16 strings, got 17"
    ),
    "80 stop of 1 MB": (stopping(stop=["a" * 2**20]), "stopping.stop[0]", "got 1048576 bytes"),
    "80 stop of 257 bytes": (stopping(stop=["a", "é" * 129]), "stopping.stop[1]", "258 bytes"),
    "80 empty stop": (stopping(stop=["a", ""]), "stopping.stop[1]", "1 to 256 bytes, got 0"),
    "80 same stop twice": (stopping(stop=["a", "a"]), "stopping.stop", "twice"),
    "82 stop id beyond the vocabulary": (
        stopping(stop_token_ids=[VOCAB_SIZE]), "stopping.stop_token_ids[0]", "below the vocabulary"
    ),
    "82 stop id is the mask": (
        stopping(stop_token_ids=[MASK]), "stopping.stop_token_ids[0]", "mask id"
    ),
    "82 too many stop ids": (
        stopping(stop_token_ids=range(65)), "stopping.stop_token_ids", "at most 64 ids, got 65"
    ),
    "85 algorithm unknown": (decoding(algorithm=7), "decoding.algorithm", "ALGORITHM_D2F"),
    "85 algorithm negative": (decoding(algorithm=-1), "decoding.algorithm", "unknown value -1"),
    "85 score unknown": (decoding(score=4), "decoding.score", "SCORE_MARGIN"),
    "logprobs": (lambda r: setattr(r.output, "logprobs", 21), "output.logprobs", "0 to 20, got 21"),
    "priority unknown": (lambda r: setattr(r, "priority", 4), "priority", "unknown value 4"),
    "87 steps with d2f": (
        decoding(denoising_steps=2), "decoding.denoising_steps", "unset with d2f"
    ),
    "87 remasking with d2f": (decoding(algorithm=1, remasking=1), "decoding.remasking", "unset"),
    "87 window with block diffusion": (
        decoding(algorithm=2, window=2), "decoding.window", "unset with block_diffusion"
    ),
    "87 length with d2f": (decoding(block_length=8), "decoding.block_length", "unset with d2f"),
    "87 an order of another algorithm": (
        decoding(algorithm=2, remasking=6), "decoding.remasking",
        "sequential, entropy_bounded with block_diffusion, got random"
    ),
    "88 editing above 1": (
        decoding(algorithm=2, editing_threshold=1.5), "decoding.editing_threshold",
        "a number from 0 to 1, got 1.5"
    ),
    "88 steps of editing without end": (
        decoding(algorithm=2, max_post_steps=1025), "decoding.max_post_steps", "0 to 1024, got 1025"
    ),
    "88 editing with d2f": (
        decoding(editing_threshold=0.5), "decoding.editing_threshold", "unset with d2f"
    ),
    "89 an algorithm of other models": (
        decoding(algorithm=6), "decoding.algorithm",
        "d2f or block_diffusion for a model that was not tuned for it, got fast_dllm_v2"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "field", "text"), BAD.values(), ids=BAD.keys())
def test_bad_input_names_its_field(change: Change, field: str, text: str) -> None:
    request = good()
    change(request)
    with pytest.raises(InvalidRequest) as caught:
        check(request)
    assert [v.field for v in caught.value.violations] == [field]
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
    assert check(request).wants_drafts
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
    assert asked.max_tokens is None


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
    assert (asked.stop_token_ids, asked.max_tokens, asked.stops) == ((3, 7), 5, ("x",))


def of_length(max_tokens: int | None) -> Asked:
    return replace(check(good()), max_tokens=max_tokens)


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
        (250, 7, "at most 6: the prompt has 250 tokens and the model takes 256 in all, got 7"),
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
    assert asked.min_tokens == 5
    assert asked.sampling.edits_logits and not check(good()).sampling.edits_logits


@pytest.mark.parametrize("bad", ["", "a" * 129, "a b", "a\n", "ä", "a/b", "\x00", "a\x7f"])
def test_bad_request_ids(bad: str) -> None:
    findings = Findings()
    check_request_id(bad, findings)
    assert findings.violations[0].field == "request_id"
    assert findings.violations[0].description.isascii()


@pytest.mark.parametrize("bad", ["", "../etc", "a//b", "https://x/y", "n" * 10_000, "a b", "-x"])
def test_bad_model_names(bad: str) -> None:
    findings = Findings()
    check_model_name(bad, "model", findings)
    assert findings.violations[0].field == "model"
    assert len(findings.violations[0].description) < 200


@pytest.mark.parametrize("name", ["a", "Dream-org/Dream-v0", "sdar:1.7b", "a_b@c+d"])
def test_good_model_names(name: str) -> None:
    findings = Findings()
    check_model_name(name, "model", findings)
    assert not findings.violations
