"""How many prompt tokens a step may compute, so that the answers beside it keep their gaps.

A piece of a prompt in a step lengthens the present gap of each answer in the batch. Let G be the
objective of an answer for its gaps, and e the seconds since its last block. If its next block needs
n more steps of s seconds, it has room for `SAFE` G - e - n s seconds of prompts. A step may take
the room of the answer that has least. Prompts that can be split get a piece of that size. A
bidirectional prompt waits until the whole of it fits. If the oldest prompt was given nothing for
`PATIENCE_S` seconds, it gets a piece in any case, so that none waits forever.

The engine measures s by the size of the batch, n, and the seconds that pieces add by their size.
Before any piece was measured, a token of it counts like one of an answer.
Pure: moments are arguments, in seconds of one monotonic clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from effuse.decode_worker.executor import Share
from effuse.decode_worker.request import BlockCost, DecodeRequest, LastBlock
from effuse.decode_worker.scheduler import Demand

SAFE: Final = 0.9
"""Share of an objective that is planned for, because steps vary."""
MARGIN: Final = 2.0
"""Mean deviations beyond the mean number of steps for a block."""
PATIENCE_S: Final = 2.0
FIRST_PIECE: Final = 256
"""Tokens of a piece before any was measured, and of one that does not fit."""
GAIN: Final = 1 / 8


@dataclass(slots=True)
class Average:
    """Exponentially weighted mean and mean deviation; the first values have equal weights."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def high(self) -> float:
        """A value that most do not exceed."""
        return self.mean + self.deviation

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        gain, off = max(GAIN, 1 / self.count), value - self.mean
        if self.count > 1:
            self.deviation += gain * (abs(off) - self.deviation)
        self.mean += gain * off


class StepTimes:
    """Measured times of an engine's steps."""

    def __init__(self) -> None:
        self._steps: dict[int, Average] = {}  # without prompts, by doubling batch
        self._pieces: dict[int, tuple[Average, Average]] = {}  # tokens, seconds by doubling tokens
        self._per_gap = Average()
        self._row_s = math.inf  # least seconds of a token of an answer in a step
        self.prompts_s = 0.0  # seconds that all pieces have added

    def note_step(
        self, batch: int, tokens: int, pieces: int, seconds: float, rows: int = 0
    ) -> None:
        """A step of `batch` answers took so long, with so many prompt tokens in `pieces`. `rows`:
        tokens of answers in it. Of two steps whose ends were seen together the second shows no
        time, and does not count."""
        if seconds <= 0:
            return
        if not pieces:
            self._steps.setdefault(batch.bit_length(), Average()).add(seconds)
            if rows:
                self._row_s = min(self._row_s, self._steps[batch.bit_length()].mean / rows)
            return
        means = self._pieces.setdefault((tokens // pieces).bit_length(), (Average(), Average()))
        means[0].add(tokens / pieces)
        added_s = max(0.0, seconds - self._step(batch).mean)
        means[1].add(added_s / pieces)
        self.prompts_s += added_s if self._steps else 0.0

    def note_gap(self, steps: int) -> None:
        """An answer needed so many steps from one block to the next."""
        self._per_gap.add(steps)

    @property
    def has_pieces(self) -> bool:
        """Whether a piece was measured, and a step without any."""
        return bool(self._pieces and self._steps)

    @property
    def gap_steps(self) -> float:
        """Steps that few gaps exceed."""
        return max(1.0, self._per_gap.mean + MARGIN * self._per_gap.deviation)

    def step_s(self, batch: int) -> float:
        """Seconds of a step of so many answers; of the next larger measured batch, if any."""
        return self._step(batch).high

    def _step(self, batch: int) -> Average:
        sizes = sorted(self._steps) or [0]
        size = next((one for one in sizes if one >= batch.bit_length()), sizes[-1])
        return self._steps.get(size, Average())

    @property
    def least_step_s(self) -> float:
        """Seconds of a step of the fastest measured batch."""
        return min((one.high for one in self._steps.values()), default=0.0)

    def piece_s(self, tokens: float, spread: float = 1.0) -> float:
        """Seconds that a piece adds: linear between measured sizes, from 0, and beyond them.
        `spread`: mean deviations beyond the mean."""
        low, low_s = 0.0, 0.0
        for high, high_s in self._points(spread):
            if tokens <= high:
                return low_s + (tokens - low) * (high_s - low_s) / (high - low)
            low, low_s = high, high_s
        if not low:  # one of an answer takes no less time
            return 0.0 if math.isinf(self._row_s) else self._row_s * tokens
        return low_s * tokens / low

    def tokens_within(self, seconds: float) -> float:
        """Tokens of the largest piece that adds at most so many seconds."""
        low, low_s = 0.0, 0.0
        for high, high_s in self._points():
            if seconds < high_s:
                return low + (seconds - low_s) * (high - low) / (high_s - low_s)
            low, low_s = high, high_s
        if not low:
            return seconds / self._row_s if self._row_s < math.inf else FIRST_PIECE * (seconds > 0)
        return low * seconds / low_s if low_s else math.inf

    def _points(self, spread: float = 1.0) -> list[tuple[float, float]]:
        """Tokens and seconds of measured pieces; a larger piece never takes less time."""
        found: list[tuple[float, float]] = []
        pieces = (
            (one.mean, two.mean + spread * two.deviation) for one, two in self._pieces.values()
        )
        for tokens, seconds in sorted(pieces):
            found.append((tokens, max(seconds, found[-1][1] if found else 0.0)))
        return found


class Gap(NamedTuple):
    """The present gap of an answer."""

    limit_s: float  # its objective
    elapsed_s: float = 0.0  # since its last block
    steps: int = 0  # since then


def room_s(gaps: Iterable[Gap], times: StepTimes, batch: int, ahead_s: float = 0.0) -> float:
    """Seconds of prompts that the next step may take; infinite without an objective that can be
    kept. `ahead_s`: those of launched steps that have not ended."""
    steps, least = times.gap_steps, math.inf
    for gap in gaps:
        limit_s = SAFE * gap.limit_s
        if steps * times.least_step_s >= limit_s:
            continue  # not even a small batch without prompts keeps it
        left = max(1.0, steps - gap.steps) * times.step_s(batch)
        least = min(least, limit_s - gap.elapsed_s - left - ahead_s)
    return max(0.0, least)


@dataclass(slots=True)
class Launch:
    """A launched step: its answers, and the prompt tokens that it computes."""

    began_s: float
    batch: int
    tokens: int
    rows: int = 0  # tokens of the answers
    pieces: int = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = min(1, self.tokens)

    def follow(self, earlier: "Launch") -> None:
        """Counts the prompts of `earlier`, a step without answers whose end was not seen."""
        self.began_s = earlier.began_s
        self.tokens += earlier.tokens
        self.pieces += earlier.pieces


class Room:
    """The measured times of an engine, and the room in its present gaps."""

    def __init__(self, most_tokens: int, *, overlaps: bool = False) -> None:
        """most_tokens: those of a step. overlaps: steps of other requests run at the same time, so
        a step takes from its own launch to its end."""
        self._overlaps = overlaps
        self.times = StepTimes()
        self.fits = math.inf  # prompt tokens that may be launched now
        self.offer = (0, 0)
        """Tokens of the largest piece that fits into a new gap of the latest requests, and tokens a
        second of such pieces; 0 before one had an objective. While there is none it stays, because
        prompts that only an idle engine takes would wait for the answers that come next."""
        self.is_overdue = False
        """Whether prompts have waited for so long that one need not fit."""
        self._most_tokens = most_tokens
        self._oldest: DecodeRequest | None = None  # of the prompts at the last look
        self._moved_s = -math.inf  # the last time that it was another one, or got a piece
        self._has_limits = False  # whether a request had an objective
        self._launched: deque[Launch] = deque()
        self._unseen: Launch | None = None  # prompts, before the next step of answers
        self._num_ended = 0
        self._batch = 1  # answers in the step that ended last
        self._ended_s = -math.inf

    def look(
        self, running: Sequence[DecodeRequest], demands: Sequence[Demand], now: float
    ) -> float:
        """Prompt tokens that the coming step of these requests and demands may have."""
        gaps = [gap for one in running if (gap := _gap_of(one, now)) is not None]
        self._has_limits = self._has_limits or bool(gaps)
        if not self._has_limits:
            self._moved_s = now
            return math.inf
        prompts = [one for one in demands if one.is_prompt]
        batch = len(demands) - len(prompts)
        others = sum(one.rows for one in demands) - sum(one.rows for one in prompts)
        ahead = [*self._launched, *([self._unseen] if self._unseen else ())]
        ahead_s = sum(self.times.piece_s(one.tokens) for one in ahead if one.tokens)
        left_s = room_s(gaps, self.times, batch, ahead_s)
        self.fits = self._tokens(left_s)
        if left_s < math.inf:  # answers come first
            self.fits = min(self.fits, self._most_tokens - others)
        self._follow_oldest(running, demands, now)
        self.is_overdue = self.fits < math.inf and now - self._moved_s > PATIENCE_S
        if self.is_overdue:
            self.fits = max(self.fits, FIRST_PIECE, prompts[0].least)
        if running:
            limits = [one.asked.gap_s for one in running if one.asked.gap_s is not None]
            self.offer = self._offer(limits, max(1, batch))
        return self.fits

    def launch(self, shares: Sequence[Share], now: float) -> int:
        """These shares are about to be launched. Returns their prompt tokens."""
        prompts = [share for share in shares if share.is_prompt]
        tokens = sum(share.num_rows for share in prompts)
        self.fits -= tokens
        if any(one.request is self._oldest or self.is_overdue for one in prompts):
            self._moved_s = now
        rows = sum(share.num_rows for share in shares) - tokens
        self._launched.append(Launch(now, len(shares) - len(prompts), tokens, rows))
        return tokens

    def end(self, num_ended: int, now: float) -> None:
        """So many launches have ended so far."""
        while self._launched and self._num_ended < num_ended:
            self._num_ended += 1
            one = self._launched.popleft()
            if not one.batch:
                self._unseen = self._joined(one)
                continue
            one, self._unseen = self._joined(one), None
            self._batch = one.batch
            before_s = one.began_s if self._overlaps else self._ended_s
            began_s, self._ended_s = max(one.began_s, before_s), now
            self.times.note_step(one.batch, one.tokens, one.pieces, now - began_s, one.rows)

    def rest(self, num_ended: int, *, is_idle: bool) -> None:
        """There was nothing to launch. `is_idle`: no earlier launch runs either."""
        self._launched.pop()
        if is_idle:
            self._launched.clear()
            self._unseen, self._num_ended = None, num_ended

    def add_prompts(self, tokens: int, began_s: float) -> None:
        """A forward of only prompts was launched. The next step of answers ends after it."""
        self.fits -= tokens
        self._unseen = self._joined(Launch(began_s, 0, tokens))

    def note_step(self, request: DecodeRequest, now: float, num_settled: int) -> BlockCost:
        """A step of a request has ended, with so many new final tokens."""
        if not num_settled:
            return BlockCost()
        before, prompts_s = request.last_block, self.times.prompts_s
        request.last_block = LastBlock(now, request.forward_passes, prompts_s)
        if before is None:
            return BlockCost(self._batch)
        self.times.note_gap(request.forward_passes - before.steps)
        return BlockCost(self._batch, prompts_s - before.prompts_s)

    def prompt_s(self, tokens: int) -> float:
        """Seconds that a prompt adds to the steps that compute it; 0 before pieces and steps
        without any were measured."""
        if not self.times.has_pieces:
            return 0.0
        pieces = math.ceil(tokens / self._most_tokens)
        return pieces * self.times.piece_s(tokens / max(1, pieces), spread=0.0)

    def _follow_oldest(
        self, running: Sequence[DecodeRequest], demands: Sequence[Demand], now: float
    ) -> None:
        """Notes which prompt is the oldest. Shorter ones may go before it, but not for ever."""
        pairs = zip(running, demands, strict=True)
        oldest = next((request for request, demand in pairs if demand.is_prompt), None)
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._moved_s = oldest, now

    def _joined(self, one: Launch) -> Launch:
        """The launch, with the prompts before it whose end was not seen."""
        if self._unseen is not None:
            one.follow(self._unseen)
        return one

    def _offer(self, limits: Sequence[float], batch: int) -> tuple[int, int]:
        left_s = room_s(map(Gap, limits), self.times, batch)
        piece = int(min(self._most_tokens, self._tokens(left_s)))
        # A gap has one piece of that size.
        seconds = max(self.times.piece_s(piece), 0.0 if math.isinf(left_s) else min(limits))
        return (piece, int(piece / seconds)) if seconds else (0, 0)

    def _tokens(self, seconds: float) -> float:
        return math.inf if math.isinf(seconds) else self.times.tokens_within(seconds)


def _gap_of(request: DecodeRequest, now: float) -> Gap | None:
    limit_s, last = request.asked.gap_s, request.last_block
    if limit_s is None or last is None:
        return None
    return Gap(limit_s, now - last.moment, request.forward_passes - last.steps)
