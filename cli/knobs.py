"""The settings of a request as flags. One that is not given leaves the choice to the server."""

import argparse

from effuse.cli.arguments import number, text, whole
from effuse.client.params import ALGORITHMS, REMASKINGS, SCORES, Params

_UINT32 = 2**32 - 1  # what the wire holds


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
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
    add("--algorithm", choices=ALGORITHMS, help="how blocks are denoised")
    add("--window", type=whole(1, 64), metavar="N", help="most blocks in flight with masks (D2F)")
    add("--confidence-threshold", type=number(0, 1), metavar="P", help="write above this")
    add("--block-add-threshold", type=number(0, 1), metavar="R", help="append a block from here")
    add("--full-activation-threshold", type=number(0, 1), metavar="R", help="force progress here")
    add("--score", choices=SCORES, help="what ranks masks that pass no threshold")
    add("--remasking", choices=REMASKINGS, help="order of filling (block diffusion)")
    add("--denoising-steps", type=whole(1, _UINT32), metavar="N", help="steps a block takes")


def params_from(found: argparse.Namespace) -> Params:
    """The settings among parsed flags."""
    return Params(
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
