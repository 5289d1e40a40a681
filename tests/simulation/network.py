"""Hosts, the lines between them, and faults in transit.

A line is one direction of one connection: messages come out in order, later. While its hosts are
cut off from each other nothing arrives; if that lasts, keepalive breaks the line, and messages that
had not arrived are lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .clock import Action, Clock

KEEPALIVE_S = 1.5  # how long a line may stand still
LATENCY_S = (0.0005, 0.01)


@dataclass(slots=True)
class Network:
    """Which hosts reach each other now."""

    clock: Clock
    _cuts: dict[frozenset[str], int] = field(default_factory=dict)  # how many lie on a pair
    _delays: dict[frozenset[str], tuple[float, float]] = field(default_factory=dict)
    _lines: list[Line] = field(default_factory=list)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two hosts."""
        return frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Lets nothing pass for so long; two cuts at once end with the later one."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self.clock.after(seconds, lambda: self._heal(pair))
        self.clock.after(KEEPALIVE_S, lambda: self._break(pair))

    def slow(self, one: str, other: str, delay_s: float, seconds: float) -> None:
        """Lets messages between two hosts take up to this much longer, for a while."""
        self._delays[frozenset((one, other))] = delay_s, self.clock.now + seconds

    def latency_s(self, pair: frozenset[str]) -> float:
        """The time of the next message between two hosts."""
        delay_s, until = self._delays.get(pair, (0.0, 0.0))
        seconds = self.clock.draw.uniform(*LATENCY_S)
        return seconds + self.clock.draw.uniform(0, delay_s) if self.clock.now < until else seconds

    def add(self, line: Line) -> None:
        """Takes note of a line, and forgets those that have ended."""
        if len(self._lines) > 64:
            self._lines = [one for one in self._lines if one.is_open]
        self._lines.append(line)

    def break_one(self, source: str) -> None:
        """Resets one line that leaves a host."""
        lines = [line for line in self._lines if line.is_open and line.source == source]
        if lines:
            self.clock.draw.choice(lines).break_off()

    def _heal(self, pair: frozenset[str]) -> None:
        self._cuts[pair] -= 1
        if self._cuts[pair]:
            return
        del self._cuts[pair]
        for line in list(self._lines):
            if line.pair == pair:
                line.flush()

    def _break(self, pair: frozenset[str]) -> None:
        if pair not in self._cuts:
            return
        for line in list(self._lines):
            if line.pair == pair:
                line.break_off()


class Line:
    """One direction of a connection from one host to another."""

    def __init__(
        self,
        network: Network,
        source: str,
        target: str,
        on_break: Action = lambda: None,
        delay_s: float = 0.0,
    ) -> None:
        """`on_break` receives its end; `delay_s` is the most that it adds to the latency."""
        self.source = source
        self.pair = frozenset((source, target))
        self.is_open = True
        self._network = network
        self._target = target
        self._on_break = on_break
        self._delay_s = delay_s
        self._last_at = 0.0
        self._held: deque[Action] = deque()
        network.add(self)

    def send(self, arrive: Action) -> None:
        """Lets something happen at the other end, unless the line breaks before."""
        clock = self._network.clock
        latency_s = self._network.latency_s(self.pair)
        if self._delay_s:
            latency_s += clock.draw.uniform(0.0, self._delay_s)
        self._last_at = max(self._last_at, clock.now + latency_s)
        clock.after(self._last_at - clock.now, lambda: self._arrive(arrive))

    def break_off(self) -> None:
        """Ends it: messages that have not arrived are lost, and both ends notice it."""
        if self.is_open:
            self.is_open = False
            self._held.clear()
            self._on_break()

    def flush(self) -> None:
        """Lets everything arrive that was held back."""
        while self._held and self.is_open:
            self._held.popleft()()

    def _arrive(self, arrive: Action) -> None:
        if not self.is_open:
            return
        if self._held or self._network.is_cut(self.source, self._target):
            self._held.append(arrive)
            if len(self._held) == 1:
                self._network.clock.after(KEEPALIVE_S, self._give_up)
        else:
            arrive()

    def _give_up(self) -> None:
        if self._held and self._network.is_cut(self.source, self._target):
            self.break_off()


class Call:
    """A stream between two hosts, in both directions; both ends notice its end once."""

    def __init__(self, network: Network, caller: str, server: str) -> None:
        self._network = network
        self._there = Line(network, caller, server, self.break_off)
        self._back = Line(network, server, caller, self.break_off)
        self.on_caller_lost: Action = _ignore  # at the server
        self.on_server_lost: Action = _ignore  # at the caller
        self._is_broken = False

    def ask(self, arrive: Action) -> None:
        """From the caller to the server."""
        self._there.send(arrive)

    def answer(self, arrive: Action) -> None:
        """From the server to the caller."""
        self._back.send(arrive)

    def cancel(self) -> None:
        """By the caller, which needs no more messages."""
        self.on_server_lost = _ignore
        self._there.send(lambda: self.on_caller_lost())

    def close(self) -> None:
        """By the server, which has sent everything."""
        self.on_caller_lost = _ignore

    def break_off(self) -> None:
        """Resets it: both ends notice it, the server later than the caller."""
        if self._is_broken:
            return
        self._is_broken = True
        self._there.break_off()
        self._back.break_off()
        clock = self._network.clock
        clock.after(clock.draw.uniform(0.0, 0.2), lambda: self.on_server_lost())
        clock.after(clock.draw.uniform(0.0, 1.0), lambda: self.on_caller_lost())


def _ignore() -> None:
    """Its events have no reader any more."""
