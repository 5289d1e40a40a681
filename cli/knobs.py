"""The knobs of a request as flags, and the request they make.

A knob that is not given stays unset, so that the model's own default holds. Nothing is sent here.
"""

import argparse
from dataclasses import dataclass

from effuse.cli.arguments import number, text, whole
from effuse.v1 import generation_pb2

_UINT32 = 2**32 - 1  # what the wire holds
_ALGORITHMS = {
    "d2f": generation_pb2.ALGORITHM_D2F,
    "block_diffusion": generation_pb2.ALGORITHM_BLOCK_DIFFUSION,
}
_REMASKINGS = {
    "low_confidence_dynamic": generation_pb2.REMASKING_LOW_CONFIDENCE_DYNAMIC,
    "low_confidence_static": generation_pb2.REMASKING_LOW_CONFIDENCE_STATIC,
    "sequential": generation_pb2.REMASKING_SEQUENTIAL,
}
_SCORES = {
    "confidence": generation_pb2.SCORE_CONFIDENCE,
    "margin": generation_pb2.SCORE_MARGIN,
    "neg_entropy": generation_pb2.SCORE_NEG_ENTROPY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings of a request; None leaves the choice to the server."""

    model: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    algorithm: str | None = None
    window: int | None = None
    confidence_threshold: float | None = None
    block_add_threshold: float | None = None
    full_activation_threshold: float | None = None
    score: str | None = None
    remasking: str | None = None
    denoising_steps: int | None = None


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every knob."""
    add = parser.add_argument
    add(
        "--model",
        type=text,
        metavar="NAME",
        help="model to ask for, where the fleet serves several",
    )
    add("--max-tokens", type=whole(1, _UINT32), metavar="N", help="most tokens to generate")
    add("--stop", action="append", type=text, default=[], metavar="TEXT",
        help="text that ends the answer")  # fmt: skip
    add("--stop-token-id", action="append", default=[], type=whole(0, _UINT32), metavar="ID",
        help="token that ends the answer")  # fmt: skip
    add("--ignore-eos", action="store_true", default=None, help="go on past the end of sequence")
    add("--temperature", type=number(0), metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=number(0, 1, open_left=True), metavar="P", help="nucleus (default: 1)")
    add("--top-k", type=whole(0, _UINT32), metavar="K", help="likeliest tokens kept; 0 keeps all")
    add("--seed", type=whole(0, 2**64 - 1), metavar="N", help="same seed, same answer")
    add("--algorithm", choices=_ALGORITHMS, help="how blocks are denoised")
    add("--window", type=whole(1, 64), metavar="N", help="most blocks in flight with masks (D2F)")
    add("--confidence-threshold", type=number(0, 1), metavar="P", help="write above this")
    add("--block-add-threshold", type=number(0, 1), metavar="R", help="append a block from here")
    add("--full-activation-threshold", type=number(0, 1), metavar="R", help="force progress here")
    add("--score", choices=_SCORES, help="what ranks masks that pass no threshold")
    add("--remasking", choices=_REMASKINGS, help="order of filling (block diffusion)")
    add("--denoising-steps", type=whole(1, _UINT32), metavar="N", help="steps a block takes")


def knobs_from(found: argparse.Namespace) -> Knobs:
    """The knobs among parsed flags."""
    return Knobs(
        model=found.model,
        max_tokens=found.max_tokens,
        stop=tuple(found.stop),
        stop_token_ids=tuple(found.stop_token_id),
        ignore_eos=found.ignore_eos,
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        seed=found.seed,
        algorithm=found.algorithm,
        window=found.window,
        confidence_threshold=found.confidence_threshold,
        block_add_threshold=found.block_add_threshold,
        full_activation_threshold=found.full_activation_threshold,
        score=found.score,
        remasking=found.remasking,
        denoising_steps=found.denoising_steps,
    )


def make_request(
    prompt: str, knobs: Knobs, *, request_id: str | None = None, drafts: bool = False
) -> generation_pb2.GenerateRequest:
    """The request for one prompt."""
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        model=knobs.model,
        prompt=prompt,
        sampling=generation_pb2.SamplingParams(
            temperature=knobs.temperature, top_p=knobs.top_p, top_k=knobs.top_k, seed=knobs.seed
        ),
        stopping=generation_pb2.StoppingParams(
            max_tokens=knobs.max_tokens,
            stop=knobs.stop,
            stop_token_ids=knobs.stop_token_ids,
            ignore_eos=knobs.ignore_eos,
        ),
        decoding=generation_pb2.DecodingParams(
            algorithm=_ALGORITHMS[knobs.algorithm] if knobs.algorithm else None,
            window=knobs.window,
            confidence_threshold=knobs.confidence_threshold,
            block_add_threshold=knobs.block_add_threshold,
            full_activation_threshold=knobs.full_activation_threshold,
            score=_SCORES[knobs.score] if knobs.score else None,
            remasking=_REMASKINGS[knobs.remasking] if knobs.remasking else None,
            denoising_steps=knobs.denoising_steps,
        ),
        output=generation_pb2.OutputOptions(drafts=drafts),
    )
