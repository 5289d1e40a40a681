"""A prompt as ids: a checked request's text, chat or ids.

Finds the faults of an input that only its encoding shows. Not here: its form (`validation.py`),
whether it fits the model's context (`validation.fit`), the tokenizer itself (`tokenizer.py`),
following an answer (`detokenizer.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.router.chat_template import ChatTemplateError
from effuse.router.findings import Findings, most_prompt_bytes, shown
from effuse.router.tokenizer import Tokenizer, strings_of
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
        most_bytes, parses_special = most_prompt_bytes(asked.model), asked.parses_special
        try:
            ids = await tokenizer.encode_chat(
                asked.chat, most_bytes=most_bytes, parses_special=parses_special
            )
        except ChatTemplateError as error:
            why = f"the model's chat template refuses it: {shown(str(error), most=400)}"
            raise InvalidRequest.of("chat", why) from error
    else:
        return list(asked.prompt_token_ids)
    if max(ids, default=0) >= asked.model.vocab_size:
        raise Unavailable(
            f"the router's tokenizer does not fit the model: it returned id {max(ids)}, but the "
            f"vocabulary has only {asked.model.vocab_size}",
            retryable=False,
        )
    return ids


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
