"""Settings of algorithms that denoise prompt and answer as one canvas: refusals, and resolved
values.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from bad_input.requests import Change, decoding, sampling
from router.fake_model import BLOCK_SIZE, model_info
from router.test_validation import good

from effuse.client.params import NAMES
from effuse.config.decoding import ALGORITHMS, Algorithm, DecodingDefaults, plain_settings
from effuse.protos.errors import InvalidRequest
from effuse.router.services import describe_defaults
from effuse.router.validation import validate
from effuse.v1 import generation_pb2 as pb

BIDIRECTIONAL = model_info()

BAD_CANVAS: dict[str, tuple[Change, str, str]] = {
    "block_length 0": (decoding(block_length=0), "decoding.block_length", "from 1 to"),
    "steps 2**31": (decoding(steps=2**31), "decoding.steps", "0 takes one for each token, got "
                    "2147483648"),
    "guidance nan": (decoding(cfg_scale=math.nan), "decoding.cfg_scale", "from 0 to 100, got nan"),
    "threshold": (
        decoding(confidence_threshold=0.5), "decoding.confidence_threshold", "no value with llada"
    ),
    "remasking": (
        decoding(remasking=1), "decoding.remasking",
        "one of low_confidence, random with llada, got low_confidence_dynamic"
    ),
    "top_p": (sampling(top_p=0.5), "sampling.top_p", "no value with llada"),
    "top_k": (sampling(top_k=5), "sampling.top_k", "no value with llada"),
    "min_p": (sampling(min_p=0.5), "sampling.min_p", "no value with llada"),
    "alg": (decoding(alg=4), "decoding.alg", "no value with llada"),
    "alg unknown": (decoding(algorithm=4, alg=9), "decoding.alg", "unknown value 9"),
    "eps": (decoding(algorithm=4, eps=2), "decoding.eps", "from 0 to 1, got 2"),
    "alg_temp": (decoding(algorithm=4, alg_temp=-1), "decoding.alg_temp", "or 0 for no randomness"),
    "cache unknown": (decoding(algorithm=5, cache=4), "decoding.cache", "unknown value 4"),
    "cache": (decoding(cache=3), "decoding.cache", "no value with llada"),
    "steps of fast_dllm": (
        decoding(algorithm=5, steps=4), "decoding.steps", "no value with fast_dllm"
    ),
    "factor": (
        decoding(algorithm=5, factor=-1), "decoding.factor", "uses the threshold, got -1"
    ),
    "two rules": (
        decoding(algorithm=5, factor=1, confidence_threshold=0.5),
        "decoding.confidence_threshold", "no value with a factor"
    ),
    "length": (decoding(algorithm=4, block_length=8), "decoding.block_length", "no value with"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "field", "text"), BAD_CANVAS.values(), ids=BAD_CANVAS)
def test_bad_settings_of_a_canvas_name_their_field(change: Change, field: str, text: str) -> None:
    request = good()
    request.decoding.algorithm = pb.ALGORITHM_LLADA
    change(request)
    with pytest.raises(InvalidRequest) as caught:
        validate(request, BIDIRECTIONAL, is_stream=True)
    (violation,) = caught.value.violations
    assert violation.field == field and text in violation.description


def test_a_block_causal_model_has_no_canvas() -> None:
    request = good()
    request.decoding.algorithm = pb.ALGORITHM_LLADA
    causal = msgspec.structs.replace(model_info(), prompt_attention="causal_blocks")
    with pytest.raises(InvalidRequest) as caught:
        validate(request, causal, is_stream=True)
    (violation,) = caught.value.violations
    assert violation.field == "decoding.algorithm"
    assert "d2f or block_diffusion for a model whose" in violation.description


def test_settings_of_a_canvas_are_resolved() -> None:
    request = good()
    request.decoding.algorithm = pb.ALGORITHM_LLADA
    settings = validate(request, BIDIRECTIONAL, is_stream=True).settings
    assert (settings.remasking, settings.block_length) == ("low_confidence", BLOCK_SIZE)
    assert (settings.steps, settings.cfg_scale, settings.is_canvas) == (0, 0.0, True)
    decoding(remasking=6, block_length=64, steps=7, cfg_scale=1.5, logits_eos_inf=True)(request)
    settings = validate(request, BIDIRECTIONAL, is_stream=True).settings
    assert (settings.remasking, settings.block_length, settings.steps) == ("random", 64, 7)
    assert (settings.cfg_scale, settings.logits_eos_inf) == (1.5, True)
    assert not settings.confidence_eos_eot_inf


def test_settings_of_dream_are_resolved() -> None:
    request = good()
    decoding(algorithm=4)(request)
    settings = validate(request, BIDIRECTIONAL, is_stream=True).settings
    assert (settings.algorithm, settings.alg, settings.alg_temp) == ("dream", "origin", 0.0)
    assert settings.eps == pytest.approx(1e-3)
    decoding(alg=4, eps=0.5, alg_temp=0.25, steps=9)(request)
    sampling(top_p=0.5, top_k=5)(request)
    asked = validate(request, BIDIRECTIONAL, is_stream=True)
    settings = asked.settings
    assert (settings.alg, settings.eps, settings.alg_temp, settings.steps) == (
        "entropy",
        0.5,
        0.25,
        9,
    )
    assert (asked.sampling.top_p, asked.sampling.top_k) == (0.5, 5)


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_fast_dllm_filters_where_the_models_own_loop_does(architecture: str) -> None:
    request = good()
    decoding(algorithm=5, cache=3, confidence_threshold=0.5, block_length=8)(request)
    model = msgspec.structs.replace(BIDIRECTIONAL, architecture=architecture)
    settings = validate(request, model, is_stream=True).settings
    assert (settings.algorithm, settings.cache) == ("fast_dllm", "dual")
    assert (settings.confidence_threshold, settings.block_length) == (0.5, 8)
    sampling(top_p=0.5)(request)
    if architecture == "dream":
        assert validate(request, model, is_stream=True).sampling.top_p == 0.5
        return
    with pytest.raises(InvalidRequest, match="top_p"):
        validate(request, model, is_stream=True)


def test_a_factor_is_not_for_models_that_shift() -> None:
    request = good()
    decoding(algorithm=5, factor=1)(request)
    dream = msgspec.structs.replace(BIDIRECTIONAL, architecture="dream")
    with pytest.raises(InvalidRequest, match="factor"):
        validate(request, dream, is_stream=True)
    assert validate(request, BIDIRECTIONAL, is_stream=True).settings.factor == 1


def test_a_canvas_needs_decode_workers_that_may_prefill() -> None:
    request = good()
    request.decoding.algorithm = pb.ALGORITHM_LLADA
    with pytest.raises(InvalidRequest, match=r"prefill in this fleet \(--prefill remote\)"):
        validate(request, BIDIRECTIONAL, is_stream=True, decode_prefills=False)


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_the_defaults_of_every_algorithm_are_told(algorithm: Algorithm) -> None:
    told = describe_defaults(DecodingDefaults(settings=plain_settings(algorithm, 32))).decoding
    assert told.algorithm == NAMES["algorithm"][algorithm]
    assert {field.name for field, _ in told.ListFields()} <= {
        "algorithm",
        *ALGORITHMS[algorithm].settings,
    }
    assert len(told.ListFields()) > 1
