"""A prompt as ids: a checked request's text, chat or ids. Also text to ids and back for calls that
want only that, in the same way as Generate.

Finds the faults of an input that only its encoding shows. Not here: its form (`validation.py`),
whether it fits the model's context (`validation.fit`), the tokenizer itself (`tokenizer.py`),
following an answer (`detokenizer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from effuse.placement.records import ModelInfo
from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.router.chat_template import ChatTemplateError
from effuse.router.findings import Findings, most_prompt_bytes, shown
from effuse.router.tokenizer import Tokenizer, strings_of
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2, model_pb2


async def encode_prompt(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    """The ids of the prompt. Raises `InvalidRequest` for one that the model's chat template does
    not take, and for reserved tokens where special tokens are parsed; `Unavailable` where
    tokenizer and model do not fit."""
    if asked.parses_special:
        _check_special(asked, tokenizer)
    if asked.prompt is not None:
        ids = await tokenizer.encode(asked.prompt, parses_special=asked.parses_special)
    elif asked.chat is not None:
        most_bytes, parses_special = most_prompt_bytes(asked.model), asked.parses_special
        with _telling_template_errors():
            ids = await tokenizer.encode_chat(
                asked.chat, most_bytes=most_bytes, parses_special=parses_special
            )
    else:
        return list(asked.prompt_token_ids)
    if max(ids, default=0) >= asked.model.vocab_size:
        raise Unavailable(
            f"the router's tokenizer does not fit the model: it returned id {max(ids)}, but the "
            f"vocabulary has only {asked.model.vocab_size}",
            retryable=False,
        )
    return ids


@contextmanager
def _telling_template_errors() -> Iterator[None]:
    try:
        yield
    except ChatTemplateError as error:
        why = f"the model's chat template refuses it: {shown(str(error), most=400)}"
        raise InvalidRequest.of("chat", why) from error


def _check_special(asked: Asked, tokenizer: Tokenizer) -> None:
    """No token that is refused among ids may come in spelled."""
    findings = Findings()
    for name, text in _texts(asked):
        for part in tokenizer.special_tokens.cut(text):
            if not isinstance(part, str) and part.id in asked.refused_ids:
                what = f"the {asked.refused_ids[part.id]} token {shown(part.text)}"
                findings.add(name, "special tokens that a prompt may contain", what)
                break
    findings.raise_any()


def _texts(asked: Asked) -> Iterator[tuple[str, str]]:
    """Each of the client's strings, with its path in the request."""
    if asked.prompt is not None:
        yield "prompt", asked.prompt
    if asked.chat is not None:
        for at, message in enumerate(asked.chat.messages):
            name = f"chat.messages[{at}].{'json' if message.json else 'content'}"
            for text in strings_of(message.fields()):
                yield name, text
        for text in strings_of(asked.chat.template_arguments):
            yield "chat.template_arguments_json", text


class Resolve(Protocol):
    """`Entrance.resolve`: a message as a checked request; raises `EffuseError`."""

    def __call__(self, message: generation_pb2.GenerateRequest, *, is_stream: bool) -> Asked: ...


class Texts:
    """One per router. `find` knows models by their names, as `Catalogue.find`."""

    def __init__(
        self, tokenizer: Tokenizer, resolve: Resolve, find: Callable[[str | None], ModelInfo]
    ) -> None:
        self._tokenizer = tokenizer
        self._resolve = resolve
        self._find = find

    async def tokenize(self, request: model_pb2.TokenizeRequest) -> model_pb2.TokenizeResponse:
        """The ids of a prompt, however long; raises `EffuseError` for what no prompt may be."""
        if request.WhichOneof("input") is None:
            raise InvalidRequest.of("prompt", "expected one of prompt and chat, got neither")
        asked = self._resolve(_as_request(request), is_stream=False)
        token_ids = await encode_prompt(asked, self._tokenizer)
        return model_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=asked.model.max_model_len
        )

    async def detokenize(
        self, request: model_pb2.DetokenizeRequest
    ) -> model_pb2.DetokenizeResponse:
        """The text of ids; raises `EffuseError` for what no model has, and for too many of them."""
        model, findings = (
            self._find(request.model if request.HasField("model") else None),
            Findings(),
        )
        if len(request.token_ids) > model.max_model_len:
            form = f"at most {model.max_model_len} ids"
            findings.add("token_ids", form, f"{len(request.token_ids)} ids")
        else:
            findings.token_ids("token_ids", request.token_ids, model.vocab_size, {})
        findings.raise_any()
        text = await self._tokenizer.text_of(request.token_ids)
        return model_pb2.DetokenizeResponse(text=text)


def _as_request(request: model_pb2.TokenizeRequest) -> generation_pb2.GenerateRequest:
    asking = generation_pb2.GenerateRequest(parse_special_tokens=request.parse_special_tokens)
    if request.HasField("model"):
        asking.model = request.model
    if request.HasField("prompt"):
        asking.prompt = request.prompt
    if request.HasField("chat"):
        asking.chat.CopyFrom(request.chat)
    return asking
