"""Two handoffs over one page, and all that can happen next: their tables, the page's and a lease's.

The tables are the real ones. They are looked up and carried out here like in ends.py,
reception.py and pushes.py, over a transport whose writers write by themselves or over a
two-sided one. There is no time: everything that a lease allows may happen at any moment. The first
handoff's writer may die; the second one begins once the page is free, under another writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from effuse.kvtransfer.handoff import (
    RECEIVER,
    SENDER,
    ReceiverDo,
    ReceiverEvent,
    ReceiverState,
    SenderDo,
    SenderEvent,
    SenderState,
)
from effuse.kvtransfer.pool import TRANSITIONS as PAGE
from effuse.kvtransfer.pool import PageEvent, PageState
from effuse.placement.leases import Lease, LeaseEvent, LeaseState, advance

from .clock import Violation

R, S = ReceiverState, SenderState
OVER = (R.VERIFIED, R.RELEASED)
GIVEN_UP = (R.ABORTING, R.FENCING)


class Handoff(NamedTuple):
    """One handoff of the page, at both of its ends and between them.

    A tuple, because a search replaces fields of a million of them.
    """

    receiver: ReceiverState | None = None  # None before it is reserved
    sender: SenderState = S.COMPUTING
    is_alive: bool = True  # its writer
    is_addressed: bool = False
    is_expected: bool = False
    is_pushing: bool = False  # the engine has handed the page on
    is_finishing: bool = False
    is_cancelled: bool = False
    is_cut_off: bool = False  # its writer is gone: the agent is to be closed
    is_closed: bool = False  # nothing lands any more
    # The write: none, posted (the source is read), sent (bytes wait anywhere), landed, over.
    write: str = "none"
    manifest: str = "none"  # none, sent, accepted, rejected
    arrivals: tuple[ReceiverEvent, ...] = ()  # events of the connectors for their engines
    reports: tuple[SenderEvent, ...] = ()

    @property
    def is_begun(self) -> bool:
        """Whether pages are or were held for it."""
        return self.receiver is not None


class World(NamedTuple):
    """One state of all."""

    first: Handoff = Handoff()
    second: Handoff = Handoff()
    page: PageState = PageState.FREE
    owner: int = 0  # owner of the allocation, which is its generation
    content: int = 0  # owner of the bytes; negative if they are spoilt
    lease: LeaseState = LeaseState.HELD  # of the first writer
    is_missed: bool = False  # its lease has run out
    is_two_sided: bool = False

    def handoff(self, which: int) -> Handoff:
        """The first or the second."""
        return self.first if which == 1 else self.second

    def but(self, which: int, **changes: object) -> World:
        """The same with a handoff changed."""
        name = "first" if which == 1 else "second"
        return self._replace(**{name: self.handoff(which)._replace(**changes)})  # type: ignore[arg-type]

    def turned(self, event: PageEvent) -> World:
        """The same with the page moved on."""
        after = PAGE.get((self.page, event))
        if after is None:
            raise Violation(f"{event.name} of a page that is {self.page.name}")
        return self._replace(page=after)


Move = tuple[str, Callable[[], World]]
Trust = Callable[[World, int], bool]


def has_let_go(world: World, which: int) -> bool:
    """A valid report of a writer that all its writes have ended: only its own, while it lives;
    neither its death nor the end of its lease.
    """
    handoff = world.handoff(which)
    return handoff.is_alive and handoff.sender is S.ENDED


# The engines' actions on an event, by the tables.


def receive(world: World, which: int, event: ReceiverEvent, *, has_drained: bool = False) -> World:
    """An event of a reservation; raises Violation where the table does not have it."""
    state = world.handoff(which).receiver
    assert state is not None, "it is begun"
    found = RECEIVER.get((state, event))
    if found is None:
        raise Violation(f"{event.name} of a reservation that is {state.name}")
    world = world.but(which, receiver=found[0])
    for do in found[1]:
        world = _carry_out(world, which, do, has_drained)
    return world


def _carry_out(world: World, which: int, do: ReceiverDo, has_drained: bool) -> World:
    match do:
        case ReceiverDo.OPEN_PAGES:
            return world.turned(PageEvent.OPEN)
        case ReceiverDo.EXPECT:
            return world.but(which, is_expected=True)
        case ReceiverDo.FORGET:
            return _forget(world, which)
        case ReceiverDo.QUARANTINE_PAGES:
            return world.turned(PageEvent.QUARANTINE)
        case ReceiverDo.FREE_PAGES:
            return world.turned(PageEvent.FENCE)
        case ReceiverDo.FENCE if world.is_two_sided:
            return world  # forgetting was enough
        case ReceiverDo.FENCE if has_drained:
            return _say(world, which, ReceiverEvent.FENCED)
        case ReceiverDo.FENCE:
            return world.but(which, is_cut_off=True)
        case ReceiverDo.COMMIT_PAGES:
            if world.content != which:
                raise Violation(f"bytes of {world.content} are taken for those of {which}")
            return world.turned(PageEvent.COMMIT)
    return world


def _forget(world: World, which: int) -> World:
    world = world.but(which, is_expected=False)
    return _say(world, which, ReceiverEvent.FENCED) if world.is_two_sided else world


def send(world: World, which: int, event: SenderEvent) -> World:
    """An event of a push; raises Violation where the table does not have it."""
    handoff = world.handoff(which)
    found = SENDER.get((handoff.sender, event))
    if found is None:
        raise Violation(f"{event.name} of a push that is {handoff.sender.name}")
    world = world.but(which, sender=found[0])
    for do in found[1]:
        if do is SenderDo.PUSH:
            world = world.but(which, is_pushing=True)
        elif do is SenderDo.FINISH:
            world = world.but(which, is_finishing=True)
        elif do is SenderDo.CANCEL:
            world = world.but(which, is_cancelled=True)
        elif do is SenderDo.FREE_PAGES and world.handoff(which).write == "posted":
            raise Violation("source pages are free while a write reads them")
    return world


def _say(world: World, which: int, event: ReceiverEvent) -> World:
    return world.but(which, arrivals=(*world.handoff(which).arrivals, event))


def _report(world: World, which: int, event: SenderEvent) -> World:
    return world.but(which, reports=(*world.handoff(which).reports, event))


# Possible next events.


def moves(world: World, trust: Trust = has_let_go) -> Iterator[Move]:
    """All that can happen in a state."""
    for which in (1, 2):
        for name, move in _moves(world, which, trust):
            yield f"{which}: {name}", move
    yield from _lease_moves(world)


def _moves(world: World, which: int, trust: Trust) -> Iterator[Move]:
    handoff = world.handoff(which)
    if not handoff.is_begun:
        is_next = which == 1 or world.first.is_begun
        if is_next and world.page is PageState.FREE:
            yield "reserve", lambda: _reserve(world, which)
        return
    yield from _receiver_moves(world, which, trust)
    if handoff.is_alive:
        yield from _sender_moves(world, which)
        yield from _push_moves(world, which)
    if handoff.write == "sent":
        yield "bytes land", lambda: _land(world, which, which)
        if which == 1:
            yield "spoilt bytes land", lambda: _land(world, which, -which)


def _reserve(world: World, which: int) -> World:
    world = world.turned(PageEvent.RESERVE)._replace(owner=which).but(which, receiver=R.RESERVED)
    return receive(world, which, ReceiverEvent.OFFERED)


def _land(world: World, which: int, content: int) -> World:
    handoff = world.handoff(which)
    if handoff.is_closed or (world.is_two_sided and not handoff.is_expected):
        return world.but(which, write="over")
    if world.owner != which or world.page not in (PageState.RECEIVING, PageState.QUARANTINED):
        raise Violation(f"bytes of {which} land in a page that is {world.page.name}")
    return world._replace(content=content).but(which, write="landed")


def _receiver_moves(world: World, which: int, trust: Trust) -> Iterator[Move]:
    handoff = world.handoff(which)
    state = handoff.receiver
    if handoff.arrivals:
        yield "decode hears", lambda: _hear_arrival(world, which)
    if state is R.VERIFIED and world.owner == which and world.page is PageState.COMMITTED:
        yield "answer ends", lambda: world.turned(PageEvent.RELEASE)
    if state in (R.RECEIVING, *GIVEN_UP):
        yield "decode aborts", lambda: receive(world, which, ReceiverEvent.ABORTED)
    if state is R.RECEIVING:
        yield "lease ends", lambda: receive(world, which, ReceiverEvent.EXPIRED)
    if state in (R.RECEIVING, *GIVEN_UP) and not handoff.is_cut_off:
        if trust(world, which):
            drained = ReceiverEvent.WRITER_GONE
            yield "writer let go", lambda: receive(world, which, drained, has_drained=True)
        if not handoff.is_alive:
            yield "writer gone", lambda: receive(world, which, ReceiverEvent.WRITER_GONE)
    if handoff.is_expected and handoff.manifest == "sent" and handoff.write in ("landed", "over"):
        yield "verify", lambda: _conclude(world, which)
    if handoff.is_cut_off and not handoff.is_closed:
        yield (
            "agent closes",
            lambda: _say(world.but(which, is_closed=True), which, ReceiverEvent.FENCED),
        )


def _hear_arrival(world: World, which: int) -> World:
    event, *later = world.handoff(which).arrivals
    world = world.but(which, arrivals=tuple(later))
    if world.handoff(which).receiver in OVER:
        return world  # of a handoff that has ended here
    return receive(world, which, event)


def _conclude(world: World, which: int) -> World:
    if world.content == which:
        world = world.but(which, is_expected=False, manifest="accepted")
        return _say(world, which, ReceiverEvent.ARRIVED)
    world = _say(world.but(which, manifest="rejected"), which, ReceiverEvent.REFUSED)
    return _forget(world, which)


def _sender_moves(world: World, which: int) -> Iterator[Move]:
    """A prefill engine's events and decisions."""
    handoff = world.handoff(which)
    state = handoff.sender
    if handoff.reports:
        yield "prefill hears", lambda: _hear_report(world, which)
    if state in (S.COMPUTING, S.COMPUTED) and not handoff.is_addressed:
        address = world.but(which, is_addressed=True)
        yield "addressed", lambda: send(address, which, SenderEvent.ADDRESSED)
    if state in (S.COMPUTING, S.PUSHING):
        yield "computed", lambda: send(world, which, SenderEvent.COMPUTED)
        if not handoff.is_pushing:
            yield "page ready", lambda: send(world, which, SenderEvent.PAGES_READY)
    if state is not S.ENDED:
        yield "prefill aborts", lambda: send(world, which, SenderEvent.ABORTED)
    if (state, SenderEvent.EXPIRED) in SENDER:
        yield "prefill gives up", lambda: send(world, which, SenderEvent.EXPIRED)
    if which == 1:
        yield "writer dies", lambda: _die(world, which)


def _hear_report(world: World, which: int) -> World:
    event, *later = world.handoff(which).reports
    world = world.but(which, reports=tuple(later))
    if world.handoff(which).sender is S.ENDED:
        return world
    return send(world, which, event)


def _die(world: World, which: int) -> World:
    """Posted but unsent writes are lost; the rest goes on."""
    write = world.handoff(which).write
    return world.but(
        which, is_alive=False, reports=(), write="none" if write == "posted" else write
    )


def _push_moves(world: World, which: int) -> Iterator[Move]:
    """Actions of a writer's connector."""
    handoff = world.handoff(which)
    is_told = bool(handoff.reports)
    if handoff.is_pushing and handoff.write == "none" and not handoff.is_cancelled:
        yield "post", lambda: world.but(which, write="posted")
    if handoff.write == "posted":
        yield "bytes leave", lambda: world.but(which, write="sent")
    if handoff.write == "landed":
        yield "acknowledged", lambda: world.but(which, write="over")
    has_left = handoff.write != "none" and handoff.manifest == "none"
    if handoff.is_finishing and has_left and not handoff.is_cancelled:
        yield "manifest", lambda: world.but(which, manifest="sent")
    if is_told or handoff.sender is S.ENDED:
        return
    if handoff.is_cancelled:
        if handoff.write in ("none", "over"):
            yield "drained", lambda: _report(world, which, SenderEvent.DRAINED)
    elif handoff.manifest == "accepted" and handoff.write == "over":
        yield "accepted", lambda: _report(world, which, SenderEvent.ACKNOWLEDGED)
    elif handoff.manifest == "rejected":
        yield "rejected", lambda: _report(world, which, SenderEvent.FAILED)


def _lease_moves(world: World) -> Iterator[Move]:
    """The first writer's front renews its lease, or does not reach Redis."""
    if world.lease is not LeaseState.HELD or not world.first.is_begun:
        return
    lease = Lease(world.lease)
    for event in (LeaseEvent.UNREACHABLE, LeaseEvent.SUPERSEDED, LeaseEvent.RELEASED):
        after = advance(lease, event, 0.0).state
        if not world.is_missed:
            missed = world._replace(lease=after, is_missed=True)
            yield f"lease {event.value}", partial(_as_it_is, missed)


def _as_it_is(world: World) -> World:
    return world
