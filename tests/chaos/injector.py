"""Carries a plan's faults out, one after the other, and sees each of them happen.

The fleet can bear a fault as long as another worker of the same kind is ready, so that at least one
of each kind is alive at any time. There are no other waits, so several may be away together.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Set

import psutil
from chaos.clients import CLIENTS, looked_up
from chaos.ledger import Exchange, Injected, Ledger, Standing
from chaos.plan import OF_LINKS, OF_REDIS, PAUSES, Fault, Kind
from chaos.subject import NotThere, Subject
from e2e.client import Client, all_at_once
from fault_proxy import FaultProxy, Harm
from slowness import patient

from effuse.v1 import generation_pb2 as pb

PATIENCE_S = patient(180.0)  # for a worker to come back: restarts pause up to 60 s
SEEN_S = patient(30.0)  # for a signal to show
DRAIN_S = patient(75.0)  # for a worker to end in order
_LOOK_S = 10.0
_POLL_S = 0.2
_MARKER = "chaos:marker"
_ENGINES = (Kind.ENGINE_KILLED, Kind.ENGINE_PAUSED)
_OF_KEYS = (Kind.REDIS_EMPTIED, Kind.REDIS_ROLLED_BACK)


class Injector:
    """One run's faults."""

    def __init__(
        self,
        subject: Subject,
        proxy: FaultProxy,
        client: Client,
        ledger: Ledger,
        *,
        overlaps: bool = False,
    ) -> None:
        """`proxy` carries all calls to workers. `overlaps`: other faults occur while an engine or a
        front is stopped.
        """
        self._overlaps = overlaps
        self._still: list[tuple[float, psutil.Process]] = []  # that go on then
        self._subject = subject
        self._proxy = proxy
        self._client = client
        self._ledger = ledger
        self._ended: set[str] = set()  # lives that were killed, which may be listed for a while
        self._away: dict[str, Injected] = {}  # by target: hit, and not seen ready since

    def carry_out(self, plan: Iterable[Fault], tell: Callable[[Injected], None]) -> None:
        """All faults; ends early where the fleet cannot bear the next one for too long."""
        for fault in plan:
            deadline = time.monotonic() + PATIENCE_S
            while (injected := self._try(fault)) is None:
                if time.monotonic() > deadline:
                    return
            tell(injected)
        self._wait(lambda: not (self._away or self._still), PATIENCE_S)

    def _can_bear(self, fault: Fault, lull_s: float) -> bool:
        """Whether it can, and still can after a lull, because a worker may be lost by itself."""

        def can() -> bool:
            ready = self._ready()
            others = {name for name in ready if name.startswith(fault.role)} - {fault.target}
            is_there = fault.target in ready and bool(others)
            return fault.target not in self._away and (is_there or fault.kind in OF_REDIS)

        return self._wait(can, _LOOK_S) and not self._wait(lambda: False, lull_s) and can()

    def _ready(self) -> set[str]:
        """Workers that are ready in a life that was not ended. Records returned ones."""
        ready = {name for name, life in self._lives().items() if life not in self._ended}
        back = ready | ({"redis"} if self._subject.redis_answers() else set())
        for name in self._away.keys() & back:
            injected = self._away.pop(name)
            if injected not in self._away.values():
                injected.recovered_s = time.monotonic() - injected.at_s
        return ready

    def _lives(self) -> dict[str, str]:
        """Ready workers and routers, each with a value that distinguishes its lives."""
        lives = {name: one.incarnation for name, one in self._subject.workers().items()}
        return lives | {name: f"pid {pid}" for name, pid in self._subject.routers().items()}

    def _wait(self, done: Callable[[], bool], within_s: float) -> bool:
        """Whether it became true in time. Records processes that return meanwhile."""
        deadline = time.monotonic() + within_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self._ready()
            self._let_go_on()
            time.sleep(_POLL_S)
        return True

    def _let_go_on(self) -> None:
        """Continues processes whose time is over."""
        now = time.monotonic()
        for _, victim in (one for one in self._still if one[0] <= now):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()
        self._still = [one for one in self._still if one[0] > now]

    # One fault.

    def _try(self, fault: Fault) -> Injected | None:
        """Carries the fault out, unless the fleet cannot bear it or a victim has just ended."""
        if self._can_bear(fault, fault.lull_s):
            with contextlib.suppress(NotThere, psutil.NoSuchProcess):
                return self._inject(fault)
        return None

    def _inject(self, fault: Fault) -> Injected:
        """Carries the fault out. Raises NotThere or psutil.NoSuchProcess if a victim ended by
        itself: then there was no fault."""
        names, lives = {fault.target}, self._lives()
        if fault.kind is Kind.OTHERS_KILLED:
            names = {name for name in self._ready() if name.startswith(fault.role)}
            names -= {fault.target, *self._away}
        in_flight = self._ledger.in_flight()
        running = all_at_once(lambda one: self._standing(one, names), in_flight, CLIENTS)
        injected = Injected(fault=fault, at_s=time.monotonic(), evidence="", running=running)
        injected.evidence, has_ended = self._hit(injected, names)
        if has_ended:
            self._ended |= {lives[name] for name in names & lives.keys()}
        self._ledger.injected.append(injected)
        for name in names:  # now, because stopped processes are listed for a while
            self._away[name] = injected
        return injected

    def _standing(self, exchange: Exchange, names: Set[str]) -> Standing:
        """Place of a request, seen from the victims of a fault."""
        found = looked_up(self._client, exchange.name)
        if found.state != pb.REQUEST_STATE_RUNNING:
            state = "waits" if found.state == pb.REQUEST_STATE_QUEUED else "comes or goes"
        elif found.decode_worker in names:
            blocks = "blocks came" if exchange.commits else "no block came"
            state = f"decodes there, {blocks if exchange.mode.is_streamed else 'unary'}"
        elif found.prefill_worker in names and not exchange.commits:
            state = "prefilled there"
        else:
            state = "runs elsewhere"
        return Standing(exchange.number, state)

    def _hit(self, injected: Injected, names: Set[str]) -> tuple[str, bool]:
        """Does it now. Returns how it was seen to happen, empty if it was not, and whether it ended
        lives. Raises NotThere or psutil.NoSuchProcess."""
        fault = injected.fault
        if fault.kind in _OF_KEYS:
            return self._change_keys(fault), False
        if fault.kind is Kind.REDIS_KILLED:
            return self._keep_down(fault), False
        if fault.kind in OF_LINKS:
            return self._harm(fault, OF_LINKS[fault.kind]), False
        victims = self._victims(fault, names)
        for victim in victims:
            if _has_ended(victim):
                raise NotThere(fault.target)
        injected.at_s = time.monotonic()  # to find them took a while
        if fault.kind in PAUSES:
            return self._pause(victims[0], fault)
        return _end(victims, fault.kind), True

    def _victims(self, fault: Fault, names: Set[str]) -> list[psutil.Process]:
        """The process that is hit, and those that must end with it."""
        if fault.kind in OF_REDIS:
            return [self._subject.redis()]
        if fault.kind is Kind.ROUTER_KILLED:
            return [self._subject.router(fault.target)]
        if fault.kind is Kind.OTHERS_KILLED:
            return [self._subject.engine(name) for name in names]
        engine = self._subject.engine(fault.target)
        if fault.kind in _ENGINES:
            return [engine]
        front = self._subject.front(fault.target)
        return [front] if fault.kind is Kind.FRONT_PAUSED else [front, engine]

    def _pause(self, victim: psutil.Process, fault: Fault) -> tuple[str, bool]:
        """As `_hit`. A front ends its engine if that stands still for too long; no other victim may
        end. Raises NotThere if an engine ended before it was seen to stand still."""
        is_engine = fault.kind is Kind.ENGINE_PAUSED
        began = time.monotonic()
        victim.suspend()
        if self._overlaps and fault.kind is not Kind.REDIS_PAUSED:
            self._still.append((began + fault.hold_s, victim))
            stands = f"pid {victim.pid} stands still for {fault.hold_s:.1f} s"
            return (stands if _stops(victim) else "", False)
        try:
            if not _stops(victim):
                if is_engine and _has_ended(victim):
                    raise NotThere(fault.target)
                return "", False
            is_deaf = fault.kind is not Kind.REDIS_PAUSED or not self._subject.redis_answers()
            self._wait(lambda: _has_ended(victim), fault.hold_s)
            told = f"pid {victim.pid} stood still for {time.monotonic() - began:.1f} s"
            if _is_stopped(victim):
                return (told if is_deaf else "", False)
            # A process that was let go on lives; one that was ended may take a while to be gone.
            if is_engine and _ends(victim):
                return f"{told} and was ended", True
            return "", False
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()

    def _harm(self, fault: Fault, harm: Harm) -> str:
        """Does harm to the calls to a worker for a while, and until some was seen."""
        workers = self._subject.workers()
        if fault.target not in workers:
            raise NotThere(fault.target)
        address = workers[fault.target].address
        self._proxy.harm(address, harm)
        self._wait(lambda: False, fault.hold_s)
        self._wait(lambda: self._proxy.harmed(address) > 0, SEEN_S)
        count = self._proxy.heal(address)
        return f"{count} connections or pieces to {address} were {harm.value}" if count else ""

    def _keep_down(self, fault: Fault) -> str:
        """Kills Redis, and each replacement, as long as the fault lasts."""
        killed: dict[int, psutil.Process] = {}

        def kill() -> bool:
            with contextlib.suppress(NotThere, psutil.NoSuchProcess):
                one = self._subject.redis()
                one.kill()
                killed[one.pid] = one
            return False

        kill()
        self._wait(kill, fault.hold_s)
        _, alive = psutil.wait_procs(killed.values(), timeout=SEEN_S)
        gone = "pid " + ", ".join(map(str, killed)) + " gone"
        return gone if killed and not [one for one in alive if one.is_running()] else ""

    def _change_keys(self, fault: Fault) -> str:
        """Empties Redis, or restores its content from a while ago."""
        with self._subject.redis_client() as client:
            held: dict[bytes, tuple[bytes, int]] = {}
            if fault.kind is Kind.REDIS_ROLLED_BACK:
                for key in client.scan_iter(match="*"):
                    if (value := client.dump(key)) is not None:
                        held[key] = value, max(0, client.pttl(key))
                self._wait(lambda: False, fault.hold_s)
            client.set(_MARKER, 1)
            with client.pipeline(transaction=False) as step:  # rights of its user
                step.flushall()
                for key, (value, left_ms) in held.items():
                    step.restore(key, left_ms, value, replace=True)  # it may be there again
                step.execute()
            if client.exists(_MARKER):
                return ""
            back = f", and {len(held)} are as before" if held else ""
            return f"a key that was set is gone{back}"


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _has_ended(process: psutil.Process) -> bool:
    """Also before its parent has collected its exit status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return True


def _stops(process: psutil.Process) -> bool:
    """Whether it stands still soon. Looked at often, because its front may end it for that."""
    return _comes_true(lambda: _is_stopped(process), process)


def _ends(process: psutil.Process) -> bool:
    """Whether it ends soon."""
    return _comes_true(lambda: _has_ended(process), process)


def _comes_true(state: Callable[[], bool], process: psutil.Process) -> bool:
    """Whether a process is in that state soon; False as soon as it has ended in another one."""
    deadline = time.monotonic() + SEEN_S
    while not state():
        if _has_ended(process) or time.monotonic() > deadline:
            return state()  # which may have come true since
        time.sleep(0.001)
    return True


def _end(victims: list[psutil.Process], kind: Kind) -> str:
    """Sends the signal to those that are hit; how all were seen to end, or nothing."""
    is_drain = kind is Kind.WORKER_DRAINED
    for victim in victims if kind is Kind.OTHERS_KILLED else victims[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended in this instant
            victim.send_signal(signal.SIGTERM if is_drain else signal.SIGKILL)
    _, alive = psutil.wait_procs(victims, timeout=DRAIN_S if is_drain else SEEN_S)
    gone = "pid " + ", ".join(str(one.pid) for one in victims) + " gone"
    return gone if not [one for one in alive if one.is_running()] else ""
