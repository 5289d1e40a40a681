"""Answers and errors of OpenAI's HTTP API, as JSON; functions of values.

Not here: the calls (`openai_api.py`), the meaning of bodies (`openai_requests.py`).
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import takewhile
from typing import Final

import grpc

from effuse.client.answer import FINISH_REASONS
from effuse.protos.errors import MAX_MESSAGE_CHARS, CallerError, EffuseError, InvalidRequest
from effuse.router.openai_requests import Json, Wanted
from effuse.router.tokenizer import Detokenizer, Tokenizer
from effuse.v1 import generation_pb2 as pb

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


@dataclass(slots=True)
class Rendering:
    """Renders what comes of one call. `created` is a Unix time in seconds."""

    wanted: Wanted
    id: str
    created: int
    tokenizer: Tokenizer
    _begun: set[int] = field(default_factory=set)  # choices whose first chunk was sent
    _offsets: dict[int, int] = field(default_factory=dict)  # characters up to here, by choice
    _texts: dict[int, Detokenizer] = field(default_factory=dict)  # of choices with such offsets
    _prompts: dict[int, int] = field(default_factory=dict)  # tokens of each
    _answers: dict[int, int] = field(default_factory=dict)  # tokens up to here, by choice
    _cached: int = 0  # tokens of all prompts
    model: str = ""

    def whole(self, answers: Sequence[pb.GenerateResponse]) -> Json:
        """The response of a call that is not streamed; `answers` are in the order of the prompts,
        each with its others."""
        choices = []
        for at, first in enumerate(answers):
            self._prompts[at] = first.usage.prompt_tokens
            for index, one in enumerate((first, *first.others)):
                self._count_end(at, index, one)
                choices.append(self._choice(at, index, one, first.echo.text))
        self.model = answers[0].model
        same = all(one.deterministic for first in answers for one in (first, *first.others))
        ends = {"usage": self._usage(), "deterministic": same}
        return {**self._head(""), "choices": choices, **ends}

    def chunks(
        self, prompt: int, event: pb.GenerateStreamResponse, prompt_tokens: int
    ) -> Iterator[Json]:
        """The chunks that one event of the answers to one prompt becomes."""
        self._prompts[prompt] = prompt_tokens
        at = prompt * self.wanted.num_answers + event.answer_index
        self._answers[at] = self._answers.get(at, 0) + event.commit.num_tokens
        if event.HasField("echo"):
            if event.echo.text:
                for index in range(self.wanted.num_answers):
                    yield self._chunk(prompt, index, event.echo.text)
        elif event.HasField("commit") and (event.commit.text or event.commit.logprobs):
            yield self._chunk(prompt, event.answer_index, event.commit.text, event.commit)
        elif event.HasField("finished"):
            finished = event.finished
            self.model = finished.model
            self._count_end(prompt, event.answer_index, finished)
            reason = FINISH_REASONS[finished.finish_reason]
            chunk = self._chunk(prompt, event.answer_index, "", reason=reason)
            yield chunk | {"deterministic": finished.deterministic}

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
        at = prompt * self.wanted.num_answers + index
        choice: Json = {"index": at}
        if self.wanted.endpoint == "chat":
            choice["message"] = {"role": "assistant", "content": one.text, "refusal": None}
        else:
            choice["text"] = echo + one.text
        self._offsets[at] = len(echo)
        choice["logprobs"] = self._logprobs(at, one)
        choice["finish_reason"] = FINISH_REASONS[one.finish_reason]
        return choice

    def _chunk(
        self,
        prompt: int,
        index: int,
        text: str,
        commit: pb.BlockCommit | None = None,
        reason: str | None = None,
    ) -> Json:
        at = prompt * self.wanted.num_answers + index
        choice: Json = {"index": at}
        if self.wanted.endpoint == "chat":
            delta = {} if at in self._begun else {"role": "assistant"}
            choice["delta"] = delta | ({"content": text} if text or delta else {})
        else:
            choice["text"] = text
        if commit is None:  # not tokens of an answer, which count with their log-probabilities
            self._offsets[at] = self._offsets.get(at, 0) + len(text)
        choice["logprobs"] = None if commit is None else self._logprobs(at, commit)
        choice["finish_reason"] = reason
        self._begun.add(at)
        chunk = {**self._head(".chunk"), "choices": [choice]}
        if self.wanted.adds_usage_always:
            chunk["usage"] = self._usage()
        elif self.wanted.adds_usage:
            chunk["usage"] = None
        return chunk

    def _count_end(self, prompt: int, index: int, end: pb.GenerateResponse | pb.Finished) -> None:
        self._answers[prompt * self.wanted.num_answers + index] = end.usage.completion_tokens
        self._cached += end.stats.cached_prompt_tokens if index == 0 else 0

    def _usage(self) -> Json:
        prompt, completion = sum(self._prompts.values()), sum(self._answers.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def _logprobs(self, at: int, message: pb.BlockCommit | pb.GenerateResponse) -> Json | None:
        if self.wanted.num_logprobs is None:
            return None
        pairs = list(zip(message.token_ids, message.logprobs, strict=False))
        if self.wanted.endpoint == "chat":
            return {"content": [self._token(*pair) for pair in pairs], "refusal": None}
        return {
            "tokens": [self._text_of(token) for token, _ in pairs],
            "token_logprobs": [one.logprob for _, one in pairs],
            "top_logprobs": [self._by_text(*pair) for pair in pairs],
            "text_offset": [self._offset(at, token) for token, _ in pairs],
        }

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _offset(self, at: int, token: int) -> int:
        """The place in a choice's text at which the text of its next token begins. It counts text
        that waits for a stop string."""
        text = self._texts.setdefault(at, Detokenizer(self.tokenizer))
        # Bytes only add to what is held back, and to decode a long run for each takes long.
        held = "" if self.tokenizer.is_byte(token) else text.held_back()
        piece, before = text.push([token]), self._offsets.get(at, 0)
        self._offsets[at] = before + len(piece)
        kept = takewhile(lambda two: two[0] == two[1], zip(held, piece, strict=False))
        return before + len(list(kept))

    def _by_text(self, token: int, one: pb.TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was drawn. Of several with one text, such as parts
        of characters, the likeliest counts."""
        found: dict[str, float] = {}
        for other, value in (*_likeliest(one), (token, one.logprob)):
            found.setdefault(self._text_of(other), value)
        return found

    def _token(self, token: int, one: pb.TokenLogprobs) -> Json:
        top = [_logprob(self._text_of(token), value) for token, value in _likeliest(one)]
        return {**_logprob(self._text_of(token), one.logprob), "top_logprobs": top}


def _likeliest(one: pb.TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(one.top_token_ids, one.top_logprobs, strict=False)


def _logprob(text: str, value: float) -> Json:
    """A part of a character has no bytes here, because only its place in the text gives them."""
    is_part = "\N{REPLACEMENT CHARACTER}" in text
    return {"token": text, "logprob": value, "bytes": None if is_part else list(text.encode())}


def new_id() -> str:
    """The id of a request whose client gave it none."""
    return f"req-{secrets.token_hex(12)}"


def status_of(error: EffuseError) -> HTTPStatus:
    return _STATUSES.get(error.code, _INTERNAL)[0]


def error_body(error: EffuseError) -> Json:
    """An error in OpenAI's form, with the body's field at fault as `param`. Its message is as long
    as over gRPC."""
    param = error.labels.get("field") if isinstance(error, CallerError) else None
    if isinstance(error, InvalidRequest):
        param = next((one.field for one in error.violations if one.field), None)
    kind = _STATUSES.get(error.code, _INTERNAL)[1]
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[: MAX_MESSAGE_CHARS - 4]} ..."
    return error_object(message, kind, param, error.reason.lower())


def error_object(
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
