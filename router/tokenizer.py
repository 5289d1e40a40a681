"""Text and chats to ids, and ids to text, with only the `tokenizers` library, in threads if it is
long.

Special tokens come from the checkpoint's template only (`special_tokens.py`), and the parts that
`tokenizer.json` puts around a prompt are added. The text of an answer comes piece by piece, cut
exactly at the stop string that ends it; the pieces together equal the text of all ids decoded at
once. Not here: the template's rendering (`chat_template.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

import tokenizers

from effuse.client.chat import Chat
from effuse.config.extras import pointer_problem
from effuse.router.chat_template import ChatTemplate, ChatTemplateError, read_config
from effuse.router.few_at_once import FewAtOnce
from effuse.router.special_tokens import PRIVATE, SpecialToken, SpecialTokens, complete, strings_of

LOG: Final = logging.getLogger(__name__)

FILE: Final = "tokenizer.json"
INLINE_BYTES: Final = 512
"""Text up to this size is encoded on the spot: about 0.2 ms at worst, as much as two switches of
thread cost on a busy machine."""
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES: Final = 4
"""Of one character in UTF-8: so many may still become another one, less one."""
LONG_WINDOW: Final = 64
"""Ids after which a window is cut although its text has no end: it is decoded at each piece."""
_RESERVED: Final = re.compile(r"pad|mask|unk|reserved", re.IGNORECASE)
_MASK: Final = re.compile(r"[^\w\s]+(\w+_)?mask[^\w\s]+", re.IGNORECASE)


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
        self.turns = FewAtOnce(max(1, threads - 1))
        """For calls that want no answer: they leave a thread to requests, which hold seats."""
        # A mask is structure even if its file does not flag it: text that spells it stays text.
        added = backend.get_added_tokens_decoder().values()
        backend.add_special_tokens([one for one in added if _MASK.fullmatch(one.content)])
        special = {i: one for i, one in backend.get_added_tokens_decoder().items() if one.special}
        self.special_tokens = SpecialTokens.of(special)
        self._behind = self.special_tokens.behind(backend)
        # A model that has learned a chat's form ends its answers so, whatever its files contain.
        self.chat_end_ids = self._find_chat_end()
        self._special = frozenset(special)
        self.byte_of = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        self.byte_of.pop(None, None)
        self.reserved_ids: frozenset[int] = frozenset(
            i for i, one in special.items() if _RESERVED.search(one.content)
        )

    @classmethod
    def load(cls, directory: Path, *, threads: int = 2) -> Tokenizer:
        """Reads `tokenizer.json` of a checkpoint directory, and its chat template if it has one
        that can be used; raises `TokenizerError`."""
        backend = read_backend(directory)
        try:
            complete(backend, read_config(directory))
            chat_template = ChatTemplate.load(directory)
        except ChatTemplateError as error:
            LOG.warning("%s has no chats: %s", directory, error)
            chat_template = None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{directory / 'tokenizer_config.json'}: {error}") from error
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
        def decode() -> str:
            return self.decode([one for one in token_ids if self.is_text(one)])

        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for text: known, and not special."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte of a run, which becomes text as a whole or not at
        all (the byte fallback of SentencePiece vocabularies)."""
        return token_id in self.byte_of

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids that all are text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find_chat_end(self) -> frozenset[int]:
        """The special token that the chat template writes behind an answer, if there is one."""
        mark, text = chr(PRIVATE[0]), ""
        chat = Chat(Chat().user("").assistant(mark).messages, add_generation_prompt=False)
        if self._chat_template is not None:
            with contextlib.suppress(ChatTemplateError):  # it may ask for more than that
                text = self._chat_template.render(chat, mark=mark, most_bytes=1 << 20)
        behind = text.rpartition(mark)[2].lstrip() if mark in text else ""
        first = next(self.special_tokens.cut(behind), "")
        return frozenset() if isinstance(first, str) else frozenset({first.id})

    def _encode(self, text: str) -> list[int]:
        # `encode` keeps the interpreter lock, and with it the event loop, for as long as it takes.
        return list(self._backend.encode_batch_fast([text])[0].ids)

    def _encode_parsed(self, text: str) -> list[int]:
        before, after = self._around
        return [*before, *self._encode_parts(self.special_tokens.cut(text)), *after]

    def _encode_chat(self, chat: Chat, most_bytes: int, parses_special: bool) -> list[int]:
        template = self._chat_template
        if template is None:
            raise ChatTemplateError("the model has no chat template")
        values = [*(one.fields() for one in chat.messages), chat.template_arguments]
        try:
            disguise = self.special_tokens.disguise([template.source, *strings_of(values)])
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
        and no merge reaches over them."""
        parts, ids = list(parts), list[int]()
        runs = (self._backend, parts[:1]), (self._behind, parts[1:])
        texts = ((by, [one for one in run if isinstance(one, str)]) for by, run in runs)
        batches = (by.encode_batch_fast(some, add_special_tokens=False) for by, some in texts)
        encoded = chain.from_iterable(batches)
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


def bundled_directory() -> Path:
    """Where the bundled model's files are, found without importing anything of `models`."""
    spec = find_spec("effuse.models")
    assert spec is not None and spec.submodule_search_locations, (
        "the package is installed without its models"
    )
    return Path(spec.submodule_search_locations[0]) / "bundled"


class Detokenizer:
    """Follows one answer. Ids that may still become another character are held back.

    Decoders look at neighbours (bytes join to characters, some drop the first space). So each piece
    is decoded with the ids of the piece before it, whose text is then taken off again."""

    def __init__(self, decoder: Tokenizer) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # ids of the last complete piece, then those since
        self._settled = 0  # how many of them belong to that piece
        self._open: list[int] = []  # single bytes at the end, not yet in the window
        self._shown = 0  # characters of the window's text that were returned
        self._most_window = LONG_WINDOW

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete."""
        num_bytes = len(self._open)  # those that are open are bytes
        self._open += [i for i in token_ids if self._decoder.is_text(i)]
        keep = len(self._open)
        while keep > num_bytes and self._decoder.is_byte(self._open[keep - 1]):
            keep -= 1
        return self._complete_text(keep) if keep > num_bytes else ""

    def flush(self) -> str:
        """The ids are over: returns the text that was held back, unchanged."""
        piece = self.held_back()
        self._window += self._open
        self._open = []
        self._shown += len(piece)
        return piece

    def held_back(self) -> str:
        """What would be returned if the ids were over."""
        if not self._open and len(self._window) == self._settled:
            return ""  # the last piece was complete
        return self._decoder.decode(self._window + self._open)[self._shown :]

    def num_begun(self) -> int:
        """Characters that the ids have begun and that are still to come."""
        run = bytes(self._decoder.byte_of[one] for one in self._open)
        return len(run.decode(errors="replace") or self.held_back())

    def _complete_text(self, num_ids: int) -> str:
        """Moves the first open ids into the window and returns the text that they complete."""
        self._window += self._open[:num_ids]
        del self._open[:num_ids]
        text = self._decoder.decode(self._window)
        num_open = len(text) - len(text.rstrip(REPLACEMENT))
        end = len(text) - min(num_open, MOST_BYTES - 1)
        piece = text[self._shown : end]
        if not num_open:
            self._slide_window(text)
            return piece
        self._shown = max(self._shown, end)
        if len(self._window) >= self._most_window:
            self._cut_window(text)
        return piece

    def _cut_window(self, text: str) -> None:
        """Drops the front of a window of bytes that are no characters, at a place where its text is
        that of both parts; bytes that follow change neither that nor what was shown."""
        self._most_window = 2 * len(self._window)  # if there is no such place
        last = len(self._window) - 2 * MOST_BYTES
        for cut in range(last, last - MOST_BYTES, -1):
            front = self._decoder.decode(self._window[:cut])
            whole = front + self._decoder.decode(self._window[cut:])
            if whole == text and len(front) <= self._shown:
                self._window, self._settled = self._window[cut:], 0
                self._shown -= len(front)
                self._most_window = LONG_WINDOW
                return

    def _slide_window(self, text: str) -> None:
        """All of the window's text is returned: what came since the last complete piece is the
        context of the next."""
        if self._settled:
            self._window = self._window[self._settled :]
            text = self._decoder.decode(self._window)
        self._settled = len(self._window)
        self._shown = len(text)


class StopMatcher:
    """Finds stop strings in a stream of text, across its pieces; holds back what is undecided.

    Of several that occur, the one that is complete first ends the answer, and of those that are
    complete at the same place the longest; so the outcome does not depend on how the text was cut
    into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text that is certain to be part of the answer.

        After a match (`matched` is set) nothing more is part of it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        # The longest end of the text that begins a stop string is undecided.
        keep = max((_overlap_length(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: returns the part that was held back."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer as it grows: characters complete, stop strings found, tokens counted.

    `num_tokens` counts up to and with the token that completed a stop string. Stop strings are
    looked for in what follows the first `min_tokens` tokens."""

    def __init__(self, decoder: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._min_tokens = min_tokens
        self._num_free = 0  # characters of these tokens that are still to come
        self._stops = StopMatcher(stops)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self.matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is decided by them.

        Once stopped, the rest of `token_ids` is not counted and adds nothing."""
        if not self._stops.stops:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for token_id in token_ids:
            # One at a time, so that it is known which token completed the string.
            if self.is_stopped:
                break
            self.num_tokens += 1
            piece = self._detokenizer.push([token_id])
            is_free = self.num_tokens <= self._min_tokens
            text += piece if is_free else self._look_for_stops(piece)
            if self.num_tokens == self._min_tokens:
                self._num_free = self._detokenizer.num_begun()
        return text

    def flush(self) -> str:
        """The answer is over: returns the text that was held back; may find a stop string yet."""
        if self.is_stopped:
            return ""
        return self._look_for_stops(self._detokenizer.flush()) + self._stops.flush()

    def _look_for_stops(self, text: str) -> str:
        """Passes on the characters in which no stop string may begin, and searches the rest."""
        free, rest = text[: self._num_free], text[self._num_free :]
        self._num_free -= len(free)
        return free + self._stops.push(rest)


def _overlap_length(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
