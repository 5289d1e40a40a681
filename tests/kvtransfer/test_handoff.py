"""Both ends of a handoff, tested as data: every state with every event, and the required
results.
"""

from __future__ import annotations

import itertools

import pytest

from effuse.kvtransfer.handoff import (
    HISTORY_LENGTH,
    RECEIVER,
    SENDER,
    IllegalHandoffEvent,
    Machine,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
    SenderDo,
    SenderEvent,
    SenderState,
)

RECEIVER_PAIRS = list(itertools.product(ReceiverState, ReceiverEvent))
SENDER_PAIRS = list(itertools.product(SenderState, SenderEvent))

RECEIVER_LIVES = {
    "verified": ("OFFERED ARRIVED", "VERIFIED", "OPEN_PAGES EXPECT COMMIT_PAGES REPORT_VERIFIED"),
    "aborted": (
        "OFFERED ABORTED WRITER_GONE FENCED",
        "RELEASED",
        "OPEN_PAGES EXPECT FORGET QUARANTINE_PAGES FENCE FREE_PAGES",
    ),
    "aborted, and a forgotten writer places nothing": (
        "OFFERED ABORTED FENCED",
        "RELEASED",
        "OPEN_PAGES EXPECT FORGET QUARANTINE_PAGES FREE_PAGES",
    ),
    "refused": (
        "OFFERED REFUSED ABORTED WRITER_GONE FENCED",
        "RELEASED",
        "OPEN_PAGES EXPECT FORGET QUARANTINE_PAGES REPORT_FAILED FENCE FREE_PAGES",
    ),
    "expired, then it arrived after all": (
        "OFFERED EXPIRED ARRIVED WRITER_GONE ARRIVED FENCED",
        "RELEASED",
        "OPEN_PAGES EXPECT FORGET QUARANTINE_PAGES REPORT_FAILED FENCE FREE_PAGES",
    ),
    "the writer died": (
        "OFFERED WRITER_GONE WRITER_GONE ABORTED REFUSED FENCED",
        "RELEASED",
        "OPEN_PAGES EXPECT FORGET QUARANTINE_PAGES FENCE REPORT_FAILED FREE_PAGES",
    ),
}

SENDER_LIVES = {
    "reservation first": (
        "ADDRESSED PAGES_READY PAGES_READY COMPUTED ACKNOWLEDGED",
        "ENDED",
        "PUSH PUSH PUSH PUSH FINISH REPORT_PUSHED FREE_PAGES",
    ),
    "reservation last": (
        "PAGES_READY COMPUTED ADDRESSED ACKNOWLEDGED",
        "ENDED",
        "PUSH FINISH REPORT_PUSHED FREE_PAGES",
    ),
    "no reservation came": ("COMPUTED EXPIRED", "ENDED", "REPORT_FAILED FREE_PAGES"),
    "aborted while nothing was pushed": ("PAGES_READY ABORTED", "ENDED", "FREE_PAGES"),
    "aborted while pushing": ("ADDRESSED ABORTED DRAINED", "ENDED", "PUSH CANCEL FREE_PAGES"),
    "acknowledged after an abort": (
        "ADDRESSED COMPUTED ABORTED ACKNOWLEDGED DRAINED",
        "ENDED",
        "PUSH PUSH FINISH CANCEL FREE_PAGES",
    ),
    "push failed": (
        "ADDRESSED FAILED ABORTED DRAINED",
        "ENDED",
        "PUSH CANCEL REPORT_FAILED FREE_PAGES",
    ),
    "lease ran out": (
        "ADDRESSED COMPUTED EXPIRED FAILED DRAINED",
        "ENDED",
        "PUSH PUSH FINISH CANCEL REPORT_FAILED FREE_PAGES",
    ),
}


def receiver(state: ReceiverState) -> Machine[ReceiverState, ReceiverEvent, ReceiverDo]:
    return Machine(RECEIVER, state, 100.0, 5.0)


def sender(state: SenderState) -> Machine[SenderState, SenderEvent, SenderDo]:
    return Machine(SENDER, state, 100.0, 5.0)


@pytest.mark.parametrize(("state", "event"), RECEIVER_PAIRS, ids=str)
def test_receiver_follows_its_table(state: ReceiverState, event: ReceiverEvent) -> None:
    machine = receiver(state)
    expected = RECEIVER.get((state, event))
    assert machine.allows(event) is (expected is not None)
    if expected is None:
        with pytest.raises(
            IllegalHandoffEvent, match=f"{event.name} cannot happen in {state.name}"
        ):
            machine.handle(event, 101.0)
        assert machine.state is state
    else:
        assert (machine.handle(event, 101.0), machine.state) == (expected[1], expected[0])


@pytest.mark.parametrize(("state", "event"), SENDER_PAIRS, ids=str)
def test_sender_follows_its_table(state: SenderState, event: SenderEvent) -> None:
    machine = sender(state)
    expected = SENDER.get((state, event))
    if expected is None:
        with pytest.raises(
            IllegalHandoffEvent, match=f"{event.name} cannot happen in {state.name}"
        ):
            machine.handle(event, 101.0)
    else:
        assert (machine.handle(event, 101.0), machine.state) == (expected[1], expected[0])


@pytest.mark.parametrize("name", RECEIVER_LIVES)
def test_receiver_lives(name: str) -> None:
    events, end, done = RECEIVER_LIVES[name]
    machine = receiver(ReceiverState.RESERVED)
    dos = [do.name for e in events.split() for do in machine.handle(ReceiverEvent[e], 101.0)]
    assert (dos, machine.state.name) == (done.split(), end)


@pytest.mark.parametrize("name", SENDER_LIVES)
def test_sender_lives(name: str) -> None:
    events, end, done = SENDER_LIVES[name]
    machine = sender(SenderState.COMPUTING)
    dos = [do.name for e in events.split() for do in machine.handle(SenderEvent[e], 101.0)]
    assert (dos, machine.state.name) == (done.split(), end)


def test_no_receiver_frees_pages_that_a_writer_may_reach() -> None:
    for (_, event), (_, dos) in RECEIVER.items():
        if ReceiverDo.FREE_PAGES in dos:
            assert event is ReceiverEvent.FENCED
        if ReceiverDo.REPORT_VERIFIED in dos:
            assert event is ReceiverEvent.ARRIVED


def test_a_sender_frees_pages_only_when_nothing_reads_them() -> None:
    pushing = {SenderState.PUSHING, SenderState.FINISHING, SenderState.DRAINING}
    for (state, event), (_, dos) in SENDER.items():
        if SenderDo.FREE_PAGES in dos and state in pushing:
            assert event in (SenderEvent.ACKNOWLEDGED, SenderEvent.DRAINED)


def test_over_means_over() -> None:
    ends = {ReceiverState.VERIFIED, ReceiverState.RELEASED}
    assert not [pair for pair in RECEIVER if pair[0] in ends]
    assert not [pair for pair in SENDER if pair[0] is SenderState.ENDED]


def test_leases_are_durations_on_the_injected_clock() -> None:
    machine = receiver(ReceiverState.RECEIVING)
    assert not machine.is_overdue(104.999)
    assert machine.is_overdue(105.0)
    machine.renew(104.0, 5.0)
    assert not machine.is_overdue(108.999)


def test_the_history_is_in_errors_and_bounded() -> None:
    machine = sender(SenderState.COMPUTING)
    machine.handle(SenderEvent.ADDRESSED, 100.5)
    for _ in range(3 * HISTORY_LENGTH):
        machine.handle(SenderEvent.PAGES_READY, 101.0)
    assert machine.history().count(",") == HISTORY_LENGTH - 1
    with pytest.raises(IllegalHandoffEvent, match=r"PUSHING PAGES_READY.*PAGES_READY"):
        machine.handle(SenderEvent.DRAINED, 102.0)
