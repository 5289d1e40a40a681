"""Text and chats to ids, and ids to text, with only the `tokenizers` library, in threads if it is
long.

Special tokens are structure to a model: the end of a message, the role of a speaker. So only the
checkpoint's template may add them, and those that a client spells stay text, unless it asks for
them to be parsed. Before a template gets a client's strings, the first character of every special
token that they spell is exchanged for a stand-in. The rendered text is cut at its special tokens,
which are the template's, and in the text between them the characters come back. Lengths, white
space and everything else that a template looks at stay the same. The parts that `tokenizer.json`
puts around a prompt are added. Not here: following an answer (`detokenizer.py`), the template's
rendering (`chat_template.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Final

import tokenizers

from effuse.client.chat import Chat
from effuse.config.extras import pointer_problem
from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.router.chat_template import ChatTemplate, ChatTemplateError, escapes_of
from effuse.router.findings import Findings, most_prompt_bytes, shown
from effuse.router.validation import Asked

LOG: Final = logging.getLogger(__name__)

PRIVATE: Final = range(0xF0000, 0x110000)
"""Characters without a meaning, for stand-ins: Unicode's planes for private use."""
FILE: Final = "tokenizer.json"
INLINE_BYTES: Final = 512
"""Text up to this size is encoded on the spot: about 0.2 ms at worst, as much as two switches of
thread cost on a busy machine."""
_RESERVED: Final = re.compile(r"pad|mask|unk|reserved", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    """A token that stands for structure. White space beside it may belong to it."""

    id: int
    text: str
    takes_left: bool = False
    takes_right: bool = False


class SpecialTokens:
    """Those of one tokenizer."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        pattern = _any_of(self._by_text)
        self._whole = re.compile(pattern)
        self._begin = re.compile(f"(?={pattern})")
        self._beginnings = frozenset(
            text[:length] for text in self._by_text for length in range(1, len(text))
        )
        self._longest = max(map(len, self._by_text), default=0)

    def cut(self, text: str) -> Iterator[str | SpecialToken]:
        """The parts of `text`: special tokens, and the text between them if there is any."""
        end = 0
        for found in self._whole.finditer(text):
            token = self._by_text[found.group()]
            between = text[end : found.start()]
            if between := between.rstrip() if token.takes_left else between:
                yield between
            yield token
            end = found.end()
            while token.takes_right and text[end : end + 1].isspace():
                end += 1
        if end < len(text):
            yield text[end:]

    def disguise(self, strings: Sequence[str]) -> Disguise:
        """Stand-ins that none of `strings` holds: a client's, and the template's own text. Raises
        ValueError if they hold all characters that could be one."""
        used = set().union(*strings)
        firsts = sorted({text[0] for text in self._by_text})
        free = (
            mark
            for mark in map(chr, PRIVATE)
            if mark not in used
            and not any(escape in text for escape in escapes_of(mark) for text in strings)
        )
        marks = list(itertools.islice(free, len(firsts) + 1))
        if len(marks) <= len(firsts):
            raise ValueError("expected text that does not use all of Unicode's private characters")
        return Disguise(self._starts, dict(zip(firsts, marks, strict=False)), marks[-1])

    def _starts(self, text: str) -> set[int]:
        """The places where special tokens begin, and those at the end that further text could
        complete."""
        starts = {found.start() for found in self._begin.finditer(text)}
        tail = range(max(0, len(text) - self._longest + 1), len(text))
        return starts.union(at for at in tail if text[at:] in self._beginnings)


@dataclass(frozen=True, slots=True)
class Disguise:
    """Hides special tokens in strings, and undoes that. `mark` is one more character that stands in
    none of them."""

    starts: Callable[[str], Iterable[int]]
    stand_ins: Mapping[str, str]
    mark: str

    def hide(self, value: Any) -> Any:
        """`value`, of JSON's types or tuples, with special tokens hidden in every string of it."""
        if isinstance(value, str):
            characters = list(value)
            for at in self.starts(value):
                characters[at] = self.stand_ins[value[at]]
            return "".join(characters)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one) for one in value]
        return value

    def show(self, text: str) -> str:
        """`text` with the hidden characters put back."""
        for mark in self.stand_ins.values():
            for escape in escapes_of(mark):
                text = text.replace(escape, mark)
        return text.translate({ord(mark): first for first, mark in self.stand_ins.items()})


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a value of JSON's types, the names of objects' fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(strings_of, (*value, *value.values())))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(strings_of, value))


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts`, none of them empty. A letter is looked at
    once, and not once for each of them: models have hundreds, and clients send what they like."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _end_of(found) for first, found in rests.items()]
    return f"(?:{'|'.join(branches)})" if branches else "(?!)"


def _end_of(rests: Sequence[str]) -> str:
    longer = [rest for rest in rests if rest]
    optional = "?" if len(longer) < len(rests) else ""
    return _any_of(longer) + optional if longer else ""


class TokenizerError(Exception):
    """A checkpoint directory has no tokenizer that can be used here."""


def read_backend(directory: Path) -> tokenizers.Tokenizer:
    """`tokenizer.json` of a checkpoint directory; raises `TokenizerError`."""
    path = directory / FILE
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no {FILE}; make it with `effuse convert-tokenizer {directory}`"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        problem = pointer_problem(path) or error
        raise TokenizerError(f"cannot read {path} as a tokenizer: {problem}") from error


class Tokenizer:
    """A checkpoint's tokenizer. Usable from one event loop; `close` ends its threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        threads: int = 2,
    ) -> None:
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.has_chat_template = chat_template is not None
        """Whether chats can be encoded."""
        self.chat_template_origin = None if chat_template is None else chat_template.origin
        """The file that the chat template was read from."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        added = backend.get_added_tokens_decoder().items()
        self.special_tokens = SpecialTokens(
            SpecialToken(
                id=i, text=token.content, takes_left=token.lstrip, takes_right=token.rstrip
            )
            for i, token in added
            if token.special
        )
        # A model that has learned a chat's form ends its answers so, whatever its files contain.
        self.chat_end_ids = self._find_chat_end()
        self._special = frozenset(i for i, token in added if token.special)
        bytes_ = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._bytes = frozenset(i for i in bytes_ if i is not None)
        self.reserved_ids: frozenset[int] = frozenset(
            i for i, token in added if token.special and _RESERVED.search(token.content)
        )

    @classmethod
    def load(cls, directory: Path, *, threads: int = 2) -> Tokenizer:
        """Reads `tokenizer.json` of a checkpoint directory, and its chat template if it has one
        that can be used; raises `TokenizerError`."""
        backend = read_backend(directory)
        try:
            chat_template = ChatTemplate.load(directory)
        except ChatTemplateError as error:
            LOG.warning("%s has no chats: %s", directory, error)
            chat_template = None
        return cls(backend, chat_template, threads=threads)

    async def encode(self, text: str, *, parses_special: bool = False) -> list[int]:
        """The ids of a prompt. Special tokens that it spells are parsed if that is asked for;
        otherwise all come from `tokenizer.json`'s own template."""
        encode = self._encode_parsed if parses_special else self._encode
        if len(text) <= INLINE_BYTES:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, text)

    async def encode_chat(
        self, chat: Chat, *, most_bytes: int, parses_special: bool = False
    ) -> list[int]:
        """The ids of a chat, rendered by its template. Special tokens that the client's strings
        spell are parsed if that is asked for; otherwise all come from the template.

        Raises ChatTemplateError if the template refuses the chat, or renders more than `most_bytes`
        of UTF-8."""
        encode = partial(self._encode_chat, chat, most_bytes, parses_special)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that an answer of these ids would have: special tokens are left out."""

        def decode() -> str:
            return self.decode([one for one in token_ids if self.is_text(one)])

        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for text: known, and not special."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte of a run, which becomes text as a whole or not at
        all (the byte fallback of SentencePiece vocabularies)."""
        return token_id in self._bytes

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids that all are text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def close(self) -> None:
        """Ends the threads after their current texts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find_chat_end(self) -> frozenset[int]:
        """The special token that the chat template writes behind an answer, if there is one."""
        mark, told = chr(PRIVATE[0]), ""
        chat = Chat(Chat().user("").assistant(mark).messages, add_generation_prompt=False)
        if self._chat_template is not None:
            with contextlib.suppress(ChatTemplateError):  # it may ask for more than that
                told = self._chat_template.render(chat, mark=mark, most_bytes=1 << 20)
        behind = told.rpartition(mark)[2].lstrip() if mark in told else ""
        first = next(self.special_tokens.cut(behind), "")
        return frozenset() if isinstance(first, str) else frozenset({first.id})

    def _encode(self, text: str) -> list[int]:
        # `encode` keeps the interpreter lock, and with it the event loop, for as long as it takes.
        ids: list[int] = self._backend.encode_batch_fast([text])[0].ids
        return ids

    def _encode_parsed(self, text: str) -> list[int]:
        before, after = self._around
        return [*before, *self._encode_parts(self.special_tokens.cut(text)), *after]

    def _encode_chat(self, chat: Chat, most_bytes: int, parses_special: bool) -> list[int]:
        template = self._chat_template
        if template is None:
            raise ChatTemplateError("the model has no chat template")
        told = [*(one.fields() for one in chat.messages), chat.template_arguments]
        try:
            disguise = self.special_tokens.disguise([template.source, *strings_of(told)])
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        hide = (lambda value: value) if parses_special else disguise.hide
        text = template.render(chat, mark=disguise.mark, most_bytes=most_bytes, hide=hide)
        parts = self.special_tokens.cut(text)
        return self._encode_parts(
            disguise.show(part) if isinstance(part, str) else part for part in parts
        )

    def _encode_parts(self, parts: Iterable[str | SpecialToken]) -> list[int]:
        """Each text by itself, like the library when it parses special tokens: these end a word,
        and no merge reaches over them. (A vocabulary of SentencePiece's that puts a space before a
        prompt's first word puts one before each text; no served model has one.)"""
        parts = list(parts)
        texts = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for part in parts:
            ids += next(encoded).ids if isinstance(part, str) else [part.id]
        return ids

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that `tokenizer.json` has before a prompt and behind it."""
        known = chain("a", self._backend.get_vocab())  # a vocabulary may drop any letter
        for text in known:
            whole = self._backend.encode(text)
            own = [at for at, is_added in enumerate(whole.special_tokens_mask) if not is_added]
            if own:
                return whole.ids[: own[0]], whole.ids[own[-1] + 1 :]
        return [], []


async def encode_prompt(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    """The ids of the prompt. Raises `InvalidRequest` for one that the model's chat template does
    not take, and for reserved tokens where special tokens are parsed; `Unavailable` where
    tokenizer and model do not fit."""
    sent, parses_special = asked.sent, asked.sent.parse_special_tokens
    if parses_special:
        _check_special(asked, tokenizer)
    if sent.HasField("prompt"):
        ids = await tokenizer.encode(sent.prompt, parses_special=parses_special)
    elif asked.chat is not None:
        most_bytes = most_prompt_bytes(asked.model)
        try:
            ids = await tokenizer.encode_chat(
                asked.chat, most_bytes=most_bytes, parses_special=parses_special
            )
        except ChatTemplateError as error:
            why = f"the model's chat template refuses it: {shown(str(error), most=400)}"
            raise InvalidRequest.of("chat", why) from error
    else:
        return list(sent.prompt_token_ids.ids)
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
    if asked.sent.HasField("prompt"):
        yield "prompt", asked.sent.prompt
    if asked.chat is not None:
        for at, message in enumerate(asked.chat.messages):
            name = f"chat.messages[{at}].{'json' if message.json else 'content'}"
            for text in strings_of(message.fields()):
                yield name, text
        for text in strings_of(asked.chat.template_arguments):
            yield "chat.template_arguments_json", text


def bundled_directory() -> Path:
    """Where the bundled model's files are, found without importing anything of `models`."""
    spec = find_spec("effuse.models")
    assert spec is not None and spec.submodule_search_locations, (
        "the package is installed without its models"
    )
    return Path(spec.submodule_search_locations[0]) / "bundled"
