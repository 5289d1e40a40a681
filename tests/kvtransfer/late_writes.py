"""Writers that die or freeze in the midst of a transfer: nothing of it lands in pages once free.

A real process writes into many reservations, is killed or frozen, and is abandoned while pages are
to come. Pages of fenced transfers get other content; any other then is a spoilt page.

From the root of the checkout: PYTHONPATH=src:tests python -P -m kvtransfer.late_writes --count 1000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final
from unittest.mock import patch

import torch
from kvtransfer.fixtures import DEADLINE_S, LARGE, next_event, reservation, run_on_thread
from kvtransfer.receiver_process import DEVICE, make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import Arrived, Expect, Fence, Fenced, Forget
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import PageRef, Reservation
from effuse.kvtransfer.thread import Exchange, ThreadConnector

NUM_PAGES = 768
TRANSFERS = 32  # of one writer at once
STALLED_S = 0.5  # for which our thread stands still once it has given up
SETTLED_S = 0.4  # after which late bytes have arrived
MOST_UNGUARDED = 24
SOON_S, BLIND_S = 0.01, 0.6  # within which a writer is stopped: after its first byte, unseen
OLD, WRITTEN, NEXT_OWNERS = 1.0, 7.0, 9.0


class Over(Enum):
    """The transport of the bytes: a connector, UCX's transports, and the place of both pools."""

    TCP = ("nixl", "tcp,self", "cpu")
    SHARED_MEMORY = ("nixl", "posix,self,tcp", "cpu")
    KERNEL = ("nixl", "posix,cma,self,tcp", "cpu")
    ZMQ = ("zmq", "", "cpu")
    CUDA_IPC = ("nixl", "", "cuda")
    ZMQ_OF_GPUS = ("zmq", "", "cuda")


class Fate(Enum):
    """The fate of the writer."""

    KILLED = "killed while our own thread is held up"
    FROZEN_THEN_KILLED = "frozen, given up, then killed"
    GOES_ON = "frozen, given up, goes on and says when it is over"
    KEPT_OUT = "frozen, given up, our end closed, goes on"


FATES: Final = {
    Over.TCP: tuple(Fate),  # only over a network is our end of it what keeps a live writer out
    Over.ZMQ: (Fate.KILLED, Fate.FROZEN_THEN_KILLED, Fate.KEPT_OUT),
    Over.ZMQ_OF_GPUS: (Fate.KILLED, Fate.FROZEN_THEN_KILLED, Fate.KEPT_OUT),
}
BESIDE_US: Final = (Fate.KILLED, Fate.FROZEN_THEN_KILLED, Fate.GOES_ON)


def shows(over: Over, fate: Fate) -> bool:
    """Whether pages are seen to be written, though our own thread may be held up."""
    return fate is not Fate.KILLED or over in (Over.KERNEL, Over.CUDA_IPC)


class Victim:
    """A pool that is written to, and a writer that can be killed and frozen."""

    def __init__(self, over: Over = Over.TCP) -> None:
        self.over = over
        self.kind, _, device = over.value
        self.memory = PageMemory(LARGE, NUM_PAGES, f"{device}:0" if device == "cuda" else device)
        connector = make(self.kind, self.memory, "decode-1")
        assert isinstance(connector, ThreadConnector)
        self.connector = connector
        self.connector.start()
        self._writers_place = {DEVICE: device}
        if device == "cuda":  # the last GPU, and it sees no other, like a worker
            self._writers_place["CUDA_VISIBLE_DEVICES"] = str(torch.cuda.device_count() - 1)
        self._numbers, self._writers = 0, 0
        self.fenced: set[str] = set()
        self.writer = self._new_writer()

    def _new_writer(self) -> RemoteReceiver:
        self._writers += 1
        place = self._writers_place
        return RemoteReceiver(self.kind, "large", NUM_PAGES, self._writers_name, **place)

    @property
    def _writers_name(self) -> str:  # of this life, like in a fleet
        return f"writer-{self._writers}"

    def reserve(self, count: int, *, first: int = 0) -> Reservation:
        self._numbers += 1
        pages = tuple(PageRef(page, self._numbers) for page in range(first, first + count))
        address = self.connector.describe()
        reserved = reservation(self.memory, address, pages, number=self._numbers)
        self.connector.send(Expect(reserved, self._writers_name))
        return reserved

    def meet(self) -> None:
        """One transfer, so that both ends are connected and neither waits for the other. Starts a
        writer if the last one has ended."""
        if self.writer.process.has_ended():
            self.writer = self._new_writer()
        met = self.reserve(1)
        self.writer.push(met, [0], WRITTEN)
        event = next_event(self.connector, met.transfer_id)
        assert isinstance(event, Arrived), event
        assert self.writer.hear(met.transfer_id)["event"] == "pushed"

    def hold_up(self, until: threading.Event, then: Callable[[Exchange], None]) -> None:
        """Holds up the connector's thread, which does something and is held up again for a while:
        whatever is in its sockets stays there meanwhile."""

        def stall() -> None:
            assert until.wait(DEADLINE_S)
            then(self.connector._exchange)
            time.sleep(STALLED_S)

        run_on_thread(self.connector, stall)

    def signal_writer(self, number: signal.Signals) -> None:
        self.writer.process.send_signal(number)

    def hear(self) -> None:
        """Takes in which transfers were fenced."""
        self.fenced |= {e.transfer_id for e in self.connector.poll() if isinstance(e, Fenced)}

    def kill_writer(self) -> None:
        self.signal_writer(signal.SIGKILL)
        self.writer.process.wait()

    def let_writer_go_on(self) -> None:
        """If it lives."""
        if not self.writer.process.has_ended():
            self.signal_writer(signal.SIGCONT)

    def replace_writer(self) -> None:
        """The next one starts once it is to be met."""
        self.writer.close()

    def fill(self, value: float) -> None:
        """All pages, and only once it is so: a GPU would do it some time."""
        self.memory.tensor.fill_(value)
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize()

    def holds(self, value: float) -> torch.Tensor:
        """[pages] bool, on the host: which hold this value everywhere."""
        return (self.memory.tensor.flatten(1) == value).all(1).cpu()

    def has_any(self, value: float) -> bool:
        """Whether a group of layers of any page begins with this value."""
        return bool((self.memory.tensor.flatten(2)[:, :, 0] == value).any())

    def close(self) -> None:
        self.writer.close()
        self.connector.close()


class Round:
    """Many transfers of one writer, which is stopped so long after the first byte of them."""

    def __init__(self, victim: Victim, fate: Fate, after_s: float, *, is_guarded: bool) -> None:
        self._victim = victim
        self._fate = fate
        self._after_s = after_s
        self._is_guarded = is_guarded
        self._given_up: list[Reservation] = []
        self._was_written = torch.zeros(NUM_PAGES, dtype=torch.bool)
        victim.meet()
        victim.fill(OLD)
        size = NUM_PAGES // TRANSFERS
        self._reserved = [victim.reserve(size, first=size * n) for n in range(TRANSFERS)]

    def run(self) -> Counter[str]:
        """Counts transfers; see `Tally`."""
        victim = self._victim
        self._force()
        self._await_fences()
        wrote_on = victim.holds(WRITTEN) & ~self._was_written
        victim.fill(NEXT_OWNERS)
        if self._fate is Fate.KEPT_OUT or not self._is_guarded:
            victim.let_writer_go_on()
        time.sleep(SETTLED_S + (STALLED_S if self._fate is Fate.KILLED else 0.0))
        return Counter(
            begun=_num_of(self._given_up, self._was_written),
            given_up=len(self._given_up),
            wrote_on=_num_of(self._given_up, wrote_on),
            spoilt=_num_of(self._reserved, ~victim.holds(NEXT_OWNERS)),
        )

    def _push(self) -> None:
        victim = self._victim
        for reserved in self._reserved:
            victim.writer.push(reserved, _ids(reserved), None)
        deadline = time.monotonic() + DEADLINE_S
        while shows(victim.over, self._fate) and not victim.has_any(WRITTEN):
            assert time.monotonic() < deadline, "nothing was ever written"
            time.sleep(0.0002)
        time.sleep(self._after_s)

    def _force(self) -> None:
        if self._fate is Fate.KILLED:
            self._kill_while_held_up()
            return
        victim = self._victim
        self._push()
        victim.signal_writer(signal.SIGSTOP)
        self._look()
        for reserved in self._reserved:
            victim.connector.send(Forget(reserved.transfer_id))
        if not self._is_guarded:
            self._fence(has_drained=True)
        elif self._fate is Fate.KEPT_OUT:
            self._fence(has_drained=False)
        else:
            self._nothing_is_fenced()
            self._end_frozen()

    def _kill_while_held_up(self) -> None:
        is_dead = threading.Event()
        self._victim.hold_up(is_dead, self._give_up_dead)
        self._push()
        self._victim.kill_writer()
        self._look()
        is_dead.set()

    def _give_up_dead(self, exchange: Exchange) -> None:
        for reserved in self._reserved:
            exchange.execute(Forget(reserved.transfer_id), 0.0)
        for reserved in self._reserved:
            exchange.execute(Fence(reserved.transfer_id, has_drained=not self._is_guarded), 0.0)

    def _end_frozen(self) -> None:
        if self._fate is Fate.FROZEN_THEN_KILLED:
            self._victim.kill_writer()
            self._fence(has_drained=False)
        else:
            self._victim.let_writer_go_on()
            self._hear_it_out()
            self._fence(has_drained=True)

    def _look(self) -> None:
        """All are given up; those count of which something is still to come."""
        self._was_written = self._victim.holds(WRITTEN)
        self._given_up = [r for r in self._reserved if not self._was_written[_ids(r)].all()]

    def _fence(self, *, has_drained: bool) -> None:
        for reserved in self._reserved:
            self._victim.connector.send(Fence(reserved.transfer_id, has_drained=has_drained))

    def _nothing_is_fenced(self) -> None:
        """Silence by itself frees no page of a one-sided writer."""
        time.sleep(SETTLED_S)
        self._victim.hear()
        is_one_sided = self._victim.kind == "nixl"
        assert not (is_one_sided and self._victim.fenced), "pages were freed by time alone"

    def _hear_it_out(self) -> None:
        """Makes the writer cancel its writes; it reports when none of them is in flight."""
        waiting = {reserved.transfer_id for reserved in self._reserved}
        for transfer_id in waiting:
            self._victim.writer.ask(do="cancel", transfer=transfer_id)
        while waiting:
            words = self._victim.writer.hear()
            if words.get("event") == "pushcancelled":
                waiting.discard(words["transfer"])

    def _await_fences(self) -> None:
        waiting = {reserved.transfer_id for reserved in self._reserved}
        deadline = time.monotonic() + DEADLINE_S
        while not waiting <= self._victim.fenced:
            assert time.monotonic() < deadline, "pages are never free again"
            time.sleep(0.001)
            self._victim.hear()
        self._victim.fenced.clear()


class Forcing:
    """Rounds over one transport, each a little sooner or later, as it takes."""

    def __init__(self, over: Over, seed: int) -> None:
        self._draw = random.Random(f"{seed} {over.name}")
        self._over = over
        self._within_s = {fate: SOON_S if shows(over, fate) else BLIND_S for fate in Fate}

    def run(self, count: int) -> Tally:
        """So many late writes, in turns of every fate."""
        tally: Tally = {}
        with contextlib.closing(Victim(self._over)) as victim:
            while sum(found["given_up"] for found in tally.values()) < count:
                for fate in FATES.get(self._over, BESIDE_US):
                    found = self.round(victim, fate, is_guarded=True)
                    tally[fate] = tally.get(fate, Counter()) + found
        return tally

    def round(self, victim: Victim, fate: Fate, *, is_guarded: bool) -> Counter[str]:
        """One round, with a writer that is whole afterwards."""
        after_s = self._draw.uniform(0.0, self._within_s[fate])
        found = Round(victim, fate, after_s, is_guarded=is_guarded).run()
        if found["given_up"] < TRANSFERS // 2:
            self._within_s[fate] *= 0.7
        if fate is not Fate.GOES_ON or not is_guarded:
            victim.replace_writer()
        return found

    def num_spoilt_unguarded(self, fate: Fate) -> tuple[int, int]:
        """(transfers spoilt, given up) in the first round that spoils any without the guard; each
        has a pool of its own."""
        given_up = 0
        for _ in range(MOST_UNGUARDED):
            with contextlib.closing(Victim(self._over)) as victim:
                found = self.round(victim, fate, is_guarded=False)
            given_up += found["given_up"]
            if found["spoilt"]:
                break
        return found["spoilt"], given_up


Tally = dict[Fate, Counter[str]]
"""Transfers: those `given_up` with pages still to come, of them those of which pages were there
(`begun`), that `wrote_on` before they were fenced, and that were `spoilt` afterwards."""


def unguarded(over: Over) -> Fate | None:
    """The fate that spoils pages without the guard. Over ZMQ the receiver places pages itself."""
    if over in (Over.ZMQ, Over.ZMQ_OF_GPUS):
        return None
    return Fate.KILLED if over is Over.TCP else Fate.GOES_ON


@contextlib.contextmanager
def carried_by(over: Over) -> Iterator[None]:
    """Has UCX use only these transports, here and in processes started meanwhile."""
    tls = over.value[1]
    with patch.dict(os.environ, {"UCX_TLS": tls} if tls else {}):
        yield


def tell(over: Over, tally: Tally, seconds: float) -> int:
    """Prints the results; returns how many pages were spoilt."""
    total, name = sum(tally.values(), Counter()), over.name.lower()
    print(f"{total['given_up']} transfers over {name} were given up before they ended,")
    print(f"{total['spoilt']} spoilt pages of others, in {seconds:.0f} s:")
    for fate, found in tally.items():
        print(
            f"  {fate.value}: {found['given_up']}, {found['begun']} of which had pages there; "
            f"{found['wrote_on']} wrote on until they were fenced, {found['spoilt']} afterwards"
        )
    return total["spoilt"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtransfer.late_writes", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="late writes, of all kinds")
    names = {over.name.lower(): over for over in Over}
    parser.add_argument("--over", choices=names, action="append", help="else all there are")
    asked = parser.parse_args()
    usual = [over for over in Over if torch.cuda.is_available() or over.value[2] == "cpu"]
    chosen = [names[name] for name in asked.over or ()] or usual
    is_wrong = False
    for over in chosen:
        with carried_by(over):
            began, forcing = time.monotonic(), Forcing(over, asked.seed)
            tally = forcing.run(-(-asked.count // len(chosen)))
            is_wrong |= tell(over, tally, time.monotonic() - began) > 0
            if (fate := unguarded(over)) is not None:
                spoilt, given_up = forcing.num_spoilt_unguarded(fate)
                print(f"  without the guard, {fate.value}: {spoilt} of {given_up} spoilt pages")
                is_wrong |= spoilt == 0
        sys.stdout.flush()
    return int(is_wrong)


def _num_of(transfers: Sequence[Reservation], pages: torch.Tensor) -> int:
    """Those that have any of these pages."""
    return sum(bool(pages[_ids(reserved)].any()) for reserved in transfers)


def _ids(reserved: Reservation) -> list[int]:
    return [page.page_id for page in reserved.pages]


if __name__ == "__main__":
    sys.exit(main())
