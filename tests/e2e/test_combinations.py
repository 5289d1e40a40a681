"""`e2e.combinations` draws pairs of settings that the commands accept, and finds wrong tokens."""

from __future__ import annotations

import itertools
import random

import pytest
from e2e import combinations
from e2e.combinations import SETTINGS, Combination, is_accepted, main, pairs_of

PLAIN = {name: next(iter(choices)) for name, choices in SETTINGS.items()}


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"pages move": "encrypted"}, True),
        ({"attention": "flex"}, True),
        ({"attention": "flex", "layout": "distinct"}, False),
        ({"decode stages": "2"}, True),
        ({"decode stages": "2", "decode heads": "2", "decode context": "2"}, False),
        ({"workers": "1D", "prefill heads": "2"}, False),
        ({"work": "LLaDA's loops", "prefill by": "remote"}, False),
        ({"workers": "1D", "prefill by": "remote"}, False),
        ({"work": "Fast-dLLM v2's loop", "forwards": "of few tokens"}, True),
        ({"work": "sdar", "forwards": "of few tokens", "workers": "2 of both"}, False),
        (
            {"work": "Fast-dLLM v2's loop", "forwards": "of few tokens", "workers": "2 of both"},
            False,
        ),
    ],
)
def test_what_the_commands_refuse_is_in_no_combination(
    changes: Combination, accepted: bool
) -> None:
    assert is_accepted(PLAIN | changes) is accepted


def test_each_combination_has_a_new_pair_until_all_accepted_pairs_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = ("attention", "layout", "page", "workers")
    plain = {name: dict([next(iter(choices.items()))]) for name, choices in SETTINGS.items()}
    monkeypatch.setattr(combinations, "SETTINGS", plain | {name: SETTINGS[name] for name in few})
    covered: set[combinations.Pair] = set()
    for one in combinations.combinations(random.Random(1)):
        assert is_accepted(one) and pairs_of(one) - covered
        covered |= pairs_of(one)
    for (a, x), (b, y) in itertools.combinations(((n, c) for n in few for c in SETTINGS[n]), 2):
        refused = {(a, x), (b, y)} == {("attention", "flex"), ("layout", "distinct")}
        assert a == b or refused or {(a, x, b, y), (b, y, a, x)} & covered


@pytest.mark.parametrize(("num_wrong", "status"), [(0, 0), (1, 1)])
def test_a_wrong_token_is_found(
    num_wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(combinations, "combinations", lambda _: iter([PLAIN]))
    monkeypatch.setattr(combinations, "differing", lambda _: (num_wrong, 100))
    assert main([]) == status
    assert f"100 tokens; {num_wrong} fleets were wrong or failed" in capsys.readouterr().out
