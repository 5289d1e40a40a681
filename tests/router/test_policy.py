"""Placement as values: filter, score, pick."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from msgspec.structs import replace
from router.fake_model import worker_record

from effuse.placement.records import Link, Load, WorkerRecord
from effuse.router.fleet import live_workers
from effuse.router.policy import (
    AttemptNeeds,
    Candidate,
    Condition,
    Holder,
    InFlight,
    Pair,
    Placement,
    Prospect,
    WorkerLife,
    place,
    prospect,
    what_is_missing,
    why_refused,
)


def worker(worker_id: str, **fields: object) -> WorkerRecord:
    role = {"p": "prefill", "d": "decode", "b": "both"}[worker_id[0]]
    return worker_record(worker_id, role, **fields)  # type: ignore[arg-type]


def candidate(record: WorkerRecord, tokens: int = 0, *, suspect: bool = False) -> Candidate:
    in_flight = InFlight(requests=int(tokens > 0), tokens=tokens)
    if record.role == "prefill":
        in_flight = InFlight(prompts=int(tokens > 0), to_prefill=tokens)
    return Candidate(record, in_flight, is_suspect=suspect)


def need(mode: str, excluded: Collection[WorkerLife] = (), **fields: object) -> AttemptNeeds:
    return AttemptNeeds(model="fake", mode=mode, excluded=excluded, **fields)  # type: ignore[arg-type]


def pairs(*names: str) -> set[Pair]:
    """Pairs by their names, as in "p0 d0"."""
    return {((p, "1"), (d, "1")) for p, d in (name.split() for name in names)}


def names(placement: Placement | None) -> tuple[str | None, str] | None:
    if placement is None:
        return None
    prefill = placement.prefill
    return (None if prefill is None else prefill.worker_id), placement.decode.worker_id


def used(pages: int) -> Load:
    return Load(total_pages=256, free_pages=256 - pages)


def test_the_least_loaded_pair_by_their_own_report() -> None:
    workers = [
        candidate(worker("d0", load=used(200))),
        candidate(worker("d1", load=used(100))),
        candidate(worker("p0", load=Load(queued_tokens=500))),
        candidate(worker("p1", load=Load(queued_tokens=20))),
    ]
    assert names(place(workers, need("auto"))) == ("p1", "d1")


def test_a_free_seat_comes_before_free_pages() -> None:
    busy = InFlight(requests=64, tokens=64)  # as many as it runs at a time, all of them short
    workers = [Candidate(worker("d0"), busy), candidate(worker("d1"), tokens=3000)]
    assert names(place(workers, need("auto"))) == (None, "d1")


def test_what_is_on_the_way_counts_before_it_is_reported() -> None:
    workers = [
        candidate(worker("d0"), tokens=1000),
        candidate(worker("d1"), tokens=10),
        candidate(worker("p0"), tokens=1000),
        candidate(worker("p1"), tokens=10),
    ]
    assert names(place(workers, need("auto"))) == ("p1", "d1")


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", (None, "d0")), ("local", (None, "d0")), ("remote", None)]
)
def test_without_prefill_workers(mode: str, expected: tuple[str | None, str] | None) -> None:
    workers = [candidate(worker("d0"))]
    assert names(place(workers, need(mode))) == expected


def test_local_ignores_prefill_workers() -> None:
    workers = [candidate(worker("d0")), candidate(worker("p0"))]
    assert names(place(workers, need("local"))) == (None, "d0")


def test_only_equal_fingerprints_work_together() -> None:
    workers = [
        candidate(worker("d0", fingerprint="a")),
        candidate(worker("d1", fingerprint="b"), tokens=50),
        candidate(worker("p0", fingerprint="b")),
    ]
    assert names(place(workers, need("remote"))) == ("p0", "d1")
    assert names(place(workers, need("auto"))) == (None, "d0")


def test_excluded_draining_and_other_models_are_out() -> None:
    draining = Candidate(worker("d1"), InFlight(), condition=Condition.DRAINING)
    workers = [
        candidate(worker("d0")),
        draining,
        candidate(worker("d2", model="other")),
        candidate(worker("p0")),
    ]
    assert names(place(workers, need("auto"))) == ("p0", "d0")
    assert names(place(workers, need("auto", excluded={("p0", "1")}))) == (None, "d0")
    assert place(workers, need("auto", excluded={("d0", "1")})) is None
    assert names(place(workers, need("auto", excluded={("d0", "an earlier life")}))) == ("p0", "d0")
    prefill, decode = live_workers(workers, "fake")
    assert ([r.worker_id for r in prefill], [r.worker_id for r in decode]) == (["p0"], ["d0"])


def test_a_suspect_comes_last_but_comes() -> None:
    busy, suspect = candidate(worker("d0"), tokens=3000), candidate(worker("d1"), suspect=True)
    assert names(place([busy, suspect], need("auto"))) == (None, "d0")
    assert names(place([suspect], need("auto"))) == (None, "d1")


def linked(
    worker_id: str, gbps: dict[str, float], *, least: float = 2.0, load: Load | None = None
) -> Candidate:
    """A prefill worker that requires `least` GB/s, and its measurements."""
    links = tuple(Link(peer, "1", "tcp", rate * 1e9) for peer, rate in gbps.items())
    record = worker(worker_id, load=load)
    return candidate(msgspec.structs.replace(record, links=links, min_handoff_gbps=least))


@pytest.mark.parametrize("mode", ["auto", "remote"])
def test_a_link_that_is_too_slow_is_never_taken(mode: str) -> None:
    workers = [
        candidate(worker("d0")),
        candidate(worker("d1", load=used(200))),
        linked("p0", {"d0": 1.9, "d1": 1.9}),
        linked("p1", {"d0": 1.0, "d1": 2.0}, load=Load(queued_tokens=900)),
    ]
    assert names(place(workers, need(mode))) == ("p1", "d1")


@pytest.mark.parametrize(("gbps", "auto"), [({}, (None, "d0")), ({"d0": 1.9}, (None, "d0"))])
def test_where_every_link_is_refused_decode_prefills_or_nobody_does(
    gbps: dict[str, float], auto: tuple[str | None, str]
) -> None:
    """A link that was not measured yet is as good as refused where there is a limit."""
    workers = [candidate(worker("d0")), linked("p0", gbps)]
    assert names(place(workers, need("auto"))) == auto
    assert names(place(workers, need("local"))) == auto
    assert place(workers, need("remote")) is None


def test_without_a_limit_any_link_is_taken_at_once() -> None:
    workers = [
        candidate(worker("d0")),
        linked("p0", {}, least=0.0),
        linked("p1", {"d0": 0.001}, least=0.0),
    ]
    assert names(place(workers, need("remote"))) == ("p0", "d0")


def test_another_life_of_a_decode_worker_is_not_measured() -> None:
    workers = [candidate(worker("d0", incarnation="2")), linked("p0", {"d0": 9.0})]
    assert place(workers, need("remote")) is None


def test_a_decode_worker_without_a_link_still_helps_out_when_others_are_full() -> None:
    full = InFlight(requests=64, tokens=64)
    workers = [
        Candidate(worker("d0"), full),
        candidate(worker("d1", load=used(200))),
        linked("p0", {"d0": 9.0, "d1": 0.1}),
    ]
    assert names(place(workers, need("auto"))) == (None, "d1")
    assert place(workers, need("remote")) is None
    assert prospect(workers, need("remote")) is Prospect.SEAT


@pytest.mark.parametrize("condition", [one for one in Condition if one is not Condition.READY])
@pytest.mark.parametrize("role", ["p0", "d0"])
def test_who_is_out_takes_part_in_no_choice_however_idle(role: str, condition: Condition) -> None:
    workers = [candidate(worker(n), tokens=900) for n in ("d1", "p1")]
    workers += [candidate(worker(n)) for n in ("d0", "p0") if n != role]
    out = Candidate(worker(role), InFlight(), condition=condition)
    placement = place([out, *workers], need("remote"))
    assert placement is not None
    assert role not in (names(placement) or ())


def test_a_pair_that_hands_nothing_over_is_not_taken_but_its_workers_are() -> None:
    workers = [
        candidate(worker("d0")),
        candidate(worker("d1"), tokens=900),
        candidate(worker("p0")),
    ]
    broken = need("remote", broken=pairs("p0 d0"))
    assert names(place(workers, broken)) == ("p0", "d1")
    workers.append(candidate(worker("p1"), tokens=900))
    assert names(place(workers, broken)) == ("p1", "d0")
    assert names(place(workers[:1], need("auto", broken=pairs("p0 d0")))) == (None, "d0")


def test_a_doubtful_pair_comes_after_others_but_comes() -> None:
    workers = [
        candidate(worker("d0")),
        candidate(worker("d1"), tokens=900),
        candidate(worker("p0")),
    ]
    doubtful = need("remote", doubtful=pairs("p0 d0"))
    assert names(place(workers, doubtful)) == ("p0", "d1")
    assert names(place([workers[0], workers[2]], doubtful)) == ("p0", "d0")


def test_an_answer_goes_on_only_with_the_same_fingerprint() -> None:
    workers = [candidate(worker("d0", fingerprint="v2"))]
    v1 = need("auto", fingerprint=worker("d", fingerprint="v1").fingerprint)
    assert place(workers, v1) is None
    assert prospect(workers, v1) is Prospect.WORKER
    workers.append(candidate(worker("d1", fingerprint="v1"), tokens=900))
    assert names(place(workers, v1)) == (None, "d1")


def test_what_an_answer_lacks_to_go_on_is_not_its_weights_if_a_worker_has_them() -> None:
    alone = both("b1")
    begun = need("remote", fingerprint=alone.record.fingerprint)
    assert place([alone], begun) is None
    missing = "b1 needs another worker to prefill (--prefill remote)"
    assert what_is_missing([alone], begun) == missing
    assert what_is_missing([alone], need("remote")) == missing
    others = what_is_missing([alone], need("remote", fingerprint=(("weights", "others"),)))
    assert "no live decode worker has the weights" in others


def test_a_decode_worker_is_given_few_prompts_in_the_place_of_prefill_workers() -> None:
    busy = Candidate(worker("d0"), InFlight(to_prefill=4 * 512))
    assert place([busy], need("auto")) is None
    assert prospect([busy], need("auto")) is Prospect.SEAT
    assert names(place([busy], need("local"))) == (None, "d0")
    assert names(place([busy, candidate(worker("p0"))], need("auto"))) == ("p0", "d0")


def out(condition: Condition) -> Candidate:
    return Candidate(worker("d0"), InFlight(), condition=condition)


@pytest.mark.parametrize(
    ("workers", "asked", "expected"),
    [
        ([candidate(worker("d0"))], need("auto"), Prospect.NOW),
        ([Candidate(worker("d0"), InFlight(requests=64))], need("auto"), Prospect.SEAT),
        ([Candidate(worker("d0"), InFlight(), is_full=True)], need("auto"), Prospect.SEAT),
        ([out(Condition.STARTING)], need("auto"), Prospect.WORKER),
        ([out(Condition.LOST)], need("auto"), Prospect.WORKER),
        ([out(Condition.UNREACHABLE)], need("auto"), Prospect.WORKER),
        ([out(Condition.DRAINING)], need("auto"), Prospect.WORKER),
        ([candidate(worker("d0"))], need("auto", {("d0", "1")}), Prospect.WORKER),
        ([candidate(worker("d0"))], need("remote"), Prospect.WORKER),
        (
            [candidate(worker("d0")), candidate(worker("p0"))],
            need("remote", broken=pairs("p0 d0")),
            Prospect.WORKER,
        ),
        ([candidate(worker("d0", model="other"))], need("auto"), Prospect.WORKER),
        ([], need("auto"), Prospect.WORKER),
    ],
)
def test_what_a_request_can_expect(
    workers: list[Candidate], asked: AttemptNeeds, expected: Prospect
) -> None:
    assert prospect(workers, asked) is expected


def test_the_fastest_of_refused_links_is_named_with_its_rate_and_the_flag() -> None:
    workers = [
        candidate(worker("d0")),
        candidate(worker("d1")),
        linked("p0", {"d0": 1.25, "d1": 0.5}),
    ]
    assert why_refused(workers, "fake") == (
        "the link from p0 to d0 (tcp) moves 1.25 GB/s, but --min-handoff-gbps is 2 "
        "(2 links are refused, this is the fastest)"
    )
    assert why_refused([candidate(worker("d0")), linked("p0", {})], "fake") == (
        "the link from p0 to d0 has not been measured yet, but --min-handoff-gbps is 2"
    )
    assert why_refused([candidate(worker("d0")), linked("p0", {"d0": 2.0})], "fake") == ""
    assert why_refused(workers, "another model") == ""


def test_pages_go_only_where_they_are_taken_the_same_way() -> None:
    def moves(worker_id: str, connector: str) -> Candidate:
        return candidate(msgspec.structs.replace(worker(worker_id), connector=connector))

    zmq, nixl, unknown = moves("p0", "zmq"), moves("d0", "nixl"), moves("d1", "")
    assert place([zmq, nixl], need("remote")) is None
    assert names(place([zmq, nixl], need("auto"))) == (None, "d0")
    assert names(place([zmq, nixl, unknown], need("remote"))) == ("p0", "d1")
    assert why_refused([zmq, nixl], "fake") == (
        "p0 moves pages with zmq, but d0 with nixl; both need the same --connector"
    )
    slow = linked("p1", {"d0": 1.25})
    assert why_refused([zmq, nixl, slow], "fake") == (
        "the link from p1 to d0 (tcp) moves 1.25 GB/s, but --min-handoff-gbps is 2 "
        "(2 links are refused, this is the fastest)"
    )


def test_who_shares_a_prompt_goes_where_its_kv_is() -> None:
    workers = [
        candidate(worker("d0")),
        candidate(worker("d1", load=used(200))),
        candidate(worker("p0")),
    ]
    beside = need("remote", beside=("d1", "1"))
    assert place(workers, beside) == Placement(workers[1].record, None, shares_prompt=True)
    for taken in (
        replace(workers[1], is_full=True),
        replace(workers[1], condition=Condition.LOST),
        replace(workers[1], in_flight=InFlight(requests=64)),
        replace(workers[1], kept_for=Holder("another", "another")),
        candidate(worker("d1", incarnation="2", load=used(200))),
    ):
        assert names(place([workers[0], taken, workers[2]], beside)) == ("p0", "d0")


def test_the_first_of_several_answers_goes_where_all_have_seats() -> None:
    busy = InFlight(requests=61, tokens=61)
    workers = [Candidate(worker("d0"), busy), candidate(worker("d1"), tokens=3000)]
    assert names(place(workers, need("auto", num_answers=3))) == (None, "d0")
    assert names(place(workers, need("auto", num_answers=4))) == (None, "d1")
    assert names(place(workers[:1], need("auto", num_answers=4))) == (None, "d0")


# Workers that do both.


def both(name: str, **in_flight: int) -> Candidate:
    return Candidate(worker(name), InFlight(**in_flight))


def test_a_worker_that_does_both_computes_the_prompts_of_its_own_answers() -> None:
    fleet = [both("b0"), both("b1", requests=1, tokens=500)]
    assert names(place(fleet, need("auto"))) == (None, "b0")
    assert names(place([fleet[1]], need("auto"))) == (None, "b1")


def test_between_two_that_do_both_a_prompt_moves_only_if_it_must() -> None:
    fleet = [both("b0"), both("b1")]
    assert names(place(fleet, need("auto"))) == (None, "b0")
    assert names(place(fleet, need("remote"))) == ("b1", "b0")
    assert place([both("b0")], need("remote")) is None, "nothing pushes to itself"


def test_it_computes_prompts_for_decode_workers() -> None:
    fleet = [both("b0", requests=9, tokens=900), candidate(worker("d0"))]
    assert names(place(fleet, need("auto"))) == ("b0", "d0")


@pytest.mark.parametrize(
    ("own", "others", "wanted"), [(0, 0, "p0"), (0, 100, None), (200, 100, "p0")]
)
def test_a_prefill_worker_takes_its_prompts_unless_it_has_more_to_do(
    own: int, others: int, wanted: str | None
) -> None:
    fleet = [both("b0", to_prefill=own), Candidate(worker("p0"), InFlight(to_prefill=others))]
    assert names(place(fleet, need("auto"))) == (wanted, "b0")


def test_of_two_that_could_compute_a_prompt_the_one_without_answers_comes_first() -> None:
    fleet = [both("b0", requests=30, tokens=3000), candidate(worker("p0")), candidate(worker("d0"))]
    assert names(place(fleet, need("auto"))) == ("p0", "d0")


def test_prompts_for_others_take_no_seats() -> None:
    assert both("b0", prompts=100, to_prefill=10).num_free_seats == 64


def test_both_kinds_of_live_workers_include_those_that_do_both() -> None:
    fleet = [both("b0"), candidate(worker("p0")), candidate(worker("d0"))]
    prefill, decode = live_workers(fleet)
    assert [one.worker_id for one in prefill] == ["b0", "p0"]
    assert [one.worker_id for one in decode] == ["b0", "d0"]
