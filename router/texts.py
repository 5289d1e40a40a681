"""Text to ids and back for who asks for nothing else: as Generate reads prompts and writes answers.

Checked like a request, so that what passes here passes there. Not here: the tokenizer itself
(`tokenizer.py`), following an answer (`detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from effuse.placement.records import ModelInfo
from effuse.router.findings import Findings
from effuse.router.prompt import encode_prompt
from effuse.router.tokenizer import Tokenizer
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2, model_pb2


class Resolve(Protocol):
    """`Router.resolve`: what a request asks for; raises `EffuseError`."""

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
