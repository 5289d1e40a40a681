"""The settings of a request as flags. The server chooses the value of a flag that is not given."""

import argparse
from collections.abc import Callable
from typing import Any

from effuse.cli.arguments import text, whole
from effuse.client.params import (
    ALGORITHMS,
    ALGS,
    CACHES,
    PRIORITIES,
    REMASKINGS,
    SCORES,
    Params,
)
from effuse.config.decoding import (
    ALG_TEMP,
    ANSWERS,
    BIAS,
    BLOCK_LENGTH,
    CFG_SCALE,
    DENOISING_STEPS,
    ENTROPY,
    EPS,
    FACTOR,
    LOGPROBS,
    MAX_TOKENS,
    MIN_P,
    MIN_TOKENS,
    PENALTY,
    POST_STEPS,
    REPETITION,
    SEED,
    STEPS,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    WINDOW,
    Bounds,
)

_TOKEN_ID = whole(0, 2**32 - 1)  # the range of the wire


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
    add = _adder(parser)
    add(
        "--model",
        type=text,
        metavar="NAME",
        help="model to ask for, if the fleet serves several (default: the only one)",
    )
    add("--n", type=within(ANSWERS), metavar="N", help="answers to each prompt (default: 1)")
    add("--max-tokens", type=within(MAX_TOKENS), metavar="N", help="most tokens to generate")
    add("--stop", action="append", type=text, default=[], metavar="TEXT",
        help="text that ends the answer (default: none)")  # fmt: skip
    add("--stop-token-id", action="append", default=[], type=_TOKEN_ID, metavar="ID",
        help="id of a token that ends the answer (default: only the model's)")  # fmt: skip
    add("--min-tokens", type=within(MIN_TOKENS), metavar="N",
        help="tokens that the answer has at least (default: 0)")  # fmt: skip
    add("--ignore-eos", action="store_true", default=None,
        help="do not stop at an end-of-sequence token (default: off)")  # fmt: skip
    add("--logprobs", type=within(LOGPROBS), metavar="N",
        help="log-probability of each token and of the N likeliest (default: none)")  # fmt: skip
    add(
        "--echo",
        action="store_true",
        default=None,
        help="print the prompt before the answer (default: off)",
    )
    add("--priority", choices=PRIORITIES,
        help="which requests go first if some must wait (default: normal)")  # fmt: skip
    add("--parse-special-tokens", action="store_true", default=None,
        help="read special tokens in a prompt as tokens, not as text (default: off)")  # fmt: skip
    _add_sampling_knobs(parser)
    _add_block_knobs(parser)
    _add_canvas_knobs(parser)


def _add_sampling_knobs(parser: argparse.ArgumentParser) -> None:
    """Flags of sampling."""
    add = _adder(parser)
    add("--temperature", type=within(TEMPERATURE), metavar="T",
        help="randomness of sampling; 0 takes the likeliest token")  # fmt: skip
    add(
        "--top-p",
        type=within(TOP_P),
        metavar="P",
        help="keep the likeliest tokens up to this probability; 1 keeps all",
    )
    add("--top-k", type=within(TOP_K), metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    add("--min-p", type=within(MIN_P), metavar="P",
        help="keep tokens with this share of the highest probability; 0 keeps all")  # fmt: skip
    add(
        "--presence-penalty",
        type=within(PENALTY),
        metavar="X",
        help="subtract X from the logits of tokens that the text contains (default: 0)",
    )
    add(
        "--frequency-penalty",
        type=within(PENALTY),
        metavar="X",
        help="subtract X once for each time that a token occurs (default: 0)",
    )
    add("--repetition-penalty", type=within(REPETITION), metavar="X",
        help="divide the logits of tokens in prompt and answer by X; 1 is off")  # fmt: skip
    add("--logit-bias", action="append", default=[], type=_bias, metavar="ID=X",
        help="add X to the logit of this token (default: none)")  # fmt: skip
    add(
        "--seed", type=within(SEED), metavar="N", help="seed of the randomness (default: a new one)"
    )


def _add_block_knobs(parser: argparse.ArgumentParser) -> None:
    """How blocks are denoised."""
    add = _adder(parser)
    add("--algorithm", choices=ALGORITHMS, help="how blocks are denoised")
    add("--window", type=within(WINDOW), metavar="N",
        help="most blocks that are denoised together (D2F)")  # fmt: skip
    add("--confidence-threshold", type=within(THRESHOLD), metavar="P",
        help="write tokens whose confidence is higher than this")  # fmt: skip
    add(
        "--block-add-threshold",
        type=within(THRESHOLD),
        metavar="R",
        help="append a block once this share of the last one is written",
    )
    add(
        "--full-activation-threshold",
        type=within(THRESHOLD),
        metavar="R",
        help="let the next block advance in each step once this share is written",
    )
    add("--score", choices=SCORES, help="ranking of the masks if none passes the threshold")
    add("--remasking", choices=REMASKINGS, help="order in which masks are filled")
    add("--denoising-steps", type=within(DENOISING_STEPS), metavar="N",
        help="steps for each block (block diffusion)")  # fmt: skip
    add("--entropy-bound", type=within(ENTROPY), metavar="H",
        help="most entropy that a step writes, in nats (entropy_bounded)")  # fmt: skip
    add("--editing-threshold", type=within(THRESHOLD), metavar="P",
        help="replace written tokens by ones of a higher confidence (block diffusion)")  # fmt: skip
    add("--max-post-steps", type=within(POST_STEPS), metavar="N",
        help="forward passes that edit a full block (block diffusion)")  # fmt: skip


def _add_canvas_knobs(parser: argparse.ArgumentParser) -> None:
    """Flags of algorithms that denoise prompt and answer as one canvas."""
    add = _adder(parser)
    add("--block-length", type=within(BLOCK_LENGTH), metavar="N",
        help="tokens that are denoised together (LLaDA, Fast-dLLM, its v2)")  # fmt: skip
    add("--steps", type=within(STEPS), metavar="N",
        help="forward passes for the whole answer; 0 is one per token (LLaDA, Dream)")  # fmt: skip
    add(
        "--cfg-scale",
        type=within(CFG_SCALE),
        metavar="S",
        help="classifier-free guidance; 0 is off (LLaDA)",
    )
    add("--logits-eos-inf", action="store_true", default=None,
        help="never write an end-of-sequence token (LLaDA)")  # fmt: skip
    add("--confidence-eos-eot-inf", action="store_true", default=None,
        help="write end-of-sequence tokens last (LLaDA)")  # fmt: skip
    add("--alg", choices=ALGS, help="which masks a step fills (Dream)")
    add(
        "--eps",
        type=within(EPS),
        metavar="T",
        help="last value of the time, which begins at 1 (Dream)",
    )
    add("--alg-temp", type=within(ALG_TEMP), metavar="T",
        help="randomness in the choice of masks; 0 is none (Dream)")  # fmt: skip
    add("--factor", type=within(FACTOR), metavar="F",
        help="write by rank, not by the threshold; 0 is off (Fast-dLLM)")  # fmt: skip
    add("--cache", choices=CACHES, help="which keys and values a block reuses (Fast-dLLM)")


def _adder(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """`add_argument`, for flags whose help names the model's default unless it has another one."""

    def add(flag: str, *, help: str, **kinds: Any) -> argparse.Action:
        told = help if "(default: " in help else f"{help} (default: the model's)"
        return parser.add_argument(flag, help=told, **kinds)

    return add


def within(bounds: Bounds) -> Callable[[str], float]:
    """The type of a flag whose number lies within `bounds`."""
    kind: type[float] = int if bounds.is_whole else float

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {bounds.form}, got {text!r}") from None
        if value not in bounds:
            raise argparse.ArgumentTypeError(f"expected {bounds.form}, got {text}")
        return value

    return parse


def _bias(given: str) -> tuple[int, float]:
    token, equals, added = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected ID=X, got {given!r}")
    return int(_TOKEN_ID(token)), within(BIAS)(added)


def params_from(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Params:
    """The settings from the parsed flags; ends with status 2 if they contradict each other."""
    try:
        return _params_from(found)
    except ValueError as error:
        parser.error(str(error))


def _params_from(found: argparse.Namespace) -> Params:
    return Params(
        model=found.model,
        n=found.n,
        max_tokens=found.max_tokens,
        stop=tuple(found.stop),
        stop_token_ids=tuple(found.stop_token_id),
        ignore_eos=found.ignore_eos,
        min_tokens=found.min_tokens,
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        min_p=found.min_p,
        presence_penalty=found.presence_penalty,
        frequency_penalty=found.frequency_penalty,
        repetition_penalty=found.repetition_penalty,
        logit_bias=dict(found.logit_bias),
        seed=found.seed,
        algorithm=found.algorithm,
        window=found.window,
        confidence_threshold=found.confidence_threshold,
        block_add_threshold=found.block_add_threshold,
        full_activation_threshold=found.full_activation_threshold,
        score=found.score,
        remasking=found.remasking,
        denoising_steps=found.denoising_steps,
        entropy_bound=found.entropy_bound,
        editing_threshold=found.editing_threshold,
        max_post_steps=found.max_post_steps,
        factor=found.factor,
        block_length=found.block_length,
        steps=found.steps,
        cfg_scale=found.cfg_scale,
        logits_eos_inf=found.logits_eos_inf,
        confidence_eos_eot_inf=found.confidence_eos_eot_inf,
        alg=found.alg,
        eps=found.eps,
        alg_temp=found.alg_temp,
        cache=found.cache,
        logprobs=found.logprobs,
        echo=found.echo,
        priority=found.priority,
        parse_special_tokens=found.parse_special_tokens,
    )
