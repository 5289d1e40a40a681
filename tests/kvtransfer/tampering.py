"""Transfers that are tampered with, over a real transport: none may be taken for good.

From the root of the checkout: PYTHONPATH=src:tests python -P -m kvtransfer.tampering --count 10000
(with --device cuda both pools are in GPU memory).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from kvtransfer.fixtures import SMALL, boundary, filled, print_of, reservation
from kvtransfer.receiver_process import transport
from kvtransfer.tricks import ENCODERS, Tamperer, Trick, written
from slowness import patient

from effuse.kvtransfer import push
from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    ConnectorEvent,
    Expect,
    Fence,
    Fenced,
    FinishPush,
    Forget,
    PushCancelled,
    Pushed,
    PushPages,
)
from effuse.kvtransfer.digest import digester_of
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import PageRef, Reservation
from effuse.kvtransfer.thread import Exchange

MOST_PAGES = 6  # of one transfer
POOL = 12
APART = 3  # pages behind it that no honest transfer takes
QUIET_S = 0.002  # after which it is asked whether anything is still to come
QUIET_DEVICE_S = 0.02  # the same of a device, which copies and digests by itself
PATIENCE_S = patient(30.0)
HONEST_SHARE = 0.1
WRITER, READER = "prefill-1", "decode-1"

Found = Counter[tuple[Trick, str]]
"""How often each trick was found out, and how."""


class Served(AssertionError):
    """A transfer that was tampered with was taken for good."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pages to be pushed, chunk by chunk."""

    batches: tuple[tuple[int, ...], ...]
    by_layers: bool  # groups of layers leave one by one

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.batches))

    @property
    def num_chunks(self) -> int:
        return len(self.batches) * (SMALL.num_groups if self.by_layers else 1)


NOTHING = Load((), by_layers=False)


class Pair:
    """Two pools in this process, and the way from one to the other; no thread, no sleep."""

    def __init__(self, kind: str, seed: int, device: str = "cpu") -> None:
        self.draw = random.Random(f"{seed} {kind}")
        self.source = filled(SMALL, 2 * MOST_PAGES, device=device)
        self.target = PageMemory(SMALL, POOL + APART, device)
        self.quiet_s = QUIET_S if device == "cpu" else QUIET_DEVICE_S
        self.tamperer = Tamperer(kind, self.source, WRITER, self.draw)
        self.reader = transport(kind, self.target, READER)
        self.said: list[ConnectorEvent] = []
        self.sender = self._exchange(WRITER, self.source)
        self.receiver = self._exchange(READER, self.target)
        self._skipped_s = 0.0
        self._number = 0
        self.tamperer.transport.open()
        self.reader.open()

    def _exchange(self, incarnation: str, memory: PageMemory) -> Exchange:
        way = self.tamperer.transport if incarnation == WRITER else self.reader
        return Exchange(
            way,
            digester_of(memory),
            Identity(incarnation, print_of(SMALL), SMALL),
            self.said.append,
            self.now,
        )

    def now(self) -> float:
        """Seconds, of which some were never waited for."""
        return time.monotonic() + self._skipped_s

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def draw_load(self) -> Load:
        """Two or three pages a chunk."""
        pages = self.draw.sample(range(MOST_PAGES), MOST_PAGES)
        cuts = self.draw.choice(((2,), (3,), (2, 4), (3, 6), (2, 4, 6)))
        batches = tuple(tuple(pages[a:b]) for a, b in zip((0, *cuts), cuts, strict=False))
        return Load(batches, by_layers=self.draw.random() < 0.5)

    def transfer(self, trick: Trick | None, load: Load) -> str:
        """One transfer; returns how it was detected, or nothing if it was served. Raises Served."""
        self.tamperer.arm(trick, load.num_chunks)
        reserved = self.reserve(load.num_pages)
        self._push(reserved, load)
        outcome = self._outcome(reserved)
        if isinstance(outcome, Arrived):
            self._check_served(trick, reserved, load)
            return ""
        self._end(reserved)
        return outcome.cause.value if isinstance(outcome, ArrivalRefused) else "never complete"

    def reserve(self, num_pages: int, *, apart: bool = False) -> Reservation:
        """Pages whose old bytes belong to no transfer; no other transfer takes those that are
        `apart`.
        """
        self._number += 1
        pool = range(POOL, POOL + APART) if apart else range(POOL)
        ids = self.draw.sample(pool, num_pages)
        self.target.byte_rows()[ids] = int(torch.randint(0, 256, ()))
        written(self.target)
        pages = [PageRef(page, self._number) for page in ids]
        address = self.reader.address()
        reserved = reservation(self.target, address, pages, number=self._number)
        self.receiver.execute(Expect(reserved, WRITER), self.now())
        return reserved

    def _push(self, reserved: Reservation, load: Load) -> None:
        first = 0
        for batch in load.batches:
            final = iter(range(1, SMALL.num_groups))
            num_final = (
                (lambda left=final: next(left, SMALL.num_groups)) if load.by_layers else None
            )
            self.sender.execute(PushPages(reserved, tuple(batch), first, num_final), self.now())
            first += len(batch)
        hidden = self.draw.choice((None, b"hidden"))
        state = boundary(tail_token_ids=(self.draw.randrange(1000),), hidden=hidden)
        self.sender.execute(FinishPush(reserved, lambda: state), self.now())

    # Its outcome.

    def _outcome(self, reserved: Reservation) -> Arrived | ArrivalRefused | None:
        """The receiver's report; None if another transfer that began later, over the same
        connection, is complete before this one.
        """

        def has_word() -> bool:
            return self._word_on(reserved) is not None

        self._turn_until(lambda: has_word() or self.tamperer.has_struck, PATIENCE_S)
        self._turn_until(has_word, self.quiet_s)
        self.tamperer.disarm()
        for _ in range(2):  # a write that is still under way ends during the first
            if not has_word():
                later = self.reserve(0)
                self._push(later, NOTHING)
                self._turn_until(lambda: self._has_said(later, Pushed), PATIENCE_S)  # noqa: B023
                assert self._has_said(later, Pushed), "an honest transfer was refused"
        return self._word_on(reserved)

    def _word_on(self, reserved: Reservation) -> Arrived | ArrivalRefused | None:
        for event in self.said:
            is_ours = event.transfer_id == reserved.transfer_id
            if is_ours and isinstance(event, Arrived | ArrivalRefused):
                return event
        return None

    def _turn_until(self, is_so: Callable[[], bool], quiet_s: float) -> bool:
        """Lets both ends take their turns, until nothing has moved for so long."""
        moved_at = time.monotonic()
        while not is_so():
            if sum(one.turn(one.receive()) for one in (self.sender, self.receiver)):
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > quiet_s:
                return False
        return True

    def _check_served(self, trick: Trick | None, reserved: Reservation, load: Load) -> None:
        """Raises Served if it was changed; otherwise asserts that it is complete."""
        if self.tamperer.has_struck:
            raise Served(f"{reserved.transfer_id}: {trick}, and it was taken for good")
        assert trick is None, f"{reserved.transfer_id}: {trick} was never done"
        lie = self.target.byte_rows()[[page.page_id for page in reserved.pages]]
        left = self.source.byte_rows()[[page for batch in load.batches for page in batch]]
        assert torch.equal(lie, left), f"{reserved.transfer_id}: other bytes than were sent"
        self._turn_until(lambda: self._has_said(reserved, Pushed), PATIENCE_S)
        assert self._has_said(reserved, Pushed), "the sender never heard of it"
        self.said.clear()

    def _end(self, reserved: Reservation) -> None:
        """Gives it up on both sides, until pages may be reused on both."""
        self.receiver.execute(Forget(reserved.transfer_id), self.now())
        self.sender.execute(Cancel(reserved.transfer_id), self.now())
        if not self._turn_until(lambda: self._has_said(reserved, PushCancelled), self.quiet_s):
            self._skipped_s += 2 * self.tamperer.transport.drain_s if self._may_drop else 0.0
            self._turn_until(lambda: self._has_said(reserved, PushCancelled), PATIENCE_S)
        assert self._has_said(reserved, PushCancelled), "source pages are never free again"
        self.receiver.execute(Fence(reserved.transfer_id, has_drained=True), self.now())
        assert self._has_said(reserved, Fenced), "pages are never free again"
        assert not self.sender.is_moving and not self.receiver.is_moving
        self.said.clear()

    @property
    def _may_drop(self) -> bool:
        """Whether a receiver that does not answer for long is dropped."""
        return self.tamperer.transport.is_two_sided

    def _has_said(self, reserved: Reservation, kind: type[ConnectorEvent]) -> bool:
        return any(e.transfer_id == reserved.transfer_id and isinstance(e, kind) for e in self.said)


def run(
    kind: str,
    seed: int,
    count: int,
    tricks: Sequence[Trick] = tuple(Trick),
    *,
    device: str = "cpu",
) -> Found:
    """This many transfers with tampering, and honest ones among them. Raises Served, and
    AssertionError if an honest one is not served completely.
    """
    found: Found = Counter()
    with contextlib.closing(Pair(kind, seed, device)) as pair, tampered(pair, kind):
        pair.transfer(None, pair.draw_load())
        for number in range(count):
            if pair.draw.random() < HONEST_SHARE:
                assert not pair.transfer(None, pair.draw_load()), "an honest transfer was refused"
            trick = tricks[number % len(tricks)]
            how = pair.transfer(trick, pair.draw_load())
            assert how, trick
            found[trick, how] += 1
    return found


@contextlib.contextmanager
def tampered(pair: Pair, kind: str) -> Iterator[None]:
    with (
        patch.object(ENCODERS[kind], "encode", pair.tamperer.encode),
        patch.object(push, "LEAST_BYTES", 1),  # groups of layers leave however small
    ):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtransfer.tampering", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="transfers with faults")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the pages")
    args = parser.parse_args()
    kinds = sorted(ENCODERS)
    for kind in kinds:
        began = time.monotonic()
        found = run(kind, args.seed, args.count // len(kinds), device=args.device)
        seconds = time.monotonic() - began
        print(f"{found.total()} transfers over {kind} had faults in {seconds:.0f} s")
        print("each fault was detected, no such transfer was served, and honest ones were:")
        for (trick, how), number in sorted(
            found.items(), key=lambda one: (one[0][0].value, one[0][1])
        ):
            print(f"  {trick.value}: {how}, {number} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
