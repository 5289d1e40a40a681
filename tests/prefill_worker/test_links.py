"""The next link to rehearse, and the rates of links, as values."""

from __future__ import annotations

import logging

import pytest
import redis_server

from effuse.placement.records import MOST_LINKS, Link, Load, WorkerRecord
from effuse.prefill_worker.links import (
    AGAIN_S,
    AGREEING,
    COLD_FIRST_S,
    COLD_MOST_S,
    FIRST_S,
    MOST_AGAIN_S,
    MOST_S,
    WINDOW_S,
    Links,
    LinkState,
    line_of,
)

OWN = redis_server.worker(worker_id="p0", role="prefill", incarnation="own-1")
LARGE = 64 << 20


def decode(name: str, life: str = "1", **changes: object) -> WorkerRecord:
    return redis_server.worker(worker_id=name, incarnation=life, **changes)


def links(jitter: float = 0.5, min_gbps: float = 0.0) -> Links:
    """Half is no jitter at all."""
    return Links(lambda: jitter, min_gbps)


def due(table: Links, now: float) -> set[str]:
    """The due links, each of which fails."""
    found = set()
    while (link := table.next(now)) is not None:
        assert link.peer.worker_id not in found
        found.add(link.peer.worker_id)
        link.failed(now)
    return found


def state(table: Links, peer: WorkerRecord) -> LinkState:
    return table._links[peer.worker_id]


def chosen(table: Links, now: float, **how: bool) -> WorkerRecord | None:
    link = table.next(now, **how)
    return None if link is None else link.peer


def measured(table: Links, peer: WorkerRecord, gbps: float, now: float) -> None:
    state(table, peer).measured("cuda_ipc", gbps * 1e9, LARGE, now)


def rates(table: Links, now: float) -> list[float]:
    return [link.gigabytes_per_second for link in table.known(now)]


def test_decode_workers_that_fit_and_take_requests_are_due_at_once() -> None:
    table = links()
    other = decode("d1", fingerprint=(("weights", "else"),))
    table.follow(OWN, [OWN, decode("d0"), other, decode("d2", state="draining")], 5.0)
    assert due(table, 5.0) == {"d0"}


def test_links_to_workers_that_may_ever_decode_are_warm_before_they_do() -> None:
    table = links()
    own = redis_server.worker(
        worker_id="b0", role="both", may_change_role=True, incarnation="own-1"
    )
    fixed = decode("p1", role="prefill")
    changes = decode("b1", role="prefill", may_change_role=True)
    table.follow(own, [own, fixed, changes, decode("b2", role="both", may_change_role=True)], 5.0)
    assert due(table, 5.0) == {"b1", "b2"}


def test_a_link_is_known_once_it_is_warm_and_only_for_that_life() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    assert table.known(0.0) == ()
    state(table, peer).warmed("cuda_ipc", 2e9, 0.0)
    assert rates(table, 0.0) == [2.0]
    assert chosen(table, 0.0) == peer, "it has not been measured"
    table.follow(OWN, [decode("d0", "2")], 1.0)
    assert table.known(1.0) == ()
    assert due(table, 1.0) == {"d0"}


def test_a_new_life_of_our_own_begins_anew() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    measured(table, peer, 3.0, 0.0)
    table.follow(redis_server.worker(worker_id="p0", role="prefill", incarnation="2"), [peer], 1.0)
    assert table.known(1.0) == ()
    assert chosen(table, 1.0) == peer


@pytest.mark.parametrize(
    ("is_warm", "first_s", "most_s"), [(False, COLD_FIRST_S, COLD_MOST_S), (True, FIRST_S, MOST_S)]
)
def test_failures_are_tried_again_ever_later_up_to_a_limit(
    is_warm: bool, first_s: float, most_s: float
) -> None:
    table, peer, now = links(), decode("d0"), 0.0
    table.follow(OWN, [peer], now)
    if is_warm:
        state(table, peer).warmed("cuda_ipc", 1e9, now)
    pauses = []
    for _ in range(40):
        pause_s = state(table, peer).failed(now)
        assert chosen(table, now + 0.99 * pause_s) is None
        now += pause_s
        assert chosen(table, now) == peer
        pauses.append(pause_s)
    assert pauses[:3] == pytest.approx([first_s, 2 * first_s, 4 * first_s])
    assert pauses[-1] == pytest.approx(most_s)


def test_jitter_parts_those_who_were_refused_together() -> None:
    pauses = []
    for jitter in (0.0, 0.999):
        table, peer = links(jitter), decode("d0")
        table.follow(OWN, [peer], 0.0)
        pauses.append(state(table, peer).failed(0.0))
    assert pauses == pytest.approx([COLD_FIRST_S / 2, COLD_FIRST_S * 1.499])


def test_a_good_link_is_measured_again_ever_later() -> None:
    table, peer, now, pauses = links(), decode("d0"), 0.0, []
    table.follow(OWN, [peer], now)
    for _ in range(9):
        measured(table, peer, 3.0, now)
        pause_s = next(s for s in range(1, 10**6) if chosen(table, now + s) is not None)
        pauses.append(pause_s)
        now += pause_s
    assert pauses[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert pauses[-1] == MOST_AGAIN_S


@pytest.mark.parametrize("load", [Load(running=1), Load(waiting=1)])
def test_a_good_link_is_measured_only_while_both_ends_are_idle(load: Load) -> None:
    table, peer, later = links(), decode("d0"), 2 * AGAIN_S
    table.follow(OWN, [peer], 0.0)
    measured(table, peer, 3.0, 0.0)
    assert chosen(table, later, may_measure=False) is None
    table.follow(OWN, [decode("d0", load=load)], later)
    assert chosen(table, later) is None
    table.follow(OWN, [peer], later)
    assert chosen(table, later) == peer


def test_cold_links_are_warmed_up_first_and_however_busy_the_ends_are() -> None:
    table, warm, cold = links(), decode("d0"), decode("d1", load=Load(running=3, waiting=2))
    table.follow(OWN, [warm], 0.0)
    state(table, warm).warmed("cuda_ipc", 1e9, 0.0)
    table.follow(OWN, [warm, cold], 1.0)
    assert chosen(table, 1.0, may_measure=False) == cold
    assert chosen(table, 1.0) == cold
    state(table, cold).is_under_way = True
    assert chosen(table, 1.0, only_cold=True) is None
    assert chosen(table, 1.0) == warm
    state(table, cold).is_under_way = False
    assert chosen(table, 1.0, only_cold=True) == cold


def test_one_bad_measurement_refuses_nothing_and_several_that_agree_do() -> None:
    table, peer, now = links(min_gbps=2.0), decode("d0"), 0.0
    table.follow(OWN, [peer], now)
    for _ in range(AGREEING - 1):
        measured(table, peer, 0.5, now)
        assert state(table, peer).news(now) is None
        assert table.known(now) == (), "nothing is said of it yet"
        assert chosen(table, now + FIRST_S) == peer, "soon, as nothing is decided"
        now += FIRST_S
    measured(table, peer, 0.6, now)
    link = state(table, peer).news(now)
    assert link is not None
    assert link.gigabytes_per_second == 0.6
    assert state(table, peer).news(now) is None
    busy = decode("d0", load=Load(running=1))
    table.follow(OWN, [busy], now + MOST_S)
    assert chosen(table, now + MOST_S, may_measure=False) == busy, "a refused link is tried again"
    measured(table, busy, 2.0, now + MOST_S)
    good = state(table, busy).news(now + MOST_S)
    assert good is not None
    assert good.gigabytes_per_second == 2.0


def test_a_good_link_survives_bad_moments_until_all_that_is_recent_agrees() -> None:
    table, peer = links(min_gbps=2.0), decode("d0")
    table.follow(OWN, [peer], 0.0)
    measured(table, peer, 3.0, 0.0)
    for at in (1.0, 2.0, 3.0, 4.0):
        measured(table, peer, 0.5, at)
        assert rates(table, at) == [3.0]
    measured(table, peer, 0.7, WINDOW_S + 1)
    assert rates(table, WINDOW_S + 1) == [0.7]


def test_the_last_measurements_count_however_old_they_are() -> None:
    found = LinkState(decode("d0"), 0.0)
    found.measured("tcp", 3.0, 1, 0.0)
    found.measured("tcp", 1.0, 1, 1.0)
    assert found.best(1e9) == 3.0
    for at in range(AGREEING):
        found.measured("tcp", 0.5, 1, 1e9 + at)
    assert found.best(1e9 + AGREEING) == 0.5


def test_prompts_correct_a_rate_upwards_alone() -> None:
    table, peer = links(), decode("d0", "life")
    table.follow(OWN, [peer], 0.0)
    measured(table, peer, 1.0, 0.0)
    table.proven("life", LARGE, LARGE / 4e9, 1.0)
    assert rates(table, 1.0) == pytest.approx([4.0])
    table.proven("life", LARGE, LARGE / 2e9, 2.0)
    table.proven("another", LARGE, LARGE / 9e9, 2.0)
    table.proven("life", LARGE // 4, LARGE / 90e9, 2.0)  # too few bytes
    table.proven("life", LARGE, 0.0, 2.0)
    assert rates(table, 2.0) == pytest.approx([4.0])
    assert rates(table, WINDOW_S + 2) == [1.0]


def test_who_is_gone_is_forgotten_even_while_it_is_measured() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    link = table.next(0.0)
    assert link is not None
    table.follow(OWN, [], 1.0)
    link.warmed("cuda_ipc", 1e9, 1.0)
    link.measured("cuda_ipc", 3e9, LARGE, 1.0)
    link.failed(1.0)
    assert (table.known(1.0), table.next(1.0)) == ((), None)


def test_workers_that_start_together_begin_with_different_peers() -> None:
    seen = [decode(f"d{i}") for i in range(8)]
    first = set()
    for own in range(16):
        table = links()
        table.follow(redis_server.worker(role="prefill", incarnation=f"own-{own}"), seen, 0.0)
        peer = chosen(table, 0.0)
        assert peer is not None
        first.add(peer.worker_id)
    assert len(first) > 3


def test_no_more_are_followed_than_a_record_holds() -> None:
    table = links()
    table.follow(OWN, [decode(f"d{i:04}") for i in range(MOST_LINKS + 5)], 0.0)
    assert len(due(table, 0.0)) == MOST_LINKS


def test_prefill_workers_of_a_large_fleet_follow_different_workers() -> None:
    """And one that is followed no longer has not ended."""
    peers = [decode(f"d{i:04}") for i in range(MOST_LINKS + 500)]
    followed = set[str]()
    for own in range(6):
        table, worker = links(), redis_server.worker(worker_id=f"p{own}", role="prefill")
        table.follow(worker, peers[1:], 0.0)
        assert table.follow(worker, peers, 0.0) == []
        chosen_now = due(table, 0.0)
        assert len(chosen_now) == MOST_LINKS
        followed |= chosen_now
    assert len(followed) == len(peers)


def test_a_life_that_is_over_is_named_once() -> None:
    """Its engine has ended: another life is there, none is, or the next one is not ready yet."""
    table = links()
    peers = [decode("d0"), decode("d1", "2"), decode("d2", "3")]
    assert table.follow(OWN, peers, 0.0) == []
    seen = [decode("d0", "9"), decode("d2", "3", state="starting")]
    assert {one.incarnation for one in table.follow(OWN, seen, 1.0)} == {"1", "2", "3"}
    assert table.follow(OWN, seen, 2.0) == []


@pytest.mark.parametrize(
    ("gbps", "is_fallback", "level", "text"),
    [
        (0.0, False, logging.INFO, "handoff p0 to d0: cuda_ipc, 213.4 GB/s"),
        (0.0, True, logging.WARNING, "SLOW, because pages of GPUs go over TCP or through the host"),
        (500.0, False, logging.WARNING, "REFUSED, because --min-handoff-gbps is 500"),
        (500.0, True, logging.WARNING, "REFUSED, because --min-handoff-gbps is 500"),
    ],
)
def test_the_line_of_a_link(gbps: float, is_fallback: bool, level: int, text: str) -> None:
    link = Link("d0", "1", "cuda_ipc", 213.4e9)
    found, line = line_of("p0", link, gbps, is_fallback=is_fallback)
    assert found == level
    assert line.startswith("handoff p0 to d0: cuda_ipc, 213.4 GB/s")
    assert text in line
