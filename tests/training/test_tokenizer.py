"""The bundled tokenizer: exact round trips, digits, special tokens, and the shipped file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import effuse.models
from effuse.problems.problem import problem
from effuse.training.tokenizer import (
    ANSWER_ID,
    EOS_ID,
    MASK_ID,
    PAD_ID,
    PROMPT_ID,
    SPECIALS,
    build_tokenizer,
    load_tokenizer,
)

BUNDLED = Path(effuse.models.__path__[0]) / "bundled" / "tokenizer.json"

TEXTS = (
    "",
    " ",
    "  two  spaces \n\n tab\t end ",
    "Mia has 1234 apples, 5 pears: 3 + 4 = 7.",
    "3+4=7 and 3 +4= 7, 12 ,13",
    "Grüße, Żółw, 日本語, العربية, ½ ١٢٣",
    "🙂👩‍👩‍👧 e\u0301 \u200b \x00 \x7f",
    "carriage\r\nreturn",
    "it's a café's <|mask|> and <|eos|><|answer|>",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BUNDLED)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_problems_round_trip_within_the_promised_length(tokenizer: Tokenizer) -> None:
    for index in range(500):
        drawn = problem(3, index, "train")
        for text in (drawn.prompt, drawn.answer):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert len(ids) <= 160


def test_each_digit_is_one_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("9876", add_special_tokens=False).tokens
    assert tokens == ["9", "8", "7", "6"]
    assert len(tokenizer.encode("12 + 30 = 42", add_special_tokens=False).ids) == 8


def test_words_of_problems_are_single_tokens(tokenizer: Tokenizer) -> None:
    drawn = [problem(4, index).prompt for index in range(300)]
    pieces = " ".join(drawn).split()
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in drawn)
    assert tokens < 2 * len(pieces)
    assert tokenizer.token_to_id("Ġmarbles") is not None


def test_template_marks_prompt_and_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Copy the list a, b.").ids
    assert (ids[0], ids[-1]) == (PROMPT_ID, ANSWER_ID)
    assert not {PAD_ID, EOS_ID, MASK_ID}.intersection(ids)


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == list(range(5))
    assert tuple(range(5)) == (PAD_ID, EOS_ID, MASK_ID, PROMPT_ID, ANSWER_ID)
    config = json.loads(BUNDLED.with_name("config.json").read_text())
    assert config["mask_token_id"] == MASK_ID
    assert config["eos_token_id"] == EOS_ID
    assert config["vocab_size"] >= tokenizer.get_vocab_size()


@pytest.mark.parametrize("special", SPECIALS)
def test_text_that_spells_a_special_token_is_plain_text(tokenizer: Tokenizer, special: str) -> None:
    ids = tokenizer.encode(f"a {special} b", add_special_tokens=False).ids
    assert not set(range(5)).intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"a {special} b"


def test_shipped_file_is_what_the_code_builds(tokenizer: Tokenizer) -> None:
    assert build_tokenizer(sample_size=6_000).get_vocab() == tokenizer.get_vocab()
