"""Which way is measured next, as values: who is due, in which order, and when again."""

from __future__ import annotations

import redis_server

from effuse.placement.records import MOST_LINKS, Link, WorkerRecord
from effuse.prefill_worker.rehearsals import FIRST_S, MOST_S, Links

OWN = redis_server.worker(worker_id="p0", role="prefill", incarnation="own-1")


def decode(name: str, life: str = "1", **changes: object) -> WorkerRecord:
    return redis_server.worker(worker_id=name, incarnation=life, **changes)


def link(peer: WorkerRecord, gbps: float) -> Link:
    return Link(peer.worker_id, peer.incarnation, "cuda_ipc", gbps * 1e9)


def links(jitter: float = 0.5, min_gbps: float = 0.0) -> Links:
    """Half is no jitter at all."""
    return Links(lambda: jitter, min_gbps)


def due(table: Links, now: float) -> set[str]:
    """Who is due, each failing."""
    found = set()
    while (peer := table.next(now)) is not None:
        assert peer.worker_id not in found
        found.add(peer.worker_id)
        table.failed(peer, now)
    return found


def test_decode_workers_that_fit_and_take_requests_are_due_at_once() -> None:
    table = links()
    other = decode("d1", fingerprint=(("weights", "else"),))
    table.follow(OWN, [OWN, decode("d0"), other, decode("d2", state="draining")], 5.0)
    assert due(table, 5.0) == {"d0"}


def test_each_life_is_measured_once() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    table.measured(peer, link(peer, 3.0), 0.0)
    table.follow(OWN, [peer], 1e6)
    assert table.next(1e6) is None
    assert table.known() == (link(peer, 3.0),)
    assert table.link_to(peer) == link(peer, 3.0)
    table.follow(OWN, [decode("d0", "2")], 1e6)
    assert table.known() == ()
    assert due(table, 1e6) == {"d0"}


def test_a_new_life_of_our_own_begins_anew() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    table.measured(peer, link(peer, 3.0), 0.0)
    table.follow(redis_server.worker(worker_id="p0", role="prefill", incarnation="2"), [peer], 1.0)
    assert table.known() == ()
    assert table.next(1.0) == peer


def test_failures_are_tried_again_ever_later_up_to_a_limit() -> None:
    table, peer, now = links(), decode("d0"), 0.0
    table.follow(OWN, [peer], now)
    pauses = []
    for _ in range(40):
        pause_s = table.failed(peer, now)
        assert table.next(now + 0.99 * pause_s) is None
        now += pause_s
        assert table.next(now) == peer
        pauses.append(pause_s)
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses[-1] == MOST_S


def test_jitter_parts_those_who_were_refused_together() -> None:
    pauses = []
    for jitter in (0.0, 0.999):
        table, peer = links(jitter), decode("d0")
        table.follow(OWN, [peer], 0.0)
        pauses.append(table.failed(peer, 0.0))
    assert pauses == [FIRST_S / 2, FIRST_S * 1.499]


def test_a_link_that_is_too_slow_is_known_and_measured_again() -> None:
    table, peer = links(min_gbps=2.0), decode("d0")
    table.follow(OWN, [peer], 0.0)
    table.measured(peer, link(peer, 1.9), 0.0)
    assert table.known() == (link(peer, 1.9),)
    assert table.next(FIRST_S) == peer
    table.measured(peer, link(peer, 2.0), FIRST_S)
    assert table.known() == (link(peer, 2.0),)
    assert table.next(1e6) is None


def test_who_is_gone_is_forgotten_even_while_it_is_measured() -> None:
    table, peer = links(), decode("d0")
    table.follow(OWN, [peer], 0.0)
    table.follow(OWN, [], 1.0)
    table.measured(peer, link(peer, 3.0), 1.0)
    assert table.failed(peer, 1.0) == 0.0
    assert (table.known(), table.next(1.0), table.link_to(peer)) == ((), None, None)


def test_workers_that_start_together_begin_with_different_peers() -> None:
    seen = [decode(f"d{i}") for i in range(8)]
    first = set()
    for own in range(16):
        table = links()
        table.follow(redis_server.worker(role="prefill", incarnation=f"own-{own}"), seen, 0.0)
        peer = table.next(0.0)
        assert peer is not None
        first.add(peer.worker_id)
    assert len(first) > 3


def test_no_more_are_followed_than_a_record_holds() -> None:
    table = links()
    table.follow(OWN, [decode(f"d{i:04}") for i in range(MOST_LINKS + 5)], 0.0)
    assert len(due(table, 0.0)) == MOST_LINKS
