"""Workers of a simulated day as their measured times, second by second.

Requests are amounts, not objects. Those of one second wait together, and their order is kept. A
request is good if its first block comes in time, and its gaps keep the objective. This model shares
measured times with the planner, and none of its formulas.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from effuse.router.planner import AnswerPace, PromptTime, Times

MEASURED = Path(__file__).parents[2] / "benchmarks/gpu_xpyd.json"
EVEN_SEATS = 0.95  # share of the seats that are used before some worker has none left
CHANGE_S = 1.0  # a worker's time between two roles; its answers go on meanwhile
PIECE_TOKENS = 8192


def measured_times() -> Times:
    """The times of one H200."""
    prompts, answers = [], []
    measured: dict[str, Any] = json.loads(MEASURED.read_text())
    for shape, limits in measured["limits"].items():
        prompt, answer = (int(part) for part in shape.split("/"))
        prompts.append(PromptTime(prompt, limits["prefill_s"]))
        for one in limits["decode"]:
            pace = one["batch"], one["tokens_per_s"], one["gap_p99_s"] or 0.0
            answers.append(AnswerPace(*pace, prompt + answer / 2))
    return Times(tuple(prompts), tuple(answers), piece_tokens=PIECE_TOKENS)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and answers."""

    prompt: float
    answer: float


@dataclass(frozen=True, slots=True)
class Goals:
    """The objectives."""

    first_block_s: float = 3.0
    gap_s: float = 0.16


class Paces:
    """The times for requests of certain lengths, by any batch: linear between measured batches."""

    def __init__(self, times: Times, lengths: Lengths, goals: Goals) -> None:
        self.prompt, self.answer = lengths.prompt, lengths.answer
        self.context = lengths.prompt + lengths.answer / 2
        self.prompt_s = times.prompt_s(lengths.prompt)
        self.piece_s = times.piece_s(lengths.prompt)
        self.paces = times.paces(self.context)
        self.goals = goals
        self.most_batch = self._most_batch()

    def at(self, batch: float) -> tuple[float, float]:
        """Tokens a second, and the seconds of a gap."""
        paces = self.paces
        if batch <= paces[0].batch:
            return paces[0].tokens_per_second * batch / paces[0].batch, paces[0].gap_s
        for low, high in pairwise(paces):
            if batch <= high.batch:
                part = (batch - low.batch) / (high.batch - low.batch)
                rate = low.tokens_per_second + part * (
                    high.tokens_per_second - low.tokens_per_second
                )
                return rate, low.gap_s + part * (high.gap_s - low.gap_s)
        return paces[-1].tokens_per_second, paces[-1].gap_s * batch / paces[-1].batch

    def most_help(self, batch: float) -> float:
        """The share of its time that a worker can spend on prompts within its gaps."""
        room_s = self.goals.gap_s - self.at(batch)[1]
        return min(1.0, max(0, math.floor(room_s / self.piece_s)) * self.piece_s / self.goals.gap_s)

    def _most_batch(self) -> float:
        """The largest batch whose gaps keep the objective. Operators set it as seats."""
        batches = [one.batch for one in self.paces]
        steps = [batches[0] + number / 4 for number in range(int(4 * batches[-1]))]
        return max((one for one in steps if self.at(one)[1] <= self.goals.gap_s), default=1.0)


@dataclass(slots=True)
class Cohort:
    """Requests of one second that wait for their first block."""

    arrived: float
    number: float
    is_counted: bool = True  # False: it lost its worker, and has been counted as bad


@dataclass(frozen=True, slots=True)
class Staff:
    """How many workers do what now."""

    prefill: int
    decode: int
    both: int = 0
    leaving: int = 0  # of the prefill workers, those that have just begun
    arriving: int = 0  # of the decode workers, those that have just begun

    @property
    def answering(self) -> int:
        """Workers with seats."""
        return self.decode + self.both


@dataclass(slots=True)
class State:
    """Requests in a fleet."""

    waiting: deque[Cohort] = field(default_factory=deque)
    streams: float = 0.0  # answers that are written
    good: float = 0.0
    bad: float = 0.0

    def copy(self) -> State:
        """The same state, to go on from in another way."""
        waiting = deque(replace(one) for one in self.waiting)
        return State(waiting, self.streams, self.good, self.bad)

    @property
    def num_waiting(self) -> float:
        """Requests without a worker."""
        return sum(one.number for one in self.waiting)

    def lose(self, share: float, now: float) -> None:
        """Workers with this share of the answers end. Other workers go on with these, too late."""
        lost = share * self.streams
        self.streams -= lost
        self.bad += lost
        if lost:
            self.waiting.appendleft(Cohort(now, lost, is_counted=False))

    def step(self, staff: Staff, paces: Paces, now: float, arrivals: float) -> None:
        """One second."""
        self.waiting.append(Cohort(now, arrivals))
        self._drop_late(now, paces)
        batch = self.streams / max(1, staff.answering)
        rate, gap_s = paces.at(batch)
        seats = EVEN_SEATS * (staff.answering - staff.arriving) * paces.most_batch - self.streams
        # Within a second answers end, and their seats are taken again.
        turnover = staff.answering * rate / paces.answer
        begun = min(self.num_waiting, max(0.0, seats) + turnover)
        prefilling = (staff.prefill - staff.leaving) / paces.prompt_s
        rest = max(0.0, begun - prefilling)
        within = paces.most_help(batch)
        part, is_late = 0.0, 0.0
        if staff.answering and rest:
            asked = rest * paces.prompt_s / staff.answering
            # Without other workers those that do both compute every prompt, whatever the gaps.
            most = 1.0 if staff.both and not staff.prefill else within
            part = min(most, asked)
            is_late = float(part > within + 1e-9)
        begun = min(begun, prefilling + part * staff.answering / paces.prompt_s)
        servers = max(1.0, staff.prefill + max(part, within) * staff.answering)
        self._begin(begun, servers, paces, now, gap_s, is_late)
        ended = min(self.streams, (1 - part) * staff.answering * rate / paces.answer)
        self.streams -= ended

    def _drop_late(self, now: float, paces: Paces) -> None:
        """Requests that cannot keep their time any more are refused, and cost nothing."""
        most_s = paces.goals.first_block_s - paces.prompt_s - 2 * paces.goals.gap_s
        while self.waiting and now - self.waiting[0].arrived > most_s:
            one = self.waiting.popleft()
            self.bad += one.number * one.is_counted

    def _begin(
        self, number: float, servers: float, paces: Paces, now: float, gap_s: float, is_late: float
    ) -> None:
        """`servers`: workers that compute prompts, or shares of them."""
        self.streams += number
        busy = min(1.0, number * paces.prompt_s / servers)
        while number > 1e-9 and self.waiting:
            one = self.waiting[0]
            part = min(one.number, number)
            one.number, number = one.number - part, number - part
            if one.number <= 1e-9:
                self.waiting.popleft()
            if one.is_counted:
                left_s = paces.goals.first_block_s - paces.prompt_s - gap_s - (now - one.arrived)
                # The wait of M/D/m in heavy traffic is exponential.
                spare = 2 * servers * max(0.01, 1 - busy) / paces.prompt_s
                late = math.exp(-spare * max(0.0, left_s))
                kept = (1 - late) * (gap_s <= paces.goals.gap_s * 1.001) * (1 - is_late)
                self.good += part * kept
                self.bad += part * (1 - kept)


def best_minute(
    state: State,
    around: int,
    workers: Sequence[int],
    seconds: Sequence[tuple[float, float, float, Paces]],
) -> tuple[int, State]:
    """The number of prefill workers with which a minute ends best, and the state after it.

    `workers`: those alive in each second; `seconds`: time, arrivals, share of answers that is lost,
    and paces. `around`: where the search begins."""
    most = max(workers)
    tried: dict[int, tuple[float, State]] = {}

    def value(prefill: int) -> float:
        if prefill not in tried:
            found = state.copy()
            for alive, (now, arrivals, lost, paces) in zip(workers, seconds, strict=True):
                found.lose(lost, now)
                found.step(staff_of(min(prefill, alive - 1), alive), paces, now, arrivals)
            tried[prefill] = found.good - 1e-3 * found.num_waiting, found
        return tried[prefill][0]

    best, width = max(0, min(around, most - 1)), max(1, most // 4)
    value(0)
    while width:
        near = [max(0, min(most - 1, best + step)) for step in (-width, 0, width)]
        found = max(near, key=lambda one: (value(one), one == best))
        width, best = (width, found) if found != best else (width // 2, best)
    best = max((best, 0), key=value)
    return best, tried[best][1]


def staff_of(prefill: int, workers: int) -> Staff:
    """Roles without any change under way."""
    return Staff(prefill, workers - prefill) if prefill else Staff(0, 0, both=workers)
