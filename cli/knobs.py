"""The settings of a request as flags. The server chooses the value of a flag that is not given."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from effuse.cli.arguments import text, whole
from effuse.client.params import NAMES, NUMBERS, Params
from effuse.config.decoding import BIAS, Bounds
from effuse.config.flags import flag_of

_TOKEN_ID = whole(0, 2**32 - 1)  # the range of the wire
_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "model": ("NAME", "model to ask for, if the fleet serves several (default: the only one)"),
    "n": ("N", "answers to each prompt (default: 1)"),
    "max_tokens": ("N", "most tokens to generate"),
    "stop": ("TEXT", "text that ends the answer (default: none)"),
    "stop_token_ids": ("ID", "id of a token that ends the answer (default: only the model's)"),
    "min_tokens": ("N", "tokens that the answer has at least (default: 0)"),
    "ignore_eos": ("", "do not stop at an end-of-sequence token (default: off)"),
    "logprobs": ("N", "log-probability of each token and of the N likeliest (default: none)"),
    "echo": ("", "print the prompt before the answer (default: off)"),
    "priority": ("", "which requests go first if some must wait (default: normal)"),
    "parse_special_tokens": (
        "", "read special tokens in a prompt as tokens, not as text (default: off)"
    ),
    "temperature": ("T", "randomness of sampling; 0 takes the likeliest token"),
    "top_p": ("P", "keep the likeliest tokens up to this probability; 1 keeps all"),
    "top_k": ("K", "keep the K likeliest tokens; 0 keeps all"),
    "min_p": ("P", "keep tokens with this share of the highest probability; 0 keeps all"),
    "presence_penalty": (
        "X", "subtract X from the logits of tokens that the text contains (default: 0)"
    ),
    "frequency_penalty": ("X", "subtract X once for each time that a token occurs (default: 0)"),
    "repetition_penalty": ("X", "divide the logits of tokens in prompt and answer by X; 1 is off"),
    "logit_bias": ("ID=X", "add X to the logit of this token (default: none)"),
    "seed": ("N", "seed of the randomness (default: a new one)"),
    "algorithm": ("", "how blocks are denoised"),
    "window": ("N", "most blocks that are denoised together (D2F)"),
    "confidence_threshold": ("P", "write tokens whose confidence is higher than this"),
    "block_add_threshold": ("R", "append a block once this share of the last one is written"),
    "full_activation_threshold": (
        "R", "let the next block advance in each step once this share is written"
    ),
    "score": ("", "ranking of the masks if none passes the threshold"),
    "remasking": ("", "order in which masks are filled"),
    "denoising_steps": ("N", "steps for each block (block diffusion)"),
    "entropy_bound": ("H", "most entropy that a step writes, in nats (entropy_bounded)"),
    "editing_threshold": (
        "P", "replace written tokens by ones of a higher confidence (block diffusion)"
    ),
    "max_post_steps": ("N", "forward passes that edit a full block (block diffusion)"),
    "block_length": ("N", "tokens that are denoised together (LLaDA, Fast-dLLM, its v2)"),
    "steps": ("N", "forward passes for the whole answer; 0 is one per token (LLaDA, Dream)"),
    "cfg_scale": ("S", "classifier-free guidance; 0 is off (LLaDA)"),
    "logits_eos_inf": ("", "never write an end-of-sequence token (LLaDA)"),
    "confidence_eos_eot_inf": ("", "write end-of-sequence tokens last (LLaDA)"),
    "alg": ("", "which masks a step fills (Dream)"),
    "eps": ("T", "last value of the time, which begins at 1 (Dream)"),
    "alg_temp": ("T", "randomness in the choice of masks; 0 is none (Dream)"),
    "factor": ("F", "write by rank, not by the threshold; 0 is off (Fast-dLLM)"),
    "cache": ("", "which keys and values a block reuses (Fast-dLLM)"),
}  # fmt: skip
"""By setting of Params: the form of the flag's value, if it has one, and its help."""


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting."""
    for name, (metavar, about) in _FLAGS.items():
        told = about if "(default: " in about else f"{about} (default: the model's)"
        flag = "--stop-token-id" if name == "stop_token_ids" else flag_of(name)
        parser.add_argument(flag, dest=name, help=told, **_kind_of(name, metavar))


def _kind_of(name: str, metavar: str) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting."""
    if name in NAMES:
        return {"choices": NAMES[name]}
    if name in NUMBERS:
        return {"type": within(NUMBERS[name]), "metavar": metavar}
    if name in _REPEATED:
        return {"action": "append", "default": [], "type": _REPEATED[name], "metavar": metavar}
    if name == "model":
        return {"type": text, "metavar": metavar}
    return {"action": "store_true", "default": None}


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


_REPEATED: Final[Mapping[str, Callable[[str], Any]]] = {
    "stop": text, "stop_token_ids": _TOKEN_ID, "logit_bias": _bias
}  # fmt: skip
"""Settings whose flags may be given several times."""


def params_from(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Params:
    """The settings from the parsed flags; ends with status 2 if they contradict each other."""
    try:
        given = {one.name: getattr(found, one.name) for one in fields(Params)}
        return Params(**{**given, "logit_bias": dict(found.logit_bias)})
    except ValueError as error:
        parser.error(str(error))
