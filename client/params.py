"""What a caller may set of a request, as one value, and the request that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar

from effuse.client.chat import Chat
from effuse.config.decoding import Alg, Algorithm, Cache, Remasking, Score
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

Value = TypeVar("Value")
Priority = Literal["low", "normal", "high"]
"""Who goes first in a router's queue."""
Prompt = str | Chat | Sequence[int]
"""Text, a conversation, or token ids that are used as they are."""

ALGORITHMS: Final[Mapping[Algorithm, pb.Algorithm]] = {
    "d2f": pb.ALGORITHM_D2F,
    "block_diffusion": pb.ALGORITHM_BLOCK_DIFFUSION,
    "llada": pb.ALGORITHM_LLADA,
    "dream": pb.ALGORITHM_DREAM,
    "fast_dllm": pb.ALGORITHM_FAST_DLLM,
    "fast_dllm_v2": pb.ALGORITHM_FAST_DLLM_V2,
}
PRIORITIES: Final[Mapping[Priority, pb.Priority]] = {
    "low": pb.PRIORITY_LOW,
    "normal": pb.PRIORITY_NORMAL,
    "high": pb.PRIORITY_HIGH,
}
REMASKINGS: Final[Mapping[Remasking, pb.Remasking]] = {
    "low_confidence_dynamic": pb.REMASKING_LOW_CONFIDENCE_DYNAMIC,
    "low_confidence_static": pb.REMASKING_LOW_CONFIDENCE_STATIC,
    "sequential": pb.REMASKING_SEQUENTIAL,
    "entropy_bounded": pb.REMASKING_ENTROPY_BOUNDED,
    "low_confidence": pb.REMASKING_LOW_CONFIDENCE,
    "random": pb.REMASKING_RANDOM,
}
ALGS: Final[Mapping[Alg, pb.Alg]] = {
    "origin": pb.ALG_ORIGIN,
    "maskgit_plus": pb.ALG_MASKGIT_PLUS,
    "topk_margin": pb.ALG_TOPK_MARGIN,
    "entropy": pb.ALG_ENTROPY,
}
CACHES: Final[Mapping[Cache, pb.Cache]] = {
    "none": pb.CACHE_NONE,
    "prefix": pb.CACHE_PREFIX,
    "dual": pb.CACHE_DUAL,
}
SCORES: Final[Mapping[Score, pb.Score]] = {
    "confidence": pb.SCORE_CONFIDENCE,
    "margin": pb.SCORE_MARGIN,
    "neg_entropy": pb.SCORE_NEG_ENTROPY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Settings of a request; None leaves the choice to the server, whose defaults
    `protos/effuse/v1/generation.proto` tells. Values are checked there, too."""

    model: str | None = None  # needed where the fleet serves several
    n: int | None = None  # answers to give; each draws for itself
    max_tokens: int | None = None
    stop: str | tuple[str, ...] = ()  # text that ends the answer and is no part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    min_tokens: int | None = None  # before which nothing but max_tokens ends the answer
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None  # share of the likeliest token's probability
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None  # 1 is none
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False
    )  # by token id, what is added
    seed: int | None = None  # same seed, same answer; drawn by the server where absent
    algorithm: Algorithm | None = None
    window: int | None = None  # blocks in flight (D2F)
    confidence_threshold: float | None = None
    block_add_threshold: float | None = None
    full_activation_threshold: float | None = None
    score: Score | None = None
    remasking: Remasking | None = None  # (block diffusion, LLaDA)
    denoising_steps: int | None = None  # of a block (block diffusion)
    entropy_bound: float | None = None  # in nats (block diffusion, entropy_bounded)
    editing_threshold: float | None = None  # replaces written tokens above this; 1 edits none
    max_post_steps: int | None = None  # forwards that edit a block without masks
    block_length: int | None = None  # tokens that are denoised together (LLaDA, Fast-dLLM, its v2)
    steps: int | None = None  # of the whole answer; 0 takes one a token (LLaDA, Dream)
    cfg_scale: float | None = None  # strength of classifier-free guidance (LLaDA)
    logits_eos_inf: bool | None = None  # never write an end of sequence (LLaDA)
    confidence_eos_eot_inf: bool | None = None  # write ends of sequence last (LLaDA)
    alg: Alg | None = None  # what is written at a step (Dream)
    eps: float | None = None  # where time ends that begins at 1 (Dream)
    alg_temp: float | None = None  # draws the best masks by lot; 0 draws none (Dream)
    factor: float | None = None  # writes by rank instead of the threshold (Fast-dLLM)
    cache: Cache | None = None  # what is not computed again within a block (Fast-dLLM)
    logprobs: int | None = None  # of each token, with so many of the likeliest ones
    echo: bool | None = None  # the prompt, too, as the model gets it
    priority: Priority | None = None  # in a router's queue
    parse_special_tokens: bool | None = None  # those that the prompt spells; else they stay text


def make_request(
    prompt: Prompt,
    params: Params,
    *,
    request_id: str | None = None,
    token_ids: bool = False,
    drafts: bool = False,
) -> pb.GenerateRequest:
    """The request for one prompt. Raises ValueError for settings that it cannot hold, for a prompt
    of bytes, and for a template argument that JSON cannot express."""
    if isinstance(prompt, bytes | bytearray):  # whose numbers would be taken for ids
        raise ValueError("prompt: expected a text, a Chat or token ids, got bytes")
    ids = None if isinstance(prompt, str | Chat) else pb.TokenIds(ids=prompt)
    try:
        request = _settings(params)
    except (TypeError, ValueError) as error:
        told = "; ".join(f"{name}: {why}" for name, why in misfits(params).items())
        raise ValueError(told) from error
    rest = pb.GenerateRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        chat=prompt.to_input() if isinstance(prompt, Chat) else None,
        output=pb.OutputOptions(token_ids=token_ids, drafts=drafts),
    )
    request.MergeFrom(rest)
    return request


def misfits(params: Params) -> dict[str, str]:
    """Settings that no request can hold, by their names, and why."""
    found: dict[str, str] = {}
    with suppress(TypeError, ValueError):
        _settings(params)
        return found  # all of them at once, which is a tenth of the work
    given = {one.name: getattr(params, one.name) for one in fields(params)}
    for name, value in given.items():
        if value is None:
            continue
        try:
            _settings(Params(**{name: value}))
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def _settings(params: Params) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        n=params.n,
        model=params.model,
        parse_special_tokens=params.parse_special_tokens,
        priority=_named(params.priority, PRIORITIES),
        sampling=_sampling(params),
        stopping=pb.StoppingParams(
            max_tokens=params.max_tokens,
            stop=(params.stop,) if isinstance(params.stop, str) else params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
        ),
        decoding=_decoding(params),
        output=pb.OutputOptions(logprobs=params.logprobs, echo=params.echo),
    )


def _decoding(params: Params) -> pb.DecodingParams:
    return pb.DecodingParams(
        algorithm=_named(params.algorithm, ALGORITHMS),
        window=params.window,
        confidence_threshold=params.confidence_threshold,
        block_add_threshold=params.block_add_threshold,
        full_activation_threshold=params.full_activation_threshold,
        score=_named(params.score, SCORES),
        remasking=_named(params.remasking, REMASKINGS),
        denoising_steps=params.denoising_steps,
        entropy_bound=params.entropy_bound,
        editing_threshold=params.editing_threshold,
        max_post_steps=params.max_post_steps,
        factor=params.factor,
        block_length=params.block_length,
        steps=params.steps,
        cfg_scale=params.cfg_scale,
        logits_eos_inf=params.logits_eos_inf,
        confidence_eos_eot_inf=params.confidence_eos_eot_inf,
        alg=_named(params.alg, ALGS),
        eps=params.eps,
        alg_temp=params.alg_temp,
        cache=_named(params.cache, CACHES),
    )


def make_tokenize_request(
    prompt: str | Chat, model: str | None, parse_special_tokens: bool
) -> model_pb2.TokenizeRequest:
    """The request for one prompt's ids."""
    return model_pb2.TokenizeRequest(
        model=model,
        prompt=prompt if isinstance(prompt, str) else None,
        chat=prompt.to_input() if isinstance(prompt, Chat) else None,
        parse_special_tokens=parse_special_tokens,
    )


def _sampling(params: Params) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
    )


def _named(name: str | None, known: Mapping[Any, Value]) -> Value | None:
    if name is None:
        return None
    if name not in known:
        raise ValueError(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]
