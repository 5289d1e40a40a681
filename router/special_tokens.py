"""Special tokens of a tokenizer: text is cut at them, and those that a client spells are hidden.

Special tokens are structure to a model: the end of a message, the role of a speaker. So only the
checkpoint's template may add them, and those that a client spells stay text, unless it asks for
them to be parsed. Before a template gets a client's strings, the first character of every special
token that they spell is exchanged for a stand-in. The rendered text is cut at its special tokens,
which are the template's, and in the text between them the characters come back. Lengths and white
space stay the same, but a template that searches text for a special token does not find it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from effuse.router.chat_template import escapes_of, named_tokens, text_of

PRIVATE: Final = range(0xF0000, 0x110000)
"""Characters without a meaning, for stand-ins: Unicode's planes for private use."""
_ESCAPE: Final = re.compile(r"\\U00(?:0f|10)[0-9a-f]{4}|\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""Each escape of one of them; a match hides no other, because none begins within one."""


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

    @classmethod
    def of(cls, tokens: Mapping[int, AddedToken]) -> SpecialTokens:
        return cls(
            SpecialToken(id=i, text=one.content, takes_left=one.lstrip, takes_right=one.rstrip)
            for i, one in tokens.items()
        )

    @staticmethod
    def behind(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """For text behind one: a backend may put a space before the first word of a prompt only."""
        first, never = ('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        splits = backend.pre_tokenizer
        if splits is None or first.encode() not in splits.__getstate__():
            return backend
        copy = tokenizers.Tokenizer.from_str(backend.to_str().replace(first, never))
        copy.encode_special_tokens = backend.encode_special_tokens
        return copy

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
        spelled = {escape for text in strings for escape in _ESCAPE.findall(text)}
        firsts = sorted({text[0] for text in self._by_text})
        free = (
            mark
            for mark in map(chr, PRIVATE)
            if mark not in used and spelled.isdisjoint(escapes_of(mark))
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


def complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens that only tokenizer_config.json has, like transformers: those with an id, and
    then special ones. Raises ValueError for an id that does not follow on, and AttributeError,
    KeyError or TypeError for fields of another form."""
    known = {one.content for one in backend.get_added_tokens_decoder().values()}
    listed = (config.get("added_tokens_decoder") or {}).items()
    new = {int(i): AddedToken(**one) for i, one in listed if one["content"] not in known}
    backend.add_tokens([new[i] for i in sorted(new)])
    for i, token in new.items():
        if (found := backend.token_to_id(token.content)) != i:
            what = f"expected id {found} for {token.content!r}"
            raise ValueError(f"{what}, which tokenizer.json does not have, got {i}")
    groups = (config.get(name) for name in ("extra_special_tokens", "additional_special_tokens"))
    more = [text_of(one) for group in groups if isinstance(group, list) for one in group]
    texts = dict.fromkeys([*named_tokens(config).values(), *filter(None, more)])
    known.update(token.content for token in new.values())
    backend.add_special_tokens([text for text in texts if text not in known])


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
