"""Requests under which engines die: every short history of deaths, and the fate of others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from msgspec.structs import replace
from router.fake_model import model_info

from effuse.placement.records import Role
from effuse.router import poison
from effuse.router.poison import (
    HELD_S,
    MOST_KEPT,
    REFUSED_S,
    EngineDeath,
    Treatment,
    Verdicts,
    treatment,
)
from effuse.router.request import digest_of
from effuse.router.validation import validate
from effuse.v1 import generation_pb2 as pb


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def died(
    number: int,
    role: Role = "decode",
    tokens: int = 0,
    alone: bool = False,
    may_be_outside: bool = False,
) -> EngineDeath:
    return EngineDeath((f"{role}-{number}", "life"), role, tokens, alone, may_be_outside)


def refuse(verdicts: Verdicts, digest: str, first: int = 0, may_be_outside: bool = False) -> None:
    """Three engines die of it."""
    for number in range(2):
        verdicts.add_death(digest, died(first + number, may_be_outside=may_be_outside))
    last = died(first + 2, alone=True, may_be_outside=may_be_outside)
    assert verdicts.add_death(digest, last) is Treatment.REFUSED


# One request.


@pytest.mark.parametrize("history", [h for n in range(6) for h in product((False, True), repeat=n)])
def test_every_history_of_deaths(history: tuple[bool, ...]) -> None:
    """Each marked as separate or not. A refusal takes two deaths and a separate one after these."""
    deaths = [died(number, alone=alone) for number, alone in enumerate(history)]
    found = treatment(deaths)
    if len(history) < 2:
        assert found is Treatment.SHARED
    elif True in history[2:]:
        assert found is Treatment.REFUSED
    else:
        assert found is Treatment.ALONE


@pytest.mark.parametrize("outside_counts", [1.0, 0.5])
@pytest.mark.parametrize("length", range(7))
def test_what_may_be_from_outside_counts_as_it_is_said_to(
    length: int, outside_counts: float
) -> None:
    """In halves: four make a request run separately, two more separate ones refuse it."""
    for history in product((False, True), repeat=2 * length):
        alone, killed = history[:length], history[length:]
        halves = [int(2 * outside_counts) if one else 2 for one in killed]
        own = sum(halves[at] for at in range(length) if alone[at] and sum(halves[:at]) >= 4)
        found = treatment(
            [died(at, alone=alone[at], may_be_outside=killed[at]) for at in range(length)],
            outside_counts,
        )
        if own >= 2:
            assert found is Treatment.REFUSED, history
        else:
            is_alone = sum(halves) >= 4
            assert found is (Treatment.ALONE if is_alone else Treatment.SHARED), history


@pytest.mark.parametrize("roles", list(product(("prefill", "decode"), repeat=2)))
def test_it_is_alone_where_it_decodes_and_where_it_was_prefilled_as_engines_died(
    roles: tuple[Role, Role],
) -> None:
    deaths = [died(number, role) for number, role in enumerate(roles)]
    verdicts = Verdicts(Clock())
    found = [verdicts.add_death("x", death) and verdicts.kinds_alone("x") for death in deaths]
    assert found[0] == frozenset() and found[-1] == {"decode", *roles}


EVENTS = ("shared", "alone", "again", "answered", "goes on", "time")


@pytest.mark.parametrize("length", range(6))
def test_every_short_story_ends_as_a_plain_count_says(length: int) -> None:
    for story in product(EVENTS, repeat=length):
        clock, count, is_refused, engine = Clock(), 0, False, 0
        verdicts = Verdicts(clock)
        for event in story:
            if is_refused:
                break
            match event:
                case "shared" | "alone":
                    engine += 1
                    count += 1
                    is_refused = event == "alone" and count > 2
                    verdicts.add_death("x", died(engine, alone=event == "alone"))
                case "again":  # reported twice for the same engine, by a copy of the request
                    if count:
                        verdicts.add_death("x", died(engine))
                case "answered":
                    verdicts.clear("x")
                    count = 0
                case "goes on":
                    assert verdicts.add_survival("x", 1)
                    count = 0
                case "time":
                    clock.now += HELD_S
                    count = 0
        assert (verdicts.refused_s("x") == REFUSED_S) is is_refused, story
        is_alone = count >= 2 and not is_refused
        assert bool(verdicts.kinds_alone("x")) is is_alone, story


def test_only_what_it_had_not_written_before_clears_it() -> None:
    verdicts = Verdicts(Clock())
    verdicts.add_death("x", died(0, tokens=8))
    verdicts.add_death("x", died(1, tokens=4))
    assert not verdicts.add_survival("x", 8)
    assert verdicts.kinds_alone("x")
    assert verdicts.add_survival("x", 9)
    assert not verdicts.kinds_alone("x")


def test_a_refusal_ends() -> None:
    clock = Clock()
    verdicts = Verdicts(clock)
    refuse(verdicts, "x")
    clock.now = REFUSED_S - 1
    assert (verdicts.refused_s("x"), verdicts.refused()) == (1, {"x": 1})
    clock.now = REFUSED_S
    assert (verdicts.refused_s("x"), verdicts.refused()) == (0, {})
    assert not verdicts.kinds_alone("x"), "what it did is forgotten with it"


# Others.


def test_who_was_beside_the_cause_is_cleared() -> None:
    verdicts = Verdicts(Clock())
    for number in (0, 1):
        verdicts.add_death("beside", died(number))
        verdicts.add_death("elsewhere too", died(number))
    for number in (7, 8):
        verdicts.add_death("elsewhere too", died(number))
    refuse(verdicts, "cause")
    assert not verdicts.kinds_alone("beside")
    assert verdicts.kinds_alone("elsewhere too"), "two of its engines died of something else"
    assert not verdicts.refused_s("beside") and not verdicts.refused_s("elsewhere too")


class TestKilledEngines:
    """Numbers are killed engines, and the requests in them."""

    def killed(self, verdicts: Verdicts, digest: str, *numbers: int) -> None:
        for number in numbers:
            verdicts.add_death(digest, died(number, may_be_outside=True))

    def is_alone(self, verdicts: Verdicts, digest: str) -> bool:
        return bool(verdicts.kinds_alone(digest))

    def test_count_in_full_where_no_other_is_killed(self) -> None:
        verdicts = Verdicts(Clock())
        self.killed(verdicts, "beside", 0, 1)
        refuse(verdicts, "cause", may_be_outside=True)
        assert not self.is_alone(verdicts, "beside")

    def test_count_half_as_soon_as_one_is_killed_without_the_request(self) -> None:
        verdicts = Verdicts(Clock())
        self.killed(verdicts, "x", 0, 1)
        assert self.is_alone(verdicts, "x")
        self.killed(verdicts, "beside", 1, 2)
        assert not self.is_alone(verdicts, "x") and not self.is_alone(verdicts, "beside")
        self.killed(verdicts, "x", 3)
        assert not self.is_alone(verdicts, "x")
        self.killed(verdicts, "x", 4)
        assert self.is_alone(verdicts, "x"), "four, all the same"

    def test_that_died_by_themselves_are_nobodys_kills(self) -> None:
        verdicts = Verdicts(Clock())
        verdicts.add_death("another", died(9))
        refuse(verdicts, "cause", may_be_outside=True)

    def test_are_remembered_after_who_was_in_them_has_been_answered(self) -> None:
        clock = Clock()
        verdicts = Verdicts(clock)
        self.killed(verdicts, "answered", 9)
        verdicts.clear("answered")
        clock.now = HELD_S - 1
        self.killed(verdicts, "x", 0, 1)
        assert not self.is_alone(verdicts, "x")
        clock.now = HELD_S
        assert self.is_alone(verdicts, "x"), "that was long ago"

    def test_by_a_request_that_is_refused_excuse_no_other(self) -> None:
        verdicts = Verdicts(Clock())
        self.killed(verdicts, "beside", 0, 1)
        refuse(verdicts, "cause", may_be_outside=True)
        refuse(verdicts, "another", first=3, may_be_outside=True)

    def test_are_kept_in_a_bounded_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poison, "MOST_KEPT", 3)
        verdicts = Verdicts(Clock())
        self.killed(verdicts, "answered", 9)
        self.killed(verdicts, "x", 0, 1)
        assert not self.is_alone(verdicts, "x")
        self.killed(verdicts, "x", 2)
        assert self.is_alone(verdicts, "x"), "the oldest is forgotten"


def test_other_routers_are_believed_and_prolong_nothing() -> None:
    clock = Clock()
    verdicts = Verdicts(clock)
    refuse(verdicts, "ours")
    clock.now = 100.0
    verdicts.merge({"ours": REFUSED_S, "theirs": 5.0, "absurd": 1e9})
    assert verdicts.refused() == {"ours": REFUSED_S - 100, "theirs": 5.0, "absurd": REFUSED_S}
    clock.now = 105.0
    verdicts.merge({"theirs": 2.0})
    assert verdicts.refused_s("theirs") == 2.0


def test_nothing_is_held_once_it_is_over() -> None:
    clock = Clock()
    verdicts = Verdicts(clock)
    assert verdicts.is_empty
    verdicts.add_death("a", died(0))
    verdicts.note_outside(("outside", "1"))
    verdicts.merge({"b": REFUSED_S})
    clock.now += max(HELD_S, REFUSED_S) - 1
    assert verdicts.refused().keys() == {"b"} and not verdicts.is_empty
    clock.now += 2
    assert not verdicts.refused() and verdicts.is_empty and not verdicts._outside_until


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MOST_KEPT", 3)
    assert MOST_KEPT > 3
    verdicts = Verdicts(Clock())
    for number in range(5):
        refuse(verdicts, f"refused {number}", first=3 * number)
    assert list(verdicts.refused()) == ["refused 2", "refused 3", "refused 4"]
    for number in range(5):
        verdicts.add_death(f"suspect {number}", died(100 + 2 * number))
        verdicts.add_death(f"suspect {number}", died(101 + 2 * number))
    suspects = [n for n in range(5) if verdicts.kinds_alone(f"suspect {n}")]
    assert suspects == [2, 3, 4]


# Its request.


def test_the_digest_is_of_what_an_engine_is_asked() -> None:
    def digest(prompt: tuple[int, ...] = (1, 2), most: int = 8, **fields: object) -> str:
        message = pb.GenerateRequest(prompt="any", **fields)  # type: ignore[arg-type]
        return digest_of(validate(message, model_info(), is_stream=True), prompt, most)

    same = digest()
    assert len(same) == 32
    drawn = validate(pb.GenerateRequest(prompt="any"), model_info(), is_stream=True).seeded(7)
    assert (drawn.sampling.seed, digest_of(drawn, (1, 2), 8)) == (7, same)
    assert digest(request_id="another", output=pb.OutputOptions(token_ids=True)) == same
    others = [
        digest((2, 1)),
        digest(most=9),
        digest(sampling=pb.SamplingParams(seed=1)),
        digest(decoding=pb.DecodingParams(window=2)),
        digest(stopping=pb.StoppingParams(stop_token_ids=[5])),
        digest(stopping=pb.StoppingParams(min_tokens=1)),
        digest(sampling=pb.SamplingParams(logit_bias={5: 1})),
        digest(output=pb.OutputOptions(logprobs=0)),
    ]
    assert len({same, *others}) == 9
    asked = validate(pb.GenerateRequest(prompt="any"), model_info(), is_stream=True)
    elsewhere = replace(asked, model=model_info("another"))
    assert digest_of(elsewhere, (1, 2), 8) != digest_of(asked, (1, 2), 8)


# Requests that need not wait for a worker of their own.


def test_a_request_whose_engines_were_ended_from_outside_may_share_again() -> None:
    verdicts = Verdicts(Clock())
    for number in range(4):
        verdicts.add_death("mine", died(number, may_be_outside=True))
        verdicts.add_death("another", died(10 + number, may_be_outside=True))
    assert verdicts.kinds_alone("mine") and verdicts.may_share("mine")
    verdicts.add_death("mine", died(4, may_be_outside=True))
    assert not verdicts.may_share("mine"), "one more, and it has to run alone"


@pytest.mark.parametrize("may_be_outside", [True, False])
def test_a_request_may_not_that_engines_die_of(may_be_outside: bool) -> None:
    """If no other engine is killed, or if one ended by itself."""
    verdicts = Verdicts(Clock())
    if not may_be_outside:
        for number in range(3):
            verdicts.add_death("another", died(10 + number, may_be_outside=True))
    for number in range(2):
        verdicts.add_death("mine", died(number, may_be_outside=may_be_outside))
    assert verdicts.kinds_alone("mine") and not verdicts.may_share("mine")


def test_an_engine_that_a_signal_stopped_is_proof_of_others_from_outside() -> None:
    verdicts = Verdicts(Clock())
    verdicts.add_death("mine", died(0, may_be_outside=True))
    verdicts.note_outside(("decode-1", "life"))
    assert verdicts.add_death("mine", died(2, may_be_outside=True)) is Treatment.SHARED


def test_a_killed_engine_counts_nothing_once_the_request_came_further_elsewhere() -> None:
    killed = [died(number, tokens=8 * number, may_be_outside=True) for number in range(9)]
    assert treatment(killed) is Treatment.SHARED
    assert treatment([*killed, died(9, tokens=64, may_be_outside=True)]) is Treatment.ALONE
    crashed = [died(number, tokens=8 * number) for number in range(2)]
    assert treatment(crashed) is Treatment.ALONE, "by itself each counts"
