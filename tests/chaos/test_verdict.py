"""Every check of a ledger fails for the bug that it is there for, and for no good run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import report
from chaos.ledger import (
    Answer,
    Commit,
    Exchange,
    Finish,
    FleetState,
    Injected,
    Ledger,
    Mode,
    Standing,
    Try,
    WorkerState,
)
from chaos.plan import Fault, Kind
from chaos.verdict import MORE_DESCRIPTORS, MORE_TASKS, judge

RIGHT = Answer((5, 6, 7, 8), "abcd", 2)
UNARY, STREAM, CANCELLED = 0, 1, 2  # the ledger's requests
KILL = Fault(Kind.ENGINE_KILLED, "decode-0", 0.0)
ROUTER_KILL = Fault(Kind.ROUTER_KILLED, "router-0", 0.0)


def worker() -> WorkerState:
    return WorkerState(
        is_ready=True, held_pages=0, quarantined_pages=0, requests=0, tasks=20, descriptors=60
    )


def fleet() -> FleetState:
    return FleetState(
        workers={"prefill-0": worker(), "decode-0": worker()},
        router_descriptors=20,
        router_bytes=1,
        running_keys=(),
        lasting_keys=(),
    )


def exchange(number: int, mode: Mode, *events: Commit | Finish) -> Exchange:
    return Exchange(
        number=number, job=0, mode=mode, began_s=1.0, events=[*events], ended_s=3.0, status="OK"
    )


def good() -> Ledger:
    """A run in which nothing is wrong: a whole answer, a stream that was hit, one broken off."""
    first, second = Commit(1.5, 0, (5, 6), "ab"), Commit(2.5, 2, (7, 8), "cd")
    last = Finish(2.6, 2, 4)
    cancelled = exchange(CANCELLED, Mode.STREAM_CANCELLED, first)
    cancelled.status = "CANCELLED"
    return Ledger(
        seed=1,
        connector="zmq",
        planned=1,
        expected=[RIGHT],
        later=[RIGHT],
        exchanges=[
            exchange(UNARY, Mode.UNARY, Commit(2.5, 0, (5, 6, 7, 8), "abcd"), last),
            exchange(STREAM, Mode.STREAM, first, second, last),
            cancelled,
        ],
        injected=[
            Injected(
                fault=KILL,
                at_s=2.0,
                evidence="pid 7 gone",
                running=[Standing(STREAM, "decodes there, blocks came")],
                recovered_s=4.0,
            )
        ],
        before=fleet(),
        after=fleet(),
    )


def spoilt(number: int, **changes: object) -> Callable[[Ledger], None]:
    """Another request than it was."""

    def spoil(ledger: Ledger) -> None:
        ledger.exchanges[number] = replace(ledger.exchanges[number], **changes)  # type: ignore[arg-type]

    return spoil


def events(number: int, change: Callable[[list[Commit | Finish]], object]) -> Callable[..., None]:
    """Other events of a request than they were."""

    def spoil(ledger: Ledger) -> None:
        change(ledger.exchanges[number].events)

    return spoil


def again(*said: Commit | Finish) -> Callable[[Ledger], None]:
    """A stream whose router was killed after these events."""

    def spoil(ledger: Ledger) -> None:
        ledger.exchanges[STREAM].earlier.append(Try(1.4, "UNAVAILABLE", [*said]))
        ledger.injected.append(replace(ledger.injected[0], fault=ROUTER_KILL, at_s=1.35))
        ledger.planned += 1

    return spoil


def left(**changes: object) -> Callable[[Ledger], None]:
    """A decode worker that is different at the end."""

    def spoil(ledger: Ledger) -> None:
        assert ledger.after is not None
        ledger.after.workers["decode-0"] = replace(worker(), **changes)  # type: ignore[arg-type]

    return spoil


def after(**changes: object) -> Callable[[Ledger], None]:
    def spoil(ledger: Ledger) -> None:
        ledger.after = replace(fleet(), **changes)  # type: ignore[arg-type]

    return spoil


def fault(**changes: object) -> Callable[[Ledger], None]:
    def spoil(ledger: Ledger) -> None:
        ledger.injected[0] = replace(ledger.injected[0], **changes)  # type: ignore[arg-type]

    return spoil


BUGS: dict[str, tuple[Callable[[Ledger], object], str]] = {
    "a request failed": (spoilt(STREAM, status="UNAVAILABLE"), "lost"),
    "a request was cancelled, but not by its client": (spoilt(STREAM, status="CANCELLED"), "lost"),
    "a request was late": (spoilt(UNARY, status="DEADLINE_EXCEEDED"), "lost"),
    "a cancelled request failed": (spoilt(CANCELLED, status="INTERNAL"), "lost"),
    "a request never ended": (spoilt(STREAM, ended_s=None, status=""), "lost"),
    "a stream ended well without its last word": (events(STREAM, lambda e: e.pop()), "lost"),
    "an answer came twice": (events(UNARY, lambda e: e.extend(list(e))), "duplicated"),
    "an end was told twice": (events(STREAM, lambda e: e.append(e[-1])), "duplicated"),
    "a try that broke off was wrong": (again(Commit(1.2, 0, (5, 7), "ab")), "wrong"),
    "a try that broke off said a block twice": (
        again(Commit(1.2, 0, (5, 6), "ab"), Commit(1.3, 0, (5, 6), "ab")),
        "duplicated",
    ),
    "a request was asked again and its router lived": (
        spoilt(UNARY, earlier=[Try(2.5, "UNAVAILABLE", [])]),
        "lost",
    ),
    "a job is answered otherwise after the faults": (
        lambda ledger: setattr(ledger, "later", [replace(RIGHT, text="abce")]),
        "wrong",
    ),
    "jobs were not asked after the faults": (
        lambda ledger: setattr(ledger, "later", []),
        "wrong",
    ),
    "a block came twice": (events(STREAM, lambda e: e.insert(1, e[0])), "duplicated"),
    "a block is missing": (events(STREAM, lambda e: e.pop(0)), "missing"),
    "the last block is missing": (events(STREAM, lambda e: e.pop(1)), "missing"),
    "a token is wrong": (
        events(STREAM, lambda e: e.__setitem__(1, Commit(2.5, 2, (7, 9), "cd"))),
        "wrong",
    ),
    "a cancelled request's token is wrong": (
        events(CANCELLED, lambda e: e.__setitem__(0, Commit(1.5, 0, (5, 7), "ab"))),
        "wrong",
    ),
    "a character is wrong": (
        events(STREAM, lambda e: e.__setitem__(1, Commit(2.5, 2, (7, 8), "cx"))),
        "wrong",
    ),
    "an answer is too short": (
        spoilt(UNARY, events=[Commit(2.5, 0, (5, 6), "ab"), Finish(2.6, 2, 2)]),
        "wrong",
    ),
    "an answer ended for another reason": (
        events(UNARY, lambda e: e.__setitem__(1, Finish(2.6, 1, 4))),
        "wrong",
    ),
    "a fault was not seen": (fault(evidence=""), "no fault"),
    "a fault was left out": (lambda ledger: setattr(ledger, "planned", 2), "no fault"),
    "a worker did not come back": (fault(recovered_s=None), "not back"),
    "a worker is not ready": (left(is_ready=False), "left"),
    "a page is held": (left(held_pages=1), "left"),
    "a page is in quarantine": (left(quarantined_pages=1), "left"),
    "a request is held": (left(requests=1), "left"),
    "tasks are left": (left(tasks=20 + MORE_TASKS + 1), "leaked"),
    "a worker's descriptors are left": (left(descriptors=60 + MORE_DESCRIPTORS + 1), "leaked"),
    "the router's descriptors are left": (
        after(router_descriptors=20 + MORE_DESCRIPTORS + 1),
        "leaked",
    ),
    "a placement says that it runs": (after(running_keys=("a",)), "left"),
    "a key would stay": (after(lasting_keys=("a",)), "left"),
    "nobody looked at the end": (lambda ledger: setattr(ledger, "after", None), "left"),
}


def test_a_good_run_is_good() -> None:
    assert judge(good()) == []


def test_a_request_whose_router_was_killed_may_be_asked_again() -> None:
    ledger = good()
    again(Commit(1.2, 0, (5, 6), "ab"))(ledger)
    assert judge(ledger) == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_and_told(bug: str, tmp_path: Path) -> None:
    plant, charge = BUGS[bug]
    ledger = good()
    plant(ledger)
    findings = judge(ledger)
    assert charge in {one.charge for one in findings}
    told = report.write(ledger, findings, tmp_path).read_text()
    assert all(one.story in told for one in findings)
    counts = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert counts[charge] >= 1


def test_the_report_counts_what_ran_and_how_long_it_waited(tmp_path: Path) -> None:
    ledger = good()
    report.write(ledger, judge(ledger), tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["requests"], told["faults"], told["kills"]) == (3, 1, 1)
    assert told["findings"] == {}
    kind = told["by_fault"]["engine killed (decode)"]
    assert kind["running"] == {"decodes there, blocks came": 1}
    assert kind["recovery"] == {"count": 1, "worst": 4.0}
    assert told["gap_after_kill"] == {"count": 1, "worst": 0.5}


def test_a_word_that_was_on_its_way_ends_no_gap() -> None:
    ledger = good()
    (hit,) = ledger.injected
    stream = ledger.exchanges[STREAM]
    assert report.gaps(ledger, hit) == [0.5]  # from 2.0 to 2.5
    stream.events = [Commit(at, 0, (5,), "a") for at in (1.5, 2.1, 9.0, 9.1, 20.0)]
    assert report.gaps(ledger, hit) == [pytest.approx(6.9)]  # and not the later one of 10.9
    stream.events = stream.events[:1]
    assert report.gaps(ledger, hit) == []  # it never went on, which others judge
