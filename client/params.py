"""The settings of a request as one value, and the request made from them."""
# ruff: noqa: RUF009  # `_setting` makes a field, like dataclasses.field

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any, Final, SupportsFloat, SupportsIndex, get_args

from google.protobuf.message import Message

from effuse.client.chat import Chat, check_whole
from effuse.config.decoding import (
    ANSWERS,
    BIAS,
    CHOICES,
    LOGPROBS,
    MOST_BIASES,
    MOST_STOP_IDS,
    MOST_STOPS,
    OBJECTIVES,
    SAMPLING,
    SETTINGS,
    STOP_BYTES,
    STOPPING,
    TOKEN_ID,
    Alg,
    Algorithm,
    Bounds,
    Cache,
    Priority,
    Remasking,
    Score,
    SettingError,
)
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

Prompt = str | Chat | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, a conversation or its messages, or token ids that are used as they are."""
Text = str | Chat | Sequence[Mapping[str, Any]]
"""A prompt to turn into ids."""

NAMES: Final[Mapping[str, Mapping[str, Any]]] = {
    setting: {
        name: getattr(pb, setting.title()).Value(f"{setting}_{name}".upper()) for name in names
    }
    for setting, names in {**CHOICES, "priority": get_args(Priority)}.items()
}
"""Settings that are names, and the numbers of these on the wire."""
NUMBERS: Final[Mapping[str, Bounds]] = {
    **SAMPLING, **STOPPING, **SETTINGS, **OBJECTIVES, "n": ANSWERS, "logprobs": LOGPROBS
}  # fmt: skip
"""Settings that are numbers."""


def _setting(form: str, about: str, default: Any = None) -> Any:
    metadata = {"form": form, "about": about}
    if default is dict:
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """The model that answers, how often, and the parts of its answer."""

    model: str | None = _setting(
        "NAME", "model to use, if the fleet serves several (default: the only one)"
    )
    n: int | None = _setting("N", "answers to each prompt (default: 1)")
    logprobs: int | None = _setting(
        "N", "log-probability of each token and of the N likeliest (default: none)"
    )
    echo: bool | None = _setting("", "print the prompt before the answer (default: off)")
    priority: Priority | None = _setting(
        "", "which requests go first if some must wait (default: the class's, or normal)"
    )
    request_class: str | None = _setting(
        "NAME", "class of the request, whose objectives the router has (default: none)"
    )
    first_block_within: float | None = _setting(
        "S", "objective: seconds until the first block (default: the class's or the router's)"
    )
    gap_within: float | None = _setting(
        "S", "objective: seconds between two blocks (default: the class's or the router's)"
    )
    parse_special_tokens: bool | None = _setting(
        "", "read special tokens in a prompt as tokens, not as text (default: off)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingSettings(AnswerSettings):
    """When an answer ends."""

    max_tokens: int | None = _setting("N", "maximum tokens to generate")
    stop: str | Sequence[str] = _setting("TEXT", "text that ends the answer (default: none)", ())
    stop_token_ids: Sequence[int] = _setting(
        "ID", "id of a token that ends the answer (default: only the model's)", ()
    )
    min_tokens: int | None = _setting("N", "minimum tokens to generate (default: 0)")
    ignore_eos: bool | None = _setting("", "do not stop at an end-of-sequence token (default: off)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings(StoppingSettings):
    """How tokens are drawn."""

    temperature: float | None = _setting("T", "randomness of sampling; 0 takes the likeliest token")
    top_p: float | None = _setting(
        "P", "keep the likeliest tokens up to this probability; 1 keeps all"
    )
    top_k: int | None = _setting("K", "keep the K likeliest tokens; 0 keeps all")
    min_p: float | None = _setting(
        "P", "keep tokens with at least this share of the highest probability; 0 keeps all"
    )
    presence_penalty: float | None = _setting(
        "X", "subtract X from the logits of tokens that the text contains (default: 0)"
    )
    frequency_penalty: float | None = _setting(
        "X", "subtract X once for each time that a token occurs (default: 0)"
    )
    repetition_penalty: float | None = _setting(
        "X", "divide the logits of tokens in prompt and answer by X; 1 is off"
    )
    logit_bias: Mapping[int, float] = _setting(
        "ID=X", "add X to the logit of this token (default: none)", dict
    )
    seed: int | None = _setting("N", "seed of the randomness (default: a new one)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings(SamplingSettings):
    """How blocks are denoised."""

    algorithm: Algorithm | None = _setting("", "how blocks are denoised")
    window: int | None = _setting("N", "maximum blocks that are denoised together (D2F)")
    confidence_threshold: float | None = _setting(
        "P", "write tokens whose confidence is higher than this"
    )
    block_add_threshold: float | None = _setting(
        "R", "append a block once this share of the last one is written"
    )
    full_activation_threshold: float | None = _setting(
        "R", "let the next block advance in each step once this share is written"
    )
    score: Score | None = _setting("", "how masks are ranked when none passes the threshold")
    remasking: Remasking | None = _setting("", "order in which masks are filled")
    denoising_steps: int | None = _setting("N", "steps for each block (block diffusion)")
    entropy_bound: float | None = _setting(
        "H", "highest entropy that a step writes, in nats (entropy_bounded)"
    )
    editing_threshold: float | None = _setting(
        "P", "replace written tokens by ones of a higher confidence (block diffusion)"
    )
    max_post_steps: int | None = _setting(
        "N", "forward passes that edit a full block (block diffusion)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasSettings(BlockSettings):
    """How a whole answer is denoised."""

    block_length: int | None = _setting(
        "N", "tokens that are denoised together (LLaDA, Fast-dLLM, its v2)"
    )
    steps: int | None = _setting(
        "N", "forward passes for the whole answer; 0 is one per token (LLaDA, Dream)"
    )
    cfg_scale: float | None = _setting("S", "classifier-free guidance; 0 is off (LLaDA)")
    logits_eos_inf: bool | None = _setting("", "never write an end-of-sequence token (LLaDA)")
    confidence_eos_eot_inf: bool | None = _setting("", "write end-of-sequence tokens last (LLaDA)")
    alg: Alg | None = _setting("", "which masks a step fills (Dream)")
    eps: float | None = _setting("T", "final diffusion time (it starts at 1; Dream)")
    alg_temp: float | None = _setting("T", "randomness in the choice of masks; 0 is none (Dream)")
    factor: float | None = _setting(
        "F", "write by rank, not by the threshold; 0 is off (Fast-dLLM)"
    )
    cache: Cache | None = _setting("", "which keys and values a block reuses (Fast-dLLM)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(CanvasSettings):
    """Settings of a request. None leaves the choice to the server, whose defaults are in
    `protos/effuse/v1/generation.proto`. Raises ValueError that names each field with a value that
    every router refuses. The router checks the limits of a model, such as its vocabulary.
    """

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        if found := misfits(given):
            raise ValueError("; ".join(f"{name}: {why}" for name, why in found.items()))
        for name in ("stop", "stop_token_ids"):  # copies, in case the caller changes its own
            if not isinstance(given[name], str | tuple):
                object.__setattr__(self, name, tuple(given[name]))
        if self.logit_bias:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))


def make_request(
    prompt: Prompt,
    params: Params,
    *,
    request_id: str | None = None,
    token_ids: bool = False,
    drafts: bool = False,
    prompt_progress: bool = False,
) -> pb.GenerateRequest:
    """The request for one prompt. Raises TypeError for arguments that are not a prompt and Params.
    Raises ValueError for ids out of range, and for a chat whose template arguments JSON cannot
    express.
    """
    if not isinstance(params, Params):
        raise TypeError(f"params: expected effuse.Params, got {type(params).__name__}")
    given = read_prompt(prompt)
    if request_id is not None:
        check_text("request_id", request_id)
    request = _settings(params)
    rest = pb.GenerateRequest(
        request_id=request_id,
        prompt=given if isinstance(given, str) else None,
        prompt_token_ids=pb.TokenIds(ids=given) if isinstance(given, tuple) else None,
        chat=given.to_input() if isinstance(given, Chat) else None,
        output=pb.OutputOptions(
            token_ids=token_ids, drafts=drafts, prompt_progress=prompt_progress
        ),
    )
    request.MergeFrom(rest)
    return request


def read_prompt(prompt: object) -> str | Chat | tuple[int, ...]:
    """One prompt: a text, a chat, or ids; a list of messages is a chat. Raises TypeError for other
    types, and ValueError for a wrong id or message.
    """
    if isinstance(prompt, str):
        check_whole("prompt", prompt)
    if isinstance(prompt, str | Chat):
        return prompt
    if isinstance(prompt, Iterator):
        prompt = list(prompt)
    messages = prompt if isinstance(prompt, list | tuple) else ()
    if messages and all(isinstance(one, Mapping) for one in messages):
        return Chat.of(messages)
    return ids_of("prompt", prompt, "a string, a Chat, a list of messages, or a list of token ids")


def ids_of(name: str, given: object, form: str = "a list of token ids") -> tuple[int, ...]:
    """Token ids as a tuple. Raises TypeError for values that are not a list of `form`, and
    ValueError for an id out of range.
    """
    found = type(given).__name__
    unordered = (str, bytes, bytearray, Mapping, Set)
    if not isinstance(given, Iterable) or isinstance(given, unordered):
        raise TypeError(f"{name}: expected {form}, got {found}")
    listed = list(given)
    kinds = {type(one).__name__ for one in listed}
    try:
        if any(kind.startswith("bool") for kind in kinds):
            raise TypeError
        ids = tuple(map(index, listed))
    except TypeError:
        got = f"{found} of {', '.join(sorted(kinds))}"
        raise TypeError(f"{name}: expected {form}, got {got}") from None
    if ids and not (min(ids) in TOKEN_ID and max(ids) in TOKEN_ID):
        wrong = next(one for one in ids if one not in TOKEN_ID)
        raise SettingError(name, f"token ids from 0 to {TOKEN_ID.high}", wrong)
    return ids


def misfits(given: Mapping[str, object]) -> dict[str, str]:
    """Settings of Params that every router refuses, with the reason; None is not set."""
    found: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            _check_setting(name, value)
        except SettingError as error:
            found[error.name] = error.description
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    least, most = given.get("min_tokens"), given.get("max_tokens")
    if not found and isinstance(least, int) and isinstance(most, int) and least > most:
        found["min_tokens"] = f"expected at most max_tokens {most}, got {least}"
    return found


def _check_setting(name: str, value: Any) -> None:
    """Raises TypeError or ValueError."""
    if name in NUMBERS:
        _check_number(name, value, NUMBERS[name])
    elif name in NAMES:
        if not isinstance(value, str) or value not in NAMES[name]:
            raise SettingError(name, f"one of {', '.join(NAMES[name])}", repr(value))
    elif name == "stop":
        _check_stops(value)
    elif name == "stop_token_ids":
        _check_most(name, value, MOST_STOP_IDS, "ids")
        for one in value:
            _check_number(name, one, TOKEN_ID)
    elif name == "logit_bias":
        if not isinstance(value, Mapping):
            raise SettingError(name, "numbers by token id", repr(value))
        _check_most(name, value, MOST_BIASES, "ids")
        for token, added in value.items():
            _check_number(name, token, TOKEN_ID)
            _check_number(name, added, BIAS)
    elif name in ("model", "request_class"):
        check_text(name, value)
    elif not isinstance(value, bool):
        raise SettingError(name, "True or False", repr(value))


def _check_number(name: str, value: Any, bounds: Bounds) -> None:
    is_number = isinstance(value, SupportsIndex if bounds.is_whole else SupportsFloat)
    if isinstance(value, bool | Sized) or not is_number or value not in bounds:
        raise SettingError(name, bounds.form, repr(value))


def _check_most(name: str, values: Any, most: int, what: str) -> None:
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) > most:
        got = f"{len(values)}" if isinstance(values, Sized) else repr(values)
        raise SettingError(name, f"at most {most} {what}", got)


def _check_stops(stops: Any) -> None:
    if isinstance(stops, str):
        _check_stop("stop", stops)
        return
    _check_most("stop", stops, MOST_STOPS, "strings")
    for at, one in enumerate(stops):
        _check_stop(f"stop[{at}]", one)
    if len(set(stops)) < len(stops):
        raise SettingError("stop", "different strings", "a repeated string")


def _check_stop(name: str, stop: Any) -> None:
    check_text(name, stop)
    if len(stop.encode()) not in STOP_BYTES:
        form = f"a string of 1 to {STOP_BYTES.high} bytes"
        raise SettingError(name, form, f"{len(stop.encode())} bytes")


def check_text(name: str, value: object) -> None:
    """Raises SettingError for what is no string, or none that UTF-8 can encode."""
    if not isinstance(value, str):
        raise SettingError(name, "a string", repr(value))
    check_whole(name, value)


def _settings(params: Params) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        n=params.n,
        **_set_fields(("model", "parse_special_tokens", "priority", "request_class"), params),
        objectives=pb.Objectives(**_set_fields(_fields_of(pb.Objectives), params)),
        sampling=pb.SamplingParams(**_set_fields(_fields_of(pb.SamplingParams), params)),
        stopping=pb.StoppingParams(**_set_fields(_fields_of(pb.StoppingParams), params)),
        decoding=pb.DecodingParams(**_set_fields(_fields_of(pb.DecodingParams), params)),
        output=pb.OutputOptions(logprobs=params.logprobs, echo=params.echo),
    )


def _set_fields(names: Iterable[str], params: Params) -> dict[str, Any]:
    """These settings as fields of a message, with names as numbers; None is not set."""
    given = {name: getattr(params, name) for name in names}
    for name in NAMES.keys() & given.keys():
        given[name] = None if given[name] is None else NAMES[name][given[name]]
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    return given


def _fields_of(message: type[Message]) -> Iterable[str]:
    """The fields of a message of settings, which have the names of those of Params."""
    return message.DESCRIPTOR.fields_by_name


def make_tokenize_request(
    prompt: Text, model: str | None, parse_special_tokens: bool
) -> model_pb2.TokenizeRequest:
    """The request for one prompt's ids. Raises TypeError and ValueError like `make_request`."""
    given = read_prompt(prompt)
    if model is not None:
        check_text("model", model)
    if isinstance(given, tuple):
        raise TypeError("prompt: expected a string, a Chat or a list of messages, got token ids")
    return model_pb2.TokenizeRequest(
        model=model,
        prompt=given if isinstance(given, str) else None,
        chat=given.to_input() if isinstance(given, Chat) else None,
        parse_special_tokens=parse_special_tokens,
    )
