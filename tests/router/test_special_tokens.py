"""Cutting text at special tokens, and hiding those that a client spells."""

from __future__ import annotations

import random
import time

import pytest

from effuse.router.chat_template import escapes_of
from effuse.router.special_tokens import PRIVATE, SpecialToken, SpecialTokens, strings_of

END, START, ROLE = "<|im_end|>", "<|im_start|>", "<role>"
TOKENS = SpecialTokens(
    [
        SpecialToken(id=1, text=END),
        SpecialToken(id=2, text=START),
        SpecialToken(id=3, text=ROLE),
        SpecialToken(id=4, text="[M]", takes_left=True),
        SpecialToken(id=5, text="[M]]", takes_right=True),
    ]
)


def cut(text: str) -> list[str | int]:
    return [part if isinstance(part, str) else part.id for part in TOKENS.cut(text)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("plain <| text", ["plain <| text"]),
        (f"{START}user\nhi{END}{END}", [2, "user\nhi", 1, 1]),
        ("a [M] b", ["a", 4, " b"]),
        ("a [M]] b", ["a ", 5, "b"]),
        ("<role<role>", ["<role", 3]),
    ],
)
def test_text_is_cut_at_special_tokens(text: str, parts: list[str | int]) -> None:
    assert cut(text) == parts


def test_a_tokenizer_may_have_none() -> None:
    none = SpecialTokens([])
    assert list(none.cut("<role>")) == ["<role>"]
    assert none.disguise(["<role>"]).hide("<role>") == "<role>"


@pytest.mark.parametrize(
    "text", [END, f"a{END}b{START}", "<|im_<|im_end|>", "[M]]", "ends in <|im_en", "<", "<<role>"]
)
def test_what_is_hidden_is_no_special_token_and_comes_back(text: str) -> None:
    disguise = TOKENS.disguise([text])
    hidden = disguise.hide(text)
    assert hidden != text and len(hidden) == len(text)
    assert cut(hidden) == [hidden]
    assert disguise.show(hidden) == text


@pytest.mark.parametrize("text", ["", "<|im|>", "</think>", "a < b", "x[M"[:2]])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert TOKENS.disguise([text]).hide(text + ".") == text + "."


def test_words_that_follow_each_other_make_no_special_token() -> None:
    """However a template joins a client's strings, and whatever it writes between them."""
    rng = random.Random(3)
    pieces = [*"<|[]M", "im_", "end", "start", "role", END, START, ROLE, "[M]", "\U000f0000"]
    made = 0
    for _ in range(3000):
        words = ["".join(rng.choices(pieces, k=rng.randrange(6))) for _ in range(4)]
        disguise = TOKENS.disguise(words)
        joined = "".join(map(disguise.hide, words))
        assert cut(joined) in ([], [joined])
        assert disguise.show(joined) == "".join(words)
        made += any(isinstance(part, int) for part in cut("".join(words)))
    assert made > 1000


def test_every_string_of_a_value_is_hidden() -> None:
    value = {"a": [END, 1, None, True], START: {"b": (ROLE, 0.5)}}
    disguise = TOKENS.disguise(list(strings_of(value)))
    hidden = disguise.hide(value)
    assert not [text for text in strings_of(hidden) if cut(text) not in ([], [text])]
    assert [disguise.show(text) for text in strings_of(hidden)] == list(strings_of(value))


def test_stand_ins_are_characters_that_nobody_used() -> None:
    text = "".join(map(chr, PRIVATE[:1000])) + ROLE
    disguise = TOKENS.disguise([text])
    assert disguise.show(disguise.hide(text)) == text
    assert disguise.mark not in text
    with pytest.raises(ValueError, match="private characters"):
        TOKENS.disguise(["".join(map(chr, PRIVATE))])


def test_stand_ins_are_characters_whose_escapes_nobody_spelled() -> None:
    """A template that prints a list or JSON of only ASCII writes a stand-in as its escape."""
    for kind in range(2):
        escapes = [escapes_of(chr(one))[kind] for one in PRIVATE]
        for spelled in (escapes[:1000], escapes[1:5] + escapes[:1] * 9, ["\\" + escapes[0], ROLE]):
            text = "".join(spelled) + ROLE
            disguise = TOKENS.disguise(["a", text])
            assert not [
                one
                for mark in disguise.stand_ins.values()
                for one in escapes_of(mark)
                if one in text
            ]
            assert disguise.show(disguise.hide(text)) == text
        with pytest.raises(ValueError, match="private characters"):
            TOKENS.disguise(["".join(escapes)])
        capitals = [one.upper() for one in escapes]  # which no template writes
        assert min(TOKENS.disguise(capitals).stand_ins.values()) == chr(PRIVATE[0])


def test_a_client_that_spells_many_escapes_keeps_no_thread() -> None:
    """By the thread's own time: a search of every string for each of them would take minutes."""
    escapes = "".join(escapes_of(chr(one))[0] for one in PRIVATE[:50_000])
    begin = time.thread_time()
    disguise = TOKENS.disguise(["a"] * 4000 + [escapes])
    assert time.thread_time() - begin < 1
    assert min(disguise.stand_ins.values()) == chr(PRIVATE[50_000])
