"""Stop strings: the outcome must not depend on where the text was cut into pieces."""

from __future__ import annotations

import random

import pytest

from effuse.router.stop import StopMatcher


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
