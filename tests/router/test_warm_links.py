"""Links that are cold take no prompt, hold up no other pair, and are waited for at the start."""

from __future__ import annotations

import msgspec
import redis_server

from effuse.placement.records import Link, WorkerRecord
from effuse.router.fleet import live_workers
from effuse.router.policy import (
    AttemptNeeds,
    Candidate,
    InFlight,
    PrefillMode,
    Prospect,
    place,
    prospect,
    why_refused,
)
from effuse.router.process import WARM_S, ReadyWorkers, cold_lives

MODEL = redis_server.worker().model.name


def prefill(name: str, *warm: WorkerRecord, warms: bool = True) -> WorkerRecord:
    links = tuple(Link(one.worker_id, one.incarnation, "cuda_ipc", 1e9) for one in warm)
    return redis_server.worker(worker_id=name, role="prefill", links=links, warms_links=warms)


def decode(name: str, **changes: object) -> WorkerRecord:
    return redis_server.worker(worker_id=name, role="decode", **changes)


def seen(*records: WorkerRecord) -> list[Candidate]:
    return [Candidate(record=record, in_flight=InFlight()) for record in records]


def need(mode: PrefillMode) -> AttemptNeeds:
    return AttemptNeeds(model=MODEL, mode=mode)


D0, D1 = decode("d0"), decode("d1")
OTHER = decode("d2", fingerprint=(("weights", "else"),))


def test_a_cold_pair_carries_nothing_and_the_decode_worker_prefills_meanwhile() -> None:
    workers = seen(prefill("p0"), D0)
    placed = place(workers, need("auto"))
    assert placed is not None
    assert placed.prefill is None
    assert place(workers, need("remote")) is None


def test_a_request_that_needs_a_prefill_worker_waits_for_a_warm_link() -> None:
    workers = seen(prefill("p0"), D0)
    assert prospect(workers, need("remote")) is Prospect.WORKER
    assert why_refused(workers, MODEL) == ""
    assert prospect(seen(prefill("p0"), OTHER), need("remote")) is Prospect.WORKER


def test_a_link_that_is_not_measured_enough_for_a_limit_is_waited_for() -> None:
    asks = msgspec.structs.replace(prefill("p0"), min_handoff_gbps=2.0)
    assert prospect(seen(asks, D0), need("remote")) is Prospect.WORKER
    slow = msgspec.structs.replace(prefill("p0", D0), min_handoff_gbps=2.0)
    assert prospect(seen(slow, D0), need("remote")) is Prospect.NONE


def test_a_late_joiner_leaves_the_warm_pairs_alone() -> None:
    workers = seen(prefill("p0", D0), prefill("p1"), D0, D1)
    for mode in ("auto", "remote"):
        placed = place(workers, need(mode))
        assert placed is not None
        assert placed.decode == D0
        assert placed.prefill is not None
        assert placed.prefill.worker_id == "p0"


def test_another_life_of_either_end_is_cold() -> None:
    again = msgspec.structs.replace(D0, incarnation="another")
    assert place(seen(prefill("p0", D0), again), need("remote")) is None


def test_prefill_workers_of_earlier_versions_warm_nothing_up() -> None:
    placed = place(seen(prefill("p0", warms=False), D0), need("remote"))
    assert placed is not None
    assert placed.prefill is not None


def test_only_workers_that_could_have_a_warm_link_are_cold() -> None:
    p0, p1 = prefill("p0", D0), prefill("p1")
    assert cold_lives([p0], [D0]) == set()
    assert cold_lives([p0, p1], [D0, D1]) == {p1.life, D1.life}
    assert cold_lives([p1], []) == cold_lives([], [D0]) == cold_lives([p1], [OTHER]) == set()
    zmq, nixl = (
        msgspec.structs.replace(one, connector=c) for one, c in ((p1, "zmq"), (D0, "nixl"))
    )
    assert cold_lives([zmq], [nixl]) == set(), "no warm-up would help"


def test_a_start_waits_for_a_warm_link_of_each_worker_but_not_for_ever() -> None:
    time = 0.0
    ready = ReadyWorkers(lambda: time)
    ready.look(live_workers(seen(D0)))
    assert ready.counts == (0, 1), "a fleet of one kind starts"
    ready.look(live_workers(seen(prefill("p0"), D0)))
    assert ready.counts == (0, 0)
    ready.look(live_workers(seen(prefill("p0", D0), D0)))
    assert ready.counts == (1, 1)
    late = seen(prefill("p0", D0), prefill("p1"), D0)
    ready.look(live_workers(late))
    assert ready.counts == (1, 1)
    time = WARM_S
    ready.look(live_workers(late))
    assert ready.counts == (2, 1)
