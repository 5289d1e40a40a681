"""Streaming text: the pieces together are the decoding of all ids, for any cut, and so is the place
at which a stop string ends it.
"""

from __future__ import annotations

import random

import pytest
import tokenizers
from router.fake_model import ANSWER, EOS, MASK, PAD, VOCAB_SIZE, byte_tokenizer, ids_of
from tokenizers import decoders
from tokenizers.models import BPE

from effuse.router.client import draft_text
from effuse.router.tokenizer import LONG_WINDOW, AnswerText, Detokenizer, StopMatcher, Tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Llama's kind: words with a leading mark, bytes as <0xNN>, the first space dropped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁cat", "s", "▁▁"]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


BACKENDS = {"byte level": byte_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_pieces_are_the_whole_for_random_ids_and_cuts(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)
    draw = random.Random(1)
    words = [ids_of(word) for word in (" three", "é", "🙂", "日本", " ", "x")]
    size = backend.get_vocab_size()
    for _ in range(1000):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 12)):
            whole = backend is BACKENDS["byte level"] and draw.random() < 0.6
            ids += draw.choice(words) if whole else [draw.randrange(size + 2)]
        cuts = sorted(draw.randrange(len(ids) + 1) for _ in range(draw.randrange(6)))
        assert "".join(pieces(tokenizer, ids, cuts)) == backend.decode(
            ids, skip_special_tokens=True
        )


def test_a_character_comes_whole() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = ids_of("a🙂b")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([one]) for one in ids] == ["a", "", "", "", "🙂", "b"]


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids_of("a🙂")[:3]) == "a"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_characters_are_told_and_cost_no_more_the_more_there_are() -> None:
    """A client may have an answer of nothing else, by a bias."""
    backend = byte_tokenizer()
    tokenizer, draw = Tokenizer(backend), random.Random(2)
    sound = ids_of("🙂日é")
    starts = [sound[:length] for length in (1, 2, 3)] + [sound[1:3], sound[4:6], sound[7:8]]
    for begin in [*starts, None]:
        detokenizer, text, ids, longest = Detokenizer(tokenizer), "", [], 0
        for _ in range(400):
            piece = draw.choice(starts) if begin is None else begin
            ids += piece
            text += detokenizer.push(piece)
            longest = max(longest, len(detokenizer._window))
        whole = backend.decode(ids)
        assert len(whole) - len(text) <= 3
        assert text + detokenizer.flush() == whole
        assert longest < 3 * LONG_WINDOW


def test_special_and_unknown_ids_make_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    detokenizer = Detokenizer(tokenizer)
    ids = [PAD, *ids_of("a"), EOS, VOCAB_SIZE + 7, *ids_of("b"), ANSWER]
    assert detokenizer.push(ids) == "ab"


def test_the_first_space_is_dropped_once_only() -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer())
    vocabulary = byte_fallback_tokenizer().get_vocab()
    cat, a, s = (vocabulary[word] for word in ("▁cat", "▁a", "s"))
    found = pieces(tokenizer, [a, cat, s, a, cat], [1, 2, 3, 4])
    assert found == ["a", " cat", "s", " a", " cat", ""]


def test_bytes_wait_for_what_follows_where_one_bad_byte_spoils_the_run() -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer())
    good, bad = [0xC8 + 1, 0xBC + 1], 0xFF + 1
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(good) == ""
    assert detokenizer.push([bad]) == ""
    assert detokenizer.flush() == 3 * "\N{REPLACEMENT CHARACTER}"


def test_drafts_show_masks_between_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    x, y = ids_of("xy")
    text = draft_text(tokenizer, [x, MASK, MASK, y, EOS], [False, True, True, False, False])
    assert text == "x░░y"


def test_an_answer_counts_the_tokens_up_to_its_stop_string() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = ids_of("abc. def")
    for size in (1, 2, 3, len(ids)):
        answer, text = AnswerText(tokenizer, ["c."]), ""
        for at in range(0, len(ids), size):
            text += answer.push(ids[at : at + size])
        assert (text + answer.flush(), answer.num_tokens, answer.is_stopped) == ("ab", 4, True)


def test_stop_strings_are_looked_for_behind_the_least_length() -> None:
    for size in (1, 3, 9):
        ids, text = ids_of("a.b.c.d.e"), ""
        answer = AnswerText(Tokenizer(byte_tokenizer()), [".", "b.c"], 4)
        for at in range(0, len(ids), size):
            text += answer.push(ids[at : at + size])
        assert (text + answer.flush(), answer.matched_stop, answer.num_tokens) == ("a.b.c", ".", 6)


def test_what_is_held_back_of_the_least_length_is_no_stop_string() -> None:
    """Bytes wait for the next word, and a character for its last byte."""
    newline, a = 0x0A + 1, byte_fallback_tokenizer().get_vocab()["▁a"]
    hello = [byte + 1 for byte in "你".encode()]
    cases: list[tuple[str, list[int], str, str | None, int]] = [
        ("byte fallback", [newline, newline, a, newline, newline, a], "\n\n a", "\n\n", 2),
        ("byte fallback", [newline, newline], "\n\n", None, 2),
        ("byte fallback", [newline, newline, newline, newline, a], "\n\n", "\n\n", 2),
        *(("byte fallback", [*hello, a, newline, newline], "你 a", "\n\n", n) for n in range(5)),
        ("byte fallback", [*hello, newline, newline, a], "你", "\n\n", 2),
        ("byte level", ids_of("🙂x🙂x"), "🙂x", "🙂", 2),
    ]
    for name, ids, kept, matched, least in cases:
        for size in (1, 2, len(ids)):
            stops = ["🙂" if name == "byte level" else "\n\n"]
            answer, text = AnswerText(Tokenizer(BACKENDS[name]), stops, least), ""
            for at in range(0, len(ids), size):
                text += answer.push(ids[at : at + size])
            assert (text + answer.flush(), answer.matched_stop) == (kept, matched)


def test_a_run_of_bytes_is_looked_at_once() -> None:
    """It waits as a whole, and a client may have an answer of nothing else."""
    looks = 0

    class Counting(Tokenizer):
        def is_byte(self, token_id: int) -> bool:
            nonlocal looks
            looks += 1
            return super().is_byte(token_id)

    detokenizer, run = Detokenizer(Counting(byte_fallback_tokenizer())), [0x41 + 1] * 1000
    assert "".join(detokenizer.push([one]) for one in run) == ""
    assert detokenizer.flush() == 1000 * "A"
    assert looks <= 2 * len(run)


def test_an_answer_without_its_stop_string_is_whole() -> None:
    answer = AnswerText(Tokenizer(byte_tokenizer()), ["xyz"])
    assert answer.push(ids_of("end x")) == "end "
    assert answer.flush() == "x"
    assert (answer.num_tokens, answer.is_stopped) == (5, False)


def follow(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("text", "stops", "kept", "matched"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("abcdef", ["abcdef", "cd"], "ab", "cd"),
        ("xabcx", ["c", "abc"], "x", "abc"),
        ("aaab", ["aab"], "a", "aab"),
        ("two", ["two"], "", "two"),
        ("on", ["one"], "on", None),
        ("ananas", ["nas", "an"], "", "an"),
        ("été\n\nfin", ["\n\n"], "été", "\n\n"),
    ],
)
def test_cut_at_every_place(text: str, stops: list[str], kept: str, matched: str | None) -> None:
    assert follow([text], stops) == (kept, matched)
    assert follow(list(text), stops) == (kept, matched)
    for cut in range(len(text)):
        assert follow([text[:cut], text[cut:]], stops) == (kept, matched)


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else() -> None:
    matcher = StopMatcher(["###", "end"])
    assert matcher.push("text #") == "text "
    assert matcher.push("#") == ""
    assert matcher.push("e") == "##"
    assert matcher.push("x") == "ex"
    assert matcher.push("y") == "y"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a. b") == "a"
    assert matcher.push("c") == ""
    assert matcher.flush() == ""


def test_pieces_never_matter() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 14)))
        lengths = (draw.randrange(1, 5), draw.randrange(1, 5))
        stops = ["".join(draw.choice("ab") for _ in range(length)) for length in lengths]
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert follow(pieces, stops) == follow([text], stops)
        kept, matched = follow([text], stops)
        if matched is None:
            assert kept == text
            assert not any(stop in text for stop in stops)
        else:
            assert text.startswith(kept + matched)
