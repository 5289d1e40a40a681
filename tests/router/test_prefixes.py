"""Prompts go to the worker that knows most of them: a router's memory, and its use."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace
from router.fake_model import ids_of, model_info, worker_record
from router.fakes import FakeFleet, FakeStore, run

from effuse.placement.records import KEY_BYTES, MOST_HOLDERS, Load
from effuse.router.policy import AttemptNeeds, Candidate, InFlight, Placement, place
from effuse.router.prefixes import (
    EXCHANGE_S,
    MOST_TOGETHER,
    MOST_UNIT,
    REBUILD_S,
    REFRESH_S,
    REFUTED_S,
    RETRY_S,
    UNIT,
    KnownPrefix,
    SentPrefixes,
    SharedPrefixes,
    key_of_whole,
    keys_of,
)
from effuse.v1 import generation_pb2 as pb

PROMPT = list(range(3, 3 + 4 * UNIT))
P0, P1 = ("p0", "one"), ("p1", "two")


def test_a_prompt_has_a_key_for_each_whole_unit_that_says_all_up_to_its_end() -> None:
    keys = keys_of(PROMPT[:-1], "acme")
    assert len(keys) == 3
    assert keys_of(PROMPT[: 2 * UNIT], "acme") == keys[:2]
    assert keys_of([9, *PROMPT[1:]], "acme")[2] != keys[2]
    assert not set(keys_of(PROMPT, "")) & set(keys)
    assert keys_of(PROMPT[: UNIT - 1], "") == ()
    for number in range(4):
        assert keys_of(PROMPT[number * UNIT : -1], "acme", keys[:number]) == keys


def test_each_worker_has_as_much_as_was_sent_to_it_from_the_beginning() -> None:
    sent, keys = SentPrefixes(float), keys_of(PROMPT, "")
    assert sent.cached(keys) == {}
    sent.note(keys[:3], [P0])
    sent.note(keys[:1], [P1])
    assert sent.cached(keys) == {P0: 3 * UNIT, P1: UNIT}
    others = keys_of([*PROMPT[: 2 * UNIT], *PROMPT[:UNIT]], "")
    assert sent.cached(others) == {P0: 2 * UNIT, P1: UNIT}
    assert sent.cached(keys_of(PROMPT, "acme")) == {}


def test_what_was_sent_longest_ago_is_forgotten_from_its_end() -> None:
    sent, first = SentPrefixes(float, most=6), keys_of(PROMPT, "")
    second = keys_of(PROMPT[::-1], "")
    sent.note(first, [P0])
    sent.note(second, [P0])
    assert sent.cached(second) == {P0: 4 * UNIT}
    assert sent.cached(first) == {P0: 2 * UNIT}


def test_lives_of_workers_that_are_over_do_not_add_up() -> None:
    sent, keys = SentPrefixes(float), keys_of(PROMPT, "")
    for number in range(200):
        sent.note(keys, [("p0", str(number))])
    known = sent.cached(keys)
    assert len(known) == MOST_HOLDERS and known["p0", "199"] == 4 * UNIT


def candidates(queued: int, *, keeps: bool = True) -> list[Candidate]:
    """Two prefill workers, of which the first has so many tokens queued, and a decode worker."""
    load = Load(prefix_queries=int(keeps))
    return [
        Candidate(
            worker_record("p0", "prefill", load=load),
            InFlight(prompts=1, to_prefill=queued, placed=9),
        ),
        Candidate(worker_record("p1", "prefill", load=load), InFlight()),
        Candidate(worker_record("d0", "decode"), InFlight()),
    ]


def chosen(found: Placement | None) -> str:
    assert found is not None and found.prefill is not None
    return found.prefill.worker_id


def test_a_known_beginning_makes_up_for_as_many_tokens_that_wait() -> None:
    known = candidates(0)[0].record.life
    need = AttemptNeeds(model="fake", mode="remote", cached={known: 100})
    assert chosen(place(candidates(0), need)) == "p0"
    assert chosen(place(candidates(99), need)) == "p0"
    assert chosen(place(candidates(101), need)) == "p1"
    assert chosen(place(candidates(99, keeps=False), need)) == "p1", "it keeps nothing"
    assert chosen(place(candidates(99), AttemptNeeds(model="fake", mode="remote"))) == "p1"


def test_a_known_beginning_makes_up_for_as_many_pages_in_use() -> None:
    def decoder(name: str, used: int, keeps: int = 1) -> Candidate:
        load = Load(total_pages=100, free_pages=100 - used, prefix_queries=keeps)
        return Candidate(worker_record(name, "decode", load=load), InFlight())

    def writes(used: int, keeps: int = 1) -> str:
        workers = [decoder("d0", used, keeps), decoder("d1", 0)]
        need = AttemptNeeds(model="fake", mode="local", cached={workers[0].record.life: 10 * page})
        found = place(workers, need)
        assert found is not None
        return found.decode.worker_id

    page = decoder("d0", 0).record.capacity.page_size
    assert (writes(0), writes(9), writes(11)) == ("d0", "d0", "d1")
    assert writes(9, keeps=0) == "d1", "it keeps nothing"


def keep_prefixes(fleet: FakeFleet, attention: str = "causal_blocks") -> None:
    """Its workers do so, before they are announced."""
    model = replace(model_info(), prompt_attention=attention, max_model_len=1024)
    for worker in fleet.workers:
        load = replace(worker.record.load, prefix_queries=1)
        worker.record = replace(worker.record, model=model, load=load)


def test_prompts_that_begin_alike_go_to_one_worker_and_others_in_turns() -> None:
    async def body(fleet: FakeFleet) -> None:
        async def ask(text: str) -> str:
            answer = await fleet.generation.Generate(pb.GenerateRequest(prompt=text), timeout=30)
            return answer.stats.prefill_worker

        keep_prefixes(fleet)
        await fleet.announce()
        long = "how many? " * 20
        first = await ask(long)
        assert {await ask(f"{long} and {number}?") for number in range(4)} == {first}
        assert {await ask(f"{number} {long}") for number in range(12)} == {"p0", "p1"}

    run(body, num_prefill=2)


@pytest.mark.parametrize(
    ("attention", "length"),
    [("causal_blocks", UNIT), ("causal_blocks", UNIT // 2), ("bidirectional", UNIT)],
)
def test_a_decode_worker_takes_the_next_turn_of_a_chat(attention: str, length: int) -> None:
    """Only it has the KV of the answer before, which a bidirectional prompt cannot reuse."""

    async def body(fleet: FakeFleet) -> None:
        keep_prefixes(fleet, attention)
        begun, answer = "a" * length, "b" * UNIT
        fleet.decode[0].answer = ids_of(answer)
        await fleet.announce()
        workers, is_causal = [], attention == "causal_blocks"
        for prompt in (begun, begun + "c" * UNIT, begun + answer + "d"):
            asked = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=ids_of(prompt)))
            asked.stopping.max_tokens = UNIT
            got = await fleet.generation.Generate(asked, timeout=30)
            assert got.text == answer
            workers.append(got.stats.prefill_worker)
        assert workers == ["p0", "p0", "" if is_causal else "p0"]
        keys = keys_of(ids_of(begun + answer + "d" + answer), "")
        latest = (*reversed(fleet.router.fleet.prompts._notes),)[: len(keys)]
        assert not is_causal or latest == keys, "the end is forgotten first"

    run(body)


@pytest.mark.parametrize("length", [UNIT // 2, UNIT + 9])
def test_a_bidirectional_prompt_is_known_only_as_a_whole(length: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        keep_prefixes(fleet, "bidirectional")
        first, known = fleet.prefill[0], []
        for text, queued in (("a" * length, 0), ("a" * length + "b", 0), ("a" * length, length)):
            load = replace(first.record.load, queued_tokens=queued)
            first.record = replace(first.record, load=load)
            await fleet.announce()
            got = await fleet.generation.Generate(pb.GenerateRequest(prompt=text), timeout=30)
            known.append(fleet.metric("effuse_prefix_known_tokens_total", source="own"))
        assert known == [0, 0, got.usage.prompt_tokens]
        assert got.stats.prefill_worker == "p0", "fewer tokens wait there than it knows"

    run(body, num_prefill=2)


@pytest.mark.parametrize("length", [UNIT // 2, 2000])
def test_a_whole_prompt_counts_with_all_its_tokens_or_with_none(length: int) -> None:
    sent, keys = SentPrefixes(Clock()), key_of_whole(range(length), "")
    sent.note(keys, [P0], is_over=True)
    claim = sent.claim(keys, P0, length)
    for found, known in ((length, length), (0, 0)):
        sent.check(claim, P0, found)
        assert sent.cached(keys, length) == {P0: known}
        assert sent.claim(keys, P0, length).own == known


def test_a_router_learns_from_an_answer_that_a_prompt_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fakes report 2 tokens."""

    async def body(fleet: FakeFleet) -> None:
        known, asked = fleet.router.fleet.prompts, pb.GenerateRequest(prompt="how many? " * 66)
        keep_prefixes(fleet)
        await fleet.announce()
        for later_s, refuted in ((0.0, 0), (1.0, 0), (2 * REFUTED_S, 1)):
            monkeypatch.setattr(known, "_now", lambda later_s=later_s: time.monotonic() + later_s)
            await fleet.generation.Generate(asked, timeout=30)
            assert known.num_refuted == refuted

    run(body)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Index:
    """Routers' notes over one store, exchanged when a test says so."""

    def __init__(self) -> None:
        self.clock, self.store, self.routers = Clock(), FakeStore(), list[SharedPrefixes]()

    def router(self, name: str) -> SentPrefixes:
        sent = SentPrefixes(self.clock)
        self.routers.append(SharedPrefixes(self.store, name, sent, self.clock))
        return sent

    def exchange(self, rounds: int = 2) -> None:
        """All of them, one after the other."""

        async def go() -> None:
            for one in self.routers * rounds:
                await one.catch_up()

        asyncio.run(go())


def test_routers_share_notes_and_a_new_one_reads_them_all() -> None:
    index, keys = Index(), keys_of(PROMPT, "acme")
    first, second = index.router("a"), index.router("b")
    for at in range(1, 5):  # more than one answer of the store has
        first.note(keys[:at], [P0])
        index.exchange()
    second.note(keys[:2], [P1])
    index.exchange()
    known = {P0: 4 * UNIT, P1: 2 * UNIT}
    assert first.cached(keys) == second.cached(keys) == known
    third = index.router("c")
    index.exchange(1)
    assert third.cached(keys) == known
    assert third.cached(keys_of(PROMPT, "")) == {}, "another tenant's"
    assert third.claim(keys, P1)[:2] == (0, 2 * UNIT)
    assert first.claim(keys, P0)[:2] == (4 * UNIT, 0)


def test_notes_that_are_young_are_not_written_again() -> None:
    index, keys = Index(), keys_of(PROMPT, "")
    first, second = index.router("a"), index.router("b")
    for sent in (first, second, first):
        sent.note(keys, [P0])
        index.exchange()
    assert len(index.store.prefixes) == 1
    index.clock.now += REFRESH_S + 1
    second.note(keys, [P0])
    index.exchange()
    assert len(index.store.prefixes) == 2
    assert first.claim(keys, P0)[:2] == (0, 4 * UNIT)


def test_after_a_flush_routers_write_all_that_is_missing_once() -> None:
    index, keys = Index(), keys_of(PROMPT, "")
    first, second = index.router("a"), index.router("b")
    first.note(keys, [P0])
    index.exchange()
    del index.routers[0]  # the router that sent them has ended
    second.note(keys, [P1])
    third = index.router("c")
    third.note(others := keys_of(PROMPT[::-1], ""), [P1])
    index.exchange()
    index.store.prefix_epoch = b""
    index.exchange()
    assert [router for router, _ in index.store.prefixes] == ["b"]
    index.clock.now += REBUILD_S
    index.exchange()
    assert [router for router, _ in index.store.prefixes] == ["b"], "it knew all of them"
    index.store.prefix_epoch, index.routers = b"", index.routers[::-1]
    third.note(more := keys_of(PROMPT[1:], ""), [P0])
    index.exchange()
    fourth = index.router("d")
    index.exchange()
    for prompt, known in ((keys, {P0, P1}), (others, {P1}), (more, {P0})):
        assert fourth.cached(prompt).keys() == known


def test_while_redis_does_not_answer_a_router_has_its_own_notes_and_shares_them_later() -> None:
    index, keys = Index(), keys_of(PROMPT, "")
    first, second = index.router("a"), index.router("b")
    index.exchange()
    index.store.is_down = True
    first.note(keys[:2], [P0])
    index.exchange()
    first.note(keys, [P1])
    index.exchange()
    assert (first.cached(keys), second.cached(keys)) == ({P0: 128, P1: 256}, {})
    assert index.routers[0].num_failures == 4 and index.routers[0].pause_s == RETRY_S
    index.store.is_down = False
    index.exchange()
    assert second.cached(keys) == {P0: 128, P1: 256}
    assert index.routers[0].pause_s == EXCHANGE_S


def test_a_large_memory_is_written_in_parts_and_stays_bounded() -> None:
    index = Index()
    first, second = index.router("a"), index.router("b")
    for number in range(0, 3 * MOST_TOGETHER, 4):
        first.note(keys_of([*PROMPT[:-1], number], ""), [P0])
    assert first.num_unshared == len(first) == 3 + 3 * MOST_TOGETHER // 4
    index.exchange()
    assert len(index.store.prefixes) == 1 and len(second) == len(first)
    small = SentPrefixes(index.clock, most=7)
    for number in range(100):
        small.note(keys_of([*PROMPT[:-1], number], ""), [P0])
    assert len(small) == small.num_unshared == 7
    assert sum(len(one.keys) for one in small.take_unshared().groups) == 7 * KEY_BYTES


def test_notes_that_no_router_wrote_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    index, keys = Index(), keys_of(PROMPT, "")
    sent = index.router("a")
    index.exchange()
    short = b'{"groups":[["YWJj",[["p0","one",1]]]]}'
    for value in (b"\xff", b"{}", short, b'{"groups":[["",[["p0","one",-1]]]]}'):
        index.store.prefixes.append(("b", value))
    sent.note(keys, [P0])
    index.exchange(3)
    assert len(sent) == 4 and "expected 16 bytes each, got 3" in caplog.text


def long(first: int) -> tuple[bytes, ...]:
    return keys_of([first] * 12 * UNIT, "")


def test_a_worker_that_had_dropped_a_prompt_has_dropped_older_ones_too() -> None:
    clock = Clock()
    sent, known = SentPrefixes(clock), 12 * UNIT
    old, middle, new = map(long, range(3))
    for keys in (old, middle, new):
        sent.note(keys, [P0, P1])
        clock.now += 50
    young = sent.claim(new, P0)
    sent.check(young, P0, found=0)
    assert sent.cached(old) == {P0: known, P1: known}, "it may still be computed"
    claim = sent.claim(middle, P0)
    sent.check(claim, P0, found=known - MOST_UNIT)
    assert sent.num_refuted == 0, "a worker's units may be larger"
    sent.note(middle, [P0])
    sent.check(claim, P0, found=UNIT)
    assert sent.num_refuted == 1
    assert sent.cached(old) == {P0: 0, P1: known} and sent.claim(old, P0) == KnownPrefix()
    assert sent.cached(middle) == sent.cached(new) == {P0: known, P1: known}
    sent.note(old, [P0])
    assert sent.cached(old)[P0] == known, "it was computed again"


def test_what_an_ended_request_left_is_refuted_at_once_and_so_is_what_is_as_old() -> None:
    """Until then a decode worker would compute whole prompts that it has dropped."""
    clock = Clock()
    sent, known = SentPrefixes(clock), 12 * UNIT
    first, second, third = map(long, range(3))
    sent.note(first[:2], [P0])
    sent.note(first, [P0], is_over=True)
    clock.now += 10
    sent.note(second, [P0], is_over=True)
    clock.now += 10
    claim = sent.claim(first, P0)
    clock.now += 5  # the worker looks later
    sent.check(claim, P0, found=UNIT)
    assert sent.num_refuted == 1 and sent.cached(first) == {P0: 0}
    sent.note(first, [P0])
    assert sent.cached(first) == {P0: known}, "it was computed again"
    assert sent.cached(second) == {P0: known}, "it is younger"
    clock.now += 5
    assert sent.cached(second) == {P0: 0}
    sent.note(third, [P0], is_over=True)
    clock.now += 19
    assert sent.cached(third) == {P0: known}
    clock.now += 60
    sent.note(third, [P0], is_over=True)
    clock.now += 50
    assert sent.cached(third) == {P0: known}, "the worker may keep more by now"
