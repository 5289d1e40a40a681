"""Requests of OpenAI's HTTP API, as effuse means them; functions of values.

A body's fields are OpenAI's, those that vLLM adds, and the settings of `effuse.Params` by their own
names. A field that would change the answer is obeyed or refused, never ignored. Not here: the
calls (`openai_api.py`),
answers (`openai_answers.py`).
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NoReturn, get_type_hints

import msgspec

from effuse.client.chat import Chat
from effuse.client.params import Params, Prompt, make_request
from effuse.config.decoding import SettingError
from effuse.protos.errors import InvalidRequest
from effuse.router.findings import SEEDS, Findings, kind_of, naming, shown
from effuse.v1 import generation_pb2 as pb

Json = dict[str, Any]
Endpoint = Literal["chat", "completion"]

MOST_PROMPTS: Final = 64
"""Prompts of one completion."""
_OF_THEIR_OWN: Final = {"stop", "logit_bias", "logprobs", "echo", "seed", "max_tokens"}
_SETTINGS: Final[Mapping[str, Any]] = {
    name: kind for name, kind in get_type_hints(Params).items() if name not in _OF_THEIR_OWN
}
_COMMON: Final[Mapping[str, Any]] = {
    "request_id": str,
    "max_tokens": int,
    "seed": int,
    "stop": str | list[str],
    "logit_bias": dict[str, float],
    "stream": bool,
    "stream_options": dict[str, bool | None],
}
_FIELDS: Final[Mapping[Endpoint, Mapping[str, Any]]] = {
    "chat": {
        **_SETTINGS,
        **_COMMON,
        "messages": list[dict[str, Any]],
        "max_completion_tokens": int,
        "logprobs": bool,
        "top_logprobs": int,
        "tools": list[dict[str, Any]],
        "tool_choice": Literal["none", "auto"],
        "documents": list[dict[str, Any]],
        "reasoning_effort": str,
        "chat_template_kwargs": dict[str, Any],
        "add_generation_prompt": bool,
        "continue_final_message": bool,
    },
    "completion": {
        **_SETTINGS,
        **_COMMON,
        "prompt": str | list[str | int | list[int]],
        "logprobs": int,
        "echo": bool,
    },
}
_NEUTRAL: Final[Mapping[str, Sequence[object]]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "parallel_tool_calls": (True,),
    "best_of": (1,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "functions": ([],),
}
"""Fields that effuse does not have, and the values that ask for nothing."""
_NOTES: Final = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that concern the caller and not the answer."""
_STREAM_OPTIONS: Final = {"include_usage", "continuous_usage_stats", "include_obfuscation"}


_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")  # each id has one name
_ARGUMENTS: Final = ("chat_template_kwargs", "tools", "documents", "reasoning_effort")
"""Fields with variables for a template. The first that is set is named for all of them."""
_PATHS: Final = (
    (re.compile(r"^prompt_token_ids(\.ids)?"), "prompt"),
    (re.compile(r"^(sampling|stopping|decoding|output|objectives|chat)\."), ""),
    (re.compile(r"^template_arguments(_json)?"), "chat_template_kwargs"),
    (re.compile(r"^chat$"), "messages"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One call: a request for each prompt, and the form that the answers take."""

    endpoint: Endpoint
    requests: tuple[pb.GenerateRequest, ...]
    num_answers: int  # to each prompt
    is_stream: bool
    adds_usage: bool  # to the stream, behind the answers
    adds_usage_always: bool  # to each chunk as well
    num_logprobs: int | None  # likeliest tokens beside each one; None sends no log-probabilities
    # Of settings that have another name in the body, for each request.
    names: tuple[Mapping[str, str], ...]

    def in_its_words(self, at: int = 0) -> AbstractContextManager[None]:
        """A refusal of the request at this place becomes one that names the body's fields."""
        return naming(partial(_path_of, names=self.names[at]))


def parse_body(body: bytes) -> Json:
    """The JSON object of a body. Raises `InvalidRequest`."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise _no_json("too many lists and objects within each other") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _no_json(shown(str(error), 100)) from None
    except ValueError:  # Python's own limit
        raise _no_json(f"a number of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(found, dict):
        raise InvalidRequest.of("", f"expected a JSON object, got {kind_of(found)}")
    return found


def request_of(body: Json, endpoint: Endpoint) -> Wanted:
    """The requests that a body means. Raises `InvalidRequest` that names each field at fault."""
    findings = Findings()
    given = _checked(body, endpoint, findings)
    options = _stream_options(given, findings)
    prompts = _chat(given, findings) if endpoint == "chat" else _prompts(given, findings)
    settings, num_logprobs = _settings(given, endpoint, findings)
    if "request_id" in given and len(prompts) > 1:
        findings.add("request_id", "no value with several prompts", "a value")
    findings.raise_any()

    names = _names(given, endpoint, len(prompts))
    params = findings.params(settings, lambda name: names[0].get(name, name))
    requests = []
    for prompt, own in zip(prompts, names, strict=True):
        try:
            one = make_request(
                prompt, params, request_id=given.get("request_id"),
                token_ids=num_logprobs is not None,
            )  # fmt: skip
        except SettingError as error:
            raise InvalidRequest.of(_path_of(error.name, own), error.description) from error
        except (TypeError, ValueError) as error:
            raise InvalidRequest.of(own["prompt"], shown(str(error), 400)) from error
        requests.append(one)
    return Wanted(
        endpoint=endpoint,
        requests=tuple(requests),
        num_answers=max(1, settings.get("n") or 1),
        is_stream=bool(given.get("stream")),
        adds_usage=options.get("include_usage", False),
        adds_usage_always=options.get("continuous_usage_stats", False),
        num_logprobs=num_logprobs,
        names=names,
    )


def _names(given: Json, endpoint: Endpoint, count: int) -> tuple[dict[str, str], ...]:
    """The names that a body has for settings, if they are others, for each of its requests."""
    others = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}
    names = {name: other for name, other in others.items() if other in given}
    if arguments := [one for one in _ARGUMENTS if one in given]:
        names["chat_template_kwargs"] = arguments[0]
    if endpoint == "chat":
        return ({**names, "prompt": "messages"},)
    prompt = given["prompt"]
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    places = ["prompt"] if is_one else [f"prompt[{at}]" for at in range(count)]
    return tuple({**names, "prompt": place} for place in places)


def _path_of(field: str, names: Mapping[str, str]) -> str:
    """The path in a body of a field of the request that it means."""
    for pattern, replacement in _PATHS:
        field = pattern.sub(replacement, field)
    first = re.split(r"[.[]", field)[0]
    return names.get(first, first) + field[len(first) :]


def _no_json(found: str) -> InvalidRequest:
    return InvalidRequest.of("", f"expected a body of JSON, got {found}")


def _refuse_constant(name: str) -> NoReturn:
    raise _no_json(f"the number {name}, which JSON does not have")


def _checked(body: Json, endpoint: Endpoint, findings: Findings) -> Json:
    """The fields that are set, each of its own type; a null is a field that is not set."""
    fields, given, unknown = _FIELDS[endpoint], {}, list[str]()
    for name, value in body.items():
        if value is None or name in _NOTES:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                allowed = json.dumps(_NEUTRAL[name][0])
                findings.add(name, f"{allowed} or nothing", shown(json.dumps(value)))
        elif name not in fields:
            unknown.append(name)
        else:
            try:
                given[name] = msgspec.convert(value, fields[name])
            except (msgspec.ValidationError, UnicodeEncodeError):  # half of a surrogate pair
                findings.misfit(name, fields[name], value)
    form = "a field that this endpoint has"
    findings.add_each(unknown, lambda name: shown(name)[1:-1] or "''", form, "an unknown one")
    return given


def _stream_options(given: Json, findings: Findings) -> dict[str, bool]:
    sent: dict[str, bool | None] = given.get("stream_options", {})
    options = {name: value for name, value in sent.items() if value is not None}
    if strange := options.keys() - _STREAM_OPTIONS:
        form = f"one of {', '.join(sorted(_STREAM_OPTIONS))}"
        findings.add("stream_options", form, shown(min(strange)))
    if options and not given.get("stream"):
        findings.add("stream_options", "no value without stream", "a value")
    return options


def _chat(given: Json, findings: Findings) -> list[Prompt]:
    arguments = dict(given.get("chat_template_kwargs", {}))
    if given.get("tool_choice") != "none":
        arguments |= {name: given[name] for name in ("tools",) if name in given}
    arguments |= {name: given[name] for name in ("documents", "reasoning_effort") if name in given}
    try:
        chat = Chat.of(map(_for_template, given.get("messages", ())))
    except SettingError as error:
        findings.note(error.name, error.description)
        return []
    return [
        Chat(
            chat.messages,
            arguments,
            add_generation_prompt=given.get("add_generation_prompt"),
            continue_last=given.get("continue_final_message", False),
        )
    ]


def _for_template(message: Json) -> Json:
    """The message, in which calls of tools have an object of arguments. OpenAI's API has the text
    of one, which a template would write as a string within JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(one) for one in calls]}


def _with_object(call: Any) -> Any:
    function: Any = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, InvalidRequest):  # a model may have written it
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _prompts(given: Json, findings: Findings) -> list[Prompt]:
    prompt = given.get("prompt")
    if prompt is None and not any(one.field.startswith("prompt") for one in findings.violations):
        findings.add("prompt", "a string, token ids, or a list of either", "none")
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(one) for one in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        findings.add("prompt", "only texts, or only token ids", "both")
        return []
    if not 1 <= len(prompt) <= MOST_PROMPTS:
        findings.add("prompt", f"from 1 to {MOST_PROMPTS} prompts", len(prompt))
        return []
    return list(prompt)


def _settings(given: Json, endpoint: Endpoint, findings: Findings) -> tuple[Json, int | None]:
    """What `Params` takes, and how many likeliest tokens go beside each token."""
    settings = {name: given[name] for name in _SETTINGS.keys() & given.keys()}
    most = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if most:
        settings["max_tokens"] = given[most[0]]
    if len({given[name] for name in most}) > 1:
        findings.add("max_tokens", "no value with max_completion_tokens", "another number")
    if "seed" in given:
        settings["seed"] = given["seed"] % SEEDS
    if "stop" in given:
        stop = given["stop"]
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "logit_bias" in given:
        biases = given["logit_bias"]
        if strange := [name for name in biases if not _TOKEN_ID.fullmatch(name)]:
            findings.add("logit_bias", "token ids as names", shown(strange[0]))
        else:
            settings["logit_bias"] = {int(name): value for name, value in biases.items()}
    num_logprobs = _logprobs(given, endpoint, findings)
    if given.get("echo"):
        settings["echo"] = True
        if num_logprobs is not None:
            form = "no value with logprobs, because a prompt's log-probabilities are not computed"
            findings.add("echo", form, "true")
    if num_logprobs is not None:
        settings["logprobs"] = num_logprobs
    return settings, num_logprobs


def _logprobs(given: Json, endpoint: Endpoint, findings: Findings) -> int | None:
    if endpoint == "completion":
        found: int | None = given.get("logprobs")
    elif given.get("logprobs"):
        found = given.get("top_logprobs", 0)
    else:
        found = None
        if given.get("top_logprobs"):
            findings.add("top_logprobs", "logprobs with it", "it alone")
    if found is not None and found < 0:
        name = "logprobs" if endpoint == "completion" else "top_logprobs"
        findings.add(name, "a count of 0 or more", found)
    return found
