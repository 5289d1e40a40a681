"""Bad settings and inputs of a GenerateRequest, with the named field and a part of the text.

The router's checks by themselves and a whole fleet go through the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from effuse.v1 import generation_pb2 as pb

Change: TypeAlias = Callable[[pb.GenerateRequest], object]
Wrong: TypeAlias = tuple[Change, str, str]  # the change, the field, a part of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The model for the table; its default algorithm is D2F."""

    vocab_size: int
    block_size: int
    max_model_len: int
    mask: int
    pad: int  # a reserved id


def sampling(**fields: float) -> Change:
    return lambda r: r.sampling.MergeFrom(pb.SamplingParams(**fields))  # type: ignore[arg-type]


def bias(**added: float) -> Change:
    by_id = {int(name.removeprefix("id_")): value for name, value in added.items()}
    return lambda r: r.sampling.logit_bias.update(by_id)


def stopping(**fields: object) -> Change:
    return lambda r: r.stopping.MergeFrom(pb.StoppingParams(**fields))  # type: ignore[arg-type]


def decoding(**fields: object) -> Change:
    return lambda r: r.decoding.MergeFrom(pb.DecodingParams(**fields))  # type: ignore[arg-type]


def objectives(**fields: float) -> Change:
    return lambda r: r.objectives.MergeFrom(pb.Objectives(**fields))


def prompt(text: str) -> Change:
    return lambda r: setattr(r, "prompt", text)


def ids(*token_ids: int) -> Change:
    return lambda r: r.prompt_token_ids.CopyFrom(pb.TokenIds(ids=token_ids))


def wrong_requests(at: Facts) -> dict[str, Wrong]:
    """By the mistake; one field each."""
    return {
        "nothing set": (lambda r: r.Clear(), "prompt", "none of them"),
        "empty prompt": (prompt(""), "prompt", "at least one character"),
        "no ids": (ids(), "prompt_token_ids.ids", "at least one id"),
        "too many bytes": (
            prompt("é" * 9 * at.max_model_len),
            "prompt",
            f"{18 * at.max_model_len} bytes",
        ),
        "too many ids": (
            ids(*[1] * at.max_model_len),
            "prompt_token_ids.ids",
            f"at most {at.max_model_len - 1} ids",
        ),
        "id beyond the vocabulary": (
            ids(1, at.vocab_size),
            "prompt_token_ids.ids[1]",
            f"{at.vocab_size}, got {at.vocab_size}",
        ),
        "id of 32 bits": (ids(2**32 - 1), "prompt_token_ids.ids[0]", "got 4294967295"),
        "the mask id": (ids(1, 2, at.mask), "prompt_token_ids.ids[2]", f"the mask id {at.mask}"),
        "padding": (ids(at.pad), "prompt_token_ids.ids[0]", f"reserved id {at.pad}"),
        "temperature nan": (sampling(temperature=math.nan), "sampling.temperature", "got nan"),
        "temperature inf": (sampling(temperature=math.inf), "sampling.temperature", "got inf"),
        "temperature -inf": (sampling(temperature=-math.inf), "sampling.temperature", "got -inf"),
        "temperature negative": (sampling(temperature=-0.1), "sampling.temperature", "got -0.1"),
        "temperature huge": (sampling(temperature=1e30), "sampling.temperature", "to 100"),
        "temperature denormal": (sampling(temperature=1e-40), "sampling.temperature", "or 0 for"),
        "top_p nan": (sampling(top_p=math.nan), "sampling.top_p", "above 0, at most 1, got nan"),
        "top_p 0": (sampling(top_p=0.0), "sampling.top_p", "got 0"),
        "top_p negative": (sampling(top_p=-1.0), "sampling.top_p", "got -1"),
        "top_p above 1": (sampling(top_p=1.01), "sampling.top_p", "got 1.01"),
        "top_k above the vocabulary": (
            sampling(top_k=at.vocab_size + 1),
            "sampling.top_k",
            f"from 0 to {at.vocab_size}",
        ),
        "min_p above 1": (sampling(min_p=1.5), "sampling.min_p", "from 0 to 1, got 1.5"),
        "min_p nan": (sampling(min_p=math.nan), "sampling.min_p", "got nan"),
        "presence": (sampling(presence_penalty=2.5), "sampling.presence_penalty", "from -2 to 2"),
        "frequency": (
            sampling(frequency_penalty=-math.inf),
            "sampling.frequency_penalty",
            "got -inf",
        ),
        "repetition 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "from 0.1"),
        "bias nan": (bias(id_5=math.nan), "sampling.logit_bias[5]", "from -100 to 100, got nan"),
        "bias beyond the vocabulary": (
            bias(**{f"id_{at.vocab_size}": 1}),
            "sampling.logit_bias",
            f"vocabulary size {at.vocab_size}",
        ),
        "bias of the mask": (
            bias(**{f"id_{at.mask}": 1}),
            "sampling.logit_bias",
            f"the mask id {at.mask}",
        ),
        "bias of padding": (
            bias(**{f"id_{at.pad}": 1}),
            "sampling.logit_bias",
            f"reserved id {at.pad}",
        ),
        "too many biases": (
            bias(**{f"id_{i}": 1 for i in range(513)}),
            "sampling.logit_bias",
            "at most 512 ids",
        ),
        "min_tokens above max_tokens": (
            stopping(max_tokens=4, min_tokens=5),
            "stopping.min_tokens",
            "from 0 to 4, got 5",
        ),
        "min_tokens above the context": (
            stopping(min_tokens=at.max_model_len),
            "stopping.min_tokens",
            f"to {at.max_model_len - 1}",
        ),
        "max_tokens 0": (stopping(max_tokens=0), "stopping.max_tokens", "from 1 to"),
        "max_tokens 2**31": (stopping(max_tokens=2**31), "stopping.max_tokens", "got 2147483648"),
        "max_tokens 2**32-1": (stopping(max_tokens=2**32 - 1), "stopping.max_tokens", "4294967295"),
        "steps 0": (
            decoding(algorithm=2, denoising_steps=0),
            "decoding.denoising_steps",
            "from 1 to",
        ),
        "steps above the block size": (
            decoding(algorithm=2, denoising_steps=at.block_size + 1),
            "decoding.denoising_steps",
            f"1 to {at.block_size}, the model's block size, got {at.block_size + 1}",
        ),
        "window 0": (decoding(window=0), "decoding.window", "from 1 to 64"),
        "window 65": (decoding(window=65), "decoding.window", "from 1 to 64"),
        "confidence nan": (
            decoding(confidence_threshold=math.nan),
            "decoding.confidence_threshold",
            "got nan",
        ),
        "confidence negative": (
            decoding(confidence_threshold=-0.5),
            "decoding.confidence_threshold",
            "from 0 to 1",
        ),
        "confidence above 1": (
            decoding(confidence_threshold=1.5),
            "decoding.confidence_threshold",
            "got 1.5",
        ),
        "block add inf": (
            decoding(block_add_threshold=math.inf),
            "decoding.block_add_threshold",
            "got inf",
        ),
        "activation above 1": (
            decoding(full_activation_threshold=2),
            "decoding.full_activation_threshold",
            "got 2",
        ),
        "remasking unknown": (
            decoding(algorithm=2, remasking=9),
            "decoding.remasking",
            "unknown value 9",
        ),
        "too many stops": (
            stopping(stop=[str(i) for i in range(17)]),
            "stopping.stop",
            "at most 16 strings, got 17",
        ),
        "stop of 1 MB": (stopping(stop=["a" * 2**20]), "stopping.stop[0]", "got 1048576 bytes"),
        "stop of 257 bytes": (stopping(stop=["a", "é" * 129]), "stopping.stop[1]", "258 bytes"),
        "empty stop": (stopping(stop=["a", ""]), "stopping.stop[1]", "1 to 256 bytes, got 0"),
        "same stop twice": (stopping(stop=["a", "a"]), "stopping.stop", "repeated"),
        "stop id beyond the vocabulary": (
            stopping(stop_token_ids=[at.vocab_size]),
            "stopping.stop_token_ids[0]",
            "below the vocabulary",
        ),
        "stop id is the mask": (
            stopping(stop_token_ids=[at.mask]),
            "stopping.stop_token_ids[0]",
            "mask id",
        ),
        "too many stop ids": (
            stopping(stop_token_ids=range(65)),
            "stopping.stop_token_ids",
            "at most 64 ids, got 65",
        ),
        "algorithm unknown": (decoding(algorithm=7), "decoding.algorithm", "ALGORITHM_D2F"),
        "algorithm negative": (decoding(algorithm=-1), "decoding.algorithm", "unknown value -1"),
        "score unknown": (decoding(score=4), "decoding.score", "SCORE_MARGIN"),
        "logprobs": (
            lambda r: setattr(r.output, "logprobs", 21),
            "output.logprobs",
            "0 to 20, got 21",
        ),
        "n 0": (lambda r: setattr(r, "n", 0), "n", "got 0"),
        "n 65": (lambda r: setattr(r, "n", 65), "n", "got 65"),
        "priority unknown": (lambda r: setattr(r, "priority", 4), "priority", "unknown value 4"),
        "a gap of 0": (
            objectives(gap_within=0.0),
            "objectives.gap_within",
            "above 0, at most 3600",
        ),
        "no time for a block": (
            objectives(first_block_within=-1.0),
            "objectives.first_block_within",
            "above 0, at most 3600, got -1",
        ),
        "an endless gap": (objectives(gap_within=math.inf), "objectives.gap_within", "got inf"),
        "a gap that is no number": (
            objectives(gap_within=math.nan),
            "objectives.gap_within",
            "nan",
        ),
        "class": (lambda r: setattr(r, "request_class", "none"), "request_class", "no classes"),
        "steps with d2f": (
            decoding(denoising_steps=2),
            "decoding.denoising_steps",
            "no value with d2f",
        ),
        "remasking with d2f": (
            decoding(algorithm=1, remasking=1),
            "decoding.remasking",
            "no value",
        ),
        "window with block diffusion": (
            decoding(algorithm=2, window=2),
            "decoding.window",
            "no value with block_diffusion",
        ),
        "length with d2f": (decoding(block_length=8), "decoding.block_length", "no value with d2f"),
        "an order of another algorithm": (
            decoding(algorithm=2, remasking=6),
            "decoding.remasking",
            "sequential, entropy_bounded with block_diffusion, got random",
        ),
        "editing above 1": (
            decoding(algorithm=2, editing_threshold=1.5),
            "decoding.editing_threshold",
            "a number from 0 to 1, got 1.5",
        ),
        "steps of editing without end": (
            decoding(algorithm=2, max_post_steps=1025),
            "decoding.max_post_steps",
            "0 to 1024, got 1025",
        ),
        "editing with d2f": (
            decoding(editing_threshold=0.5),
            "decoding.editing_threshold",
            "no value with d2f",
        ),
        "an algorithm of other models": (
            decoding(algorithm=6),
            "decoding.algorithm",
            "d2f or block_diffusion for a model that was not tuned for it, got fast_dllm_v2",
        ),
        "cfg_scale below 0": (
            decoding(cfg_scale=-1),
            "decoding.cfg_scale",
            "a number from 0 to 100, got -1",
        ),
        "eps nan": (decoding(eps=math.nan), "decoding.eps", "got nan"),
        "alg_temp inf": (decoding(alg_temp=math.inf), "decoding.alg_temp", "got inf"),
        "entropy huge": (
            decoding(algorithm=2, entropy_bound=1e9),
            "decoding.entropy_bound",
            "to 1000, got 1e+09",
        ),
        "factor negative": (decoding(factor=-1), "decoding.factor", "got -1"),
        "steps without end": (decoding(steps=2**32 - 1), "decoding.steps", "got 4294967295"),
        "block_length 0": (decoding(block_length=0), "decoding.block_length", "got 0"),
        "alg unknown": (decoding(alg=99), "decoding.alg", "the unknown value 99"),
        "cache unknown": (decoding(cache=-5), "decoding.cache", "the unknown value -5"),
        "canvas knob with d2f": (
            decoding(logits_eos_inf=False),
            "decoding.logits_eos_inf",
            "no value with d2f",
        ),
        "ids parsed": (
            lambda r: r.MergeFrom(
                pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1]), parse_special_tokens=True)
            ),
            "parse_special_tokens",
            "which are not parsed, got true",
        ),
    }
