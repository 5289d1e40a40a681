"""A checked request's prompt as ids: text, a chat or the ids themselves.

Says what is wrong with an input that only its encoding shows. Not here: its form
(`validation.py`), whether it fits the model's context (`validation.fit`).
"""

from __future__ import annotations

from collections.abc import Iterator

from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.router.chat_template import ChatTemplateError
from effuse.router.findings import Findings, shown
from effuse.router.inputs import most_prompt_bytes
from effuse.router.special_tokens import strings_of
from effuse.router.tokenizer import Tokenizer
from effuse.router.validation import Asked


async def encode_prompt(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    """The ids of the prompt. Raises `InvalidRequest` for one that the model's chat template does
    not take, and for reserved tokens where special tokens are parsed; `Unavailable` where
    tokenizer and model do not fit."""
    if asked.parses_special:
        _check_special(asked, tokenizer)
    if asked.prompt is not None:
        ids = await tokenizer.encode(asked.prompt, parses_special=asked.parses_special)
    elif asked.chat is not None:
        ids = await _encode_chat(asked, tokenizer)
    else:
        return list(asked.prompt_token_ids)
    if max(ids, default=0) >= asked.model.vocab_size:
        raise Unavailable(
            f"the router's tokenizer does not fit the model: it made id {max(ids)}, "
            f"the vocabulary has {asked.model.vocab_size}",
            retryable=False,
        )
    return ids


async def _encode_chat(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    assert asked.chat is not None, "asked for by the caller"
    most_bytes = most_prompt_bytes(asked.model)
    try:
        return await tokenizer.encode_chat(
            asked.chat, most_bytes=most_bytes, parses_special=asked.parses_special
        )
    except ChatTemplateError as error:
        why = f"the model's chat template does not take it: {shown(str(error), most=400)}"
        raise InvalidRequest.of("chat", why) from error


def _check_special(asked: Asked, tokenizer: Tokenizer) -> None:
    """No token that is refused among ids may come in spelled."""
    findings = Findings()
    for name, text in _texts(asked):
        for part in tokenizer.special_tokens.cut(text):
            if not isinstance(part, str) and part.id in asked.refused_ids:
                what = f"the {asked.refused_ids[part.id]} token {shown(part.text)}"
                findings.add(name, "special tokens that a prompt may hold", what)
                break
    findings.raise_any()


def _texts(asked: Asked) -> Iterator[tuple[str, str]]:
    """Each of the client's strings, with its path in the request."""
    if asked.prompt is not None:
        yield "prompt", asked.prompt
    if asked.chat is not None:
        for at, message in enumerate(asked.chat.messages):
            yield f"chat.messages[{at}].content", message.content
        for text in strings_of(asked.chat.template_arguments):
            yield "chat.template_arguments", text
