"""Requests and answers of OpenAI's HTTP API, as effuse means them; functions of values.

A body's fields are OpenAI's, those that vLLM adds, and the settings of `effuse.Params` by their own
names. A field that would change the answer is obeyed or refused, never passed over. Not here: the
calls (`openai_api.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Literal, NoReturn, get_type_hints

import grpc
import msgspec

from effuse.client.chat import Chat
from effuse.client.params import Params, Prompt, make_request, misfits
from effuse.protos.errors import EffuseError, InvalidRequest
from effuse.router.findings import Findings, shown
from effuse.v1 import generation_pb2 as pb

Json = dict[str, Any]
Endpoint = Literal["chat", "completion"]

MOST_PROMPTS: Final = 64
"""Prompts of one completion."""
SEEDS: Final = 1 << 64
_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
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
    "stream_options": dict[str, bool],
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
_PATHS: Final = (
    (re.compile(r"^prompt_token_ids(\.ids)?"), "prompt"),
    (re.compile(r"^(sampling|stopping|decoding|output|chat)\."), ""),
    (re.compile(r"^template_arguments"), "chat_template_kwargs"),
    (re.compile(r"^chat$"), "messages"),
)
_STATUSES: Final[Mapping[grpc.StatusCode, tuple[HTTPStatus, str]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    grpc.StatusCode.UNIMPLEMENTED: (HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (HTTPStatus.UNAUTHORIZED, "authentication_error"),
    grpc.StatusCode.NOT_FOUND: (HTTPStatus.NOT_FOUND, "not_found_error"),
    grpc.StatusCode.ALREADY_EXISTS: (HTTPStatus.CONFLICT, "conflict_error"),
    grpc.StatusCode.ABORTED: (HTTPStatus.GONE, "cancelled_error"),
    grpc.StatusCode.CANCELLED: (HTTPStatus.GONE, "cancelled_error"),
    # Clients send again what fails with 409, 429 or 5xx: not a request that ends engines.
    grpc.StatusCode.FAILED_PRECONDITION: (HTTPStatus.UNPROCESSABLE_ENTITY, "unprocessable_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (HTTPStatus.GATEWAY_TIMEOUT, "timeout_error"),
}
_INTERNAL: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error")


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


def parse_body(body: bytes) -> Json:
    """The JSON object of a body. Raises `InvalidRequest`."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(
            "", f"expected a body of JSON, got {shown(str(error), 100)}"
        ) from None
    if not isinstance(found, dict):
        raise InvalidRequest.of("", f"expected a JSON object, got {type(found).__name__}")
    return found


def request_of(body: Json, endpoint: Endpoint) -> Wanted:
    """The requests that a body means. Raises `InvalidRequest` that names each field at fault."""
    findings = Findings()
    given = _checked(body, endpoint, findings)
    options = _stream_options(given, findings)
    prompts = _chat(given, findings) if endpoint == "chat" else _prompts(given, findings)
    settings, num_logprobs = _settings(given, endpoint, findings)
    if "request_id" in given and len(prompts) > 1:
        findings.add("request_id", "it unset beside several prompts", "a value")
    findings.raise_any()
    params = Params(**settings)
    for name, why in misfits(params).items():  # numbers that their fields cannot hold
        is_other = name == "max_tokens" and name not in given
        findings.add("max_completion_tokens" if is_other else name, "a value that fits", why)
    findings.raise_any()
    try:
        requests = tuple(
            make_request(
                prompt, params, request_id=given.get("request_id"),
                token_ids=num_logprobs is not None,
            )
            for prompt in prompts
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise InvalidRequest.of("prompt", shown(str(error), 400)) from error
    return Wanted(
        endpoint=endpoint,
        requests=requests,
        num_answers=max(1, settings.get("n") or 1),
        is_stream=bool(given.get("stream")),
        adds_usage=options.get("include_usage", False),
        adds_usage_always=options.get("continuous_usage_stats", False),
        num_logprobs=num_logprobs,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}, which JSON does not have")


def _checked(body: Json, endpoint: Endpoint, findings: Findings) -> Json:
    """The fields that are set, each of its own type; a null is a field that is not set."""
    fields, given = _FIELDS[endpoint], {}
    for name, value in body.items():
        if value is None or name in _NOTES:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                allowed = json.dumps(_NEUTRAL[name][0])
                findings.add(name, f"{allowed} or nothing", shown(json.dumps(value)))
        elif name not in fields:
            findings.add(shown(name)[1:-1], "a field that this endpoint has", "an unknown one")
        else:
            try:
                given[name] = msgspec.convert(value, fields[name])
            except msgspec.ValidationError as error:
                findings.add(name, "another type", str(error))
    return given


def _stream_options(given: Json, findings: Findings) -> dict[str, bool]:
    options: dict[str, bool] = given.get("stream_options", {})
    for name in options.keys() - _STREAM_OPTIONS:
        form = f"one of {', '.join(sorted(_STREAM_OPTIONS))}"
        findings.add("stream_options", form, shown(name))
    if options and not given.get("stream"):
        findings.add("stream_options", "it unset without stream", "a value")
    return options


def _chat(given: Json, findings: Findings) -> list[Prompt]:
    arguments = dict(given.get("chat_template_kwargs", {}))
    if given.get("tool_choice") != "none":
        arguments |= {name: given[name] for name in ("tools",) if name in given}
    arguments |= {name: given[name] for name in ("documents", "reasoning_effort") if name in given}
    try:
        chat = Chat.of(given.get("messages", ()))
    except (KeyError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        findings.add("messages", "messages of role and content", shown(why, 200))
        return []
    return [
        Chat(
            chat.messages,
            arguments,
            add_generation_prompt=given.get("add_generation_prompt"),
            continue_last=given.get("continue_final_message", False),
        )
    ]


def _prompts(given: Json, findings: Findings) -> list[Prompt]:
    prompt = given.get("prompt")
    if prompt is None:
        findings.add("prompt", "a text, token ids, or a list of either", "none")
        return []
    kinds = {type(one) for one in prompt}
    if isinstance(prompt, str) or kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        findings.add("prompt", "texts alone, or token ids alone", "both")
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
        findings.add("max_tokens", "it unset beside max_completion_tokens", "another number")
    if "seed" in given:
        settings["seed"] = given["seed"] % SEEDS
    if "stop" in given:
        stop = given["stop"]
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "logit_bias" in given:
        settings["logit_bias"] = _biases(given["logit_bias"], findings)
    if given.get("echo"):
        settings["echo"] = True
    num_logprobs = _logprobs(given, endpoint, findings)
    if num_logprobs is not None:
        settings["logprobs"] = num_logprobs
    return settings, num_logprobs


def _biases(said: Mapping[str, float], findings: Findings) -> dict[int, float]:
    if strange := [name for name in said if not (name.isascii() and name.isdecimal())]:
        findings.add("logit_bias", "token ids as names", shown(strange[0]))
        return {}
    return {int(name): value for name, value in said.items()}


def _logprobs(given: Json, endpoint: Endpoint, findings: Findings) -> int | None:
    if endpoint == "completion":
        found: int | None = given.get("logprobs")
    elif given.get("logprobs"):
        found = given.get("top_logprobs", 0)
    else:
        found = None
        if given.get("top_logprobs"):
            findings.add("top_logprobs", "logprobs beside it", "it alone")
    if found is not None and found < 0:
        findings.add("logprobs", "a count from 0 on", found)
    return found


# Answers.


@dataclass(slots=True)
class Rendering:
    """Renders what comes of one call. `text_of` gives one token's text; `created` is a Unix time in
    seconds."""

    wanted: Wanted
    id: str
    created: int
    text_of: Callable[[int], str]
    _begun: set[int] = field(default_factory=set)  # choices whose first chunk was sent
    _offsets: dict[int, int] = field(default_factory=dict)  # characters sent, by choice
    _totals: Json = field(
        default_factory=lambda: dict.fromkeys(("prompt", "completion", "cached"), 0)
    )
    model: str = ""

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> Json:
        """The response of a call that is not streamed; `answers` are in the order of the prompts,
        each with its others."""
        choices = []
        for at, first in enumerate(answers):
            for index, one in enumerate((first, *first.others)):
                self._count(one.usage, one.stats, is_first=index == 0)
                choices.append(self._choice(at, index, one, first.echo.text))
        self.model = answers[0].model
        return {**self._head(""), "choices": choices, "usage": self._usage()}

    def chunks(self, prompt: int, event: pb.GenerateStreamResponse) -> Iterator[Json]:
        """The chunks that one event of the answers to one prompt becomes."""
        if event.HasField("echo"):
            if event.echo.text:
                for index in range(self.wanted.num_answers):
                    yield self._chunk(prompt, index, event.echo.text)
        elif event.HasField("commit") and (event.commit.text or event.commit.logprobs):
            yield self._chunk(prompt, event.answer_index, event.commit.text, event.commit)
        elif event.HasField("finished"):
            finished = event.finished
            self.model = finished.model
            self._count(finished.usage, finished.stats, is_first=event.answer_index == 0)
            reason = _REASONS[finished.finish_reason]
            yield self._chunk(prompt, event.answer_index, "", reason=reason)

    def last_chunk(self) -> Json | None:
        """The chunk behind the answers; None if the call does not ask for it."""
        if not self.wanted.adds_usage:
            return None
        return {**self._head(".chunk"), "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> Json:
        is_chat = self.wanted.endpoint == "chat"
        name = f"chat.completion{kind}" if is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(self, prompt: int, index: int, one: pb.GenerateResponse, echo: str) -> Json:
        choice: Json = {"index": prompt * self.wanted.num_answers + index}
        if self.wanted.endpoint == "chat":
            choice["message"] = {"role": "assistant", "content": one.text, "refusal": None}
        else:
            choice["text"] = echo + one.text
        choice["logprobs"] = self._logprobs(one, len(echo))
        choice["finish_reason"] = _REASONS[one.finish_reason]
        return choice

    def _chunk(
        self,
        prompt: int,
        index: int,
        text: str,
        said: pb.BlockCommit | None = None,
        reason: str | None = None,
    ) -> Json:
        at = prompt * self.wanted.num_answers + index
        choice: Json = {"index": at}
        if self.wanted.endpoint == "chat":
            delta = {} if at in self._begun else {"role": "assistant"}
            choice["delta"] = delta | ({"content": text} if text or delta else {})
        else:
            choice["text"] = text
        offset = self._offsets.get(at, 0)
        choice["logprobs"] = None if said is None else self._logprobs(said, offset)
        choice["finish_reason"] = reason
        self._begun.add(at)
        self._offsets[at] = offset + len(text)
        chunk = {**self._head(".chunk"), "choices": [choice]}
        if self.wanted.adds_usage_always:
            chunk["usage"] = self._usage()
        elif self.wanted.adds_usage:
            chunk["usage"] = None
        return chunk

    def _count(self, usage: pb.Usage, stats: pb.GenerationStats, *, is_first: bool) -> None:
        self._totals["prompt"] += usage.prompt_tokens
        self._totals["completion"] += usage.completion_tokens
        self._totals["cached"] += stats.cached_prompt_tokens if is_first else 0

    def _usage(self) -> Json:
        prompt, completion = self._totals["prompt"], self._totals["completion"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._totals["cached"]},
        }

    def _logprobs(self, said: pb.BlockCommit | pb.GenerateResponse, offset: int) -> Json | None:
        if self.wanted.num_logprobs is None:
            return None
        pairs = list(zip(said.token_ids, said.logprobs, strict=False))
        if self.wanted.endpoint == "chat":
            return {"content": [self._token(*pair) for pair in pairs], "refusal": None}
        tokens = [self.text_of(token) for token, _ in pairs]
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for _, one in pairs],
            "top_logprobs": [
                {self.text_of(token): value for token, value in _likeliest(one)} for _, one in pairs
            ],
            "text_offset": offsets[:-1],
        }

    def _token(self, token: int, one: pb.TokenLogprobs) -> Json:
        top = [_logprob(self.text_of(token), value) for token, value in _likeliest(one)]
        return {**_logprob(self.text_of(token), one.logprob), "top_logprobs": top}


def _likeliest(one: pb.TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(one.top_token_ids, one.top_logprobs, strict=False)


def _logprob(text: str, value: float) -> Json:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


# Errors.


def status_of(error: EffuseError) -> HTTPStatus:
    """The HTTP status of an error."""
    return _STATUSES.get(error.code, _INTERNAL)[0]


def error_body(error: EffuseError) -> Json:
    """An error in OpenAI's form, with the body's field at fault as `param`."""
    message, param = error.message, None
    if isinstance(error, InvalidRequest):
        told = [(_path_of(one.field), one.description) for one in error.violations]
        message = "; ".join(f"{name}: {why}" if name else why for name, why in told)
        param = next((name for name, _ in told if name), None)
    kind = _STATUSES.get(error.code, _INTERNAL)[1]
    return {
        "error": {
            "message": message, "type": kind, "param": param, "code": error.reason.lower()
        }
    }  # fmt: skip


def _path_of(field_name: str) -> str:
    for pattern, replacement in _PATHS:
        field_name = pattern.sub(replacement, field_name)
    return field_name
