"""How many workers should prefill and decode, in closed form, from measured times and the load.

Pure: no I/O and no clock. `steering.py` measures the inputs and follows the result.

Let a prompt take s seconds to compute, a decode worker answer a requests a second in batches whose
gaps take g seconds, and X prefill and Y decode workers serve w requests a second.

- *Split.* Prefill workers compute X / s prompts a second, decode workers answer Y a. So w is the
  lesser of the two. A handoff of h seconds overlaps the next prompt, so s is max(s, h) there.
- *Help.* Decode workers can spend a share u of their time on prompts. Then w is the lesser of
  X / s + u Y / s and (1 - u) Y a. The first grows with u and the second falls, so the best u is
  where both are equal: u = (a - X / (Y s)) / (1 / s + a). They then compute u Y / (s w) of all
  prompts. X = 0 is a fleet in which each worker does both: w = Y / (s + 1 / a).
- *Gaps.* A piece of a prompt that takes c seconds lengthens the gap in which it is computed. A gap
  within G seconds has room for k = floor((G - g) / c) pieces, so u is at most k c / G. A small
  batch has short gaps and a low rate; the plan takes the batch with the largest w.
- *First block.* With m workers that compute prompts and a utilisation p, a prompt waits about
  s ln(1 / (1 - q)) / (2 m (1 - p)) seconds in the share q of all cases (M/D/m in heavy traffic).
  That, s, h and g have to fit into F seconds, which bounds p.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import astuple, replace

from effuse.placement.records import Above0, Amount
from effuse.router.policy import PrefillMode

MET_SHARE: Final = 0.9
"""Share of requests whose first block should come in time."""
HEADROOM: Final = 0.8
"""Share of a fleet's rate for which it is planned, because arrivals are uneven."""
MOST_WORKERS: Final = 1 << 20
CLOSE: Final = 0.99
"""Rates of which one is this share of the other count as equal."""
MOST_COST: Final = 4
"""How many times the workers an objective for first blocks may cost a scaled fleet."""


class PromptTime(Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Above0
    seconds: Above0


class AnswerPace(Struct, frozen=True, forbid_unknown_fields=True):
    """The pace of one decode worker that computes no prompts."""

    batch: Above0  # answers at once
    tokens_per_second: Above0  # of all of them
    gap_s: Amount  # between two blocks of an answer, at the 99th percentile
    context: Amount = 0.0  # tokens of prompt and answer, on average


class Times(Struct, frozen=True, forbid_unknown_fields=True):
    """The measured times of a model's workers."""

    prompts: tuple[PromptTime, ...] = ()
    answers: tuple[AnswerPace, ...] = ()
    piece_tokens: Amount = 0.0  # most prompt tokens in one forward; 0 if prompts cannot be cut
    kv_bytes_per_token: Amount = 0.0
    link_bytes_per_second: Amount = 0.0  # 0 if it was not measured

    @property
    def are_known(self) -> bool:
        return bool(self.prompts and self.answers)

    def prompt_s(self, tokens: float) -> float:
        """Seconds of a prompt: linear between the measured lengths and beyond them."""
        points = [(0.0, 0.0), *sorted((one.tokens, one.seconds) for one in self.prompts)]
        parts = list(pairwise(points))
        (low, low_s), (high, high_s) = next(
            (part for part in parts if tokens <= part[1][0]), parts[-1]
        )
        slope = max(0.0, high_s - low_s) / max(1.0, high - low)
        return max(1e-6, low_s + (tokens - low) * slope)

    def handoff_s(self, tokens: float) -> float:
        """Seconds in which a prompt's pages move; 0 if that was not measured."""
        rate = self.link_bytes_per_second
        return tokens * self.kv_bytes_per_token / rate if rate else 0.0

    def paces(self, context: float) -> list[AnswerPace]:
        """A pace for each measured batch, linear between the contexts that were measured."""
        batches: dict[float, list[AnswerPace]] = {}
        for one in self.answers:
            batches.setdefault(one.batch, []).append(one)
        return [_at_context(batches[batch], context) for batch in sorted(batches)]

    def piece_s(self, tokens: float) -> float:
        seconds = self.prompt_s(tokens)
        return seconds * min(1.0, self.piece_tokens / tokens) if self.piece_tokens else seconds


def _at_context(found: Sequence[AnswerPace], context: float) -> AnswerPace:
    found = sorted(found, key=lambda one: one.context)
    below = max((one for one in found if one.context <= context),
                key=lambda one: one.context, default=found[0])  # fmt: skip
    above = next((one for one in found if one.context >= context), found[-1])
    width = above.context - below.context
    part = (context - below.context) / width if width > 0 else 0.0
    return replace(_between(below, above, part), context=context)


def _between(low: AnswerPace, high: AnswerPace, part: float) -> AnswerPace:
    """The pace at this part of the way from one to the other."""
    pairs = zip(astuple(low), astuple(high), strict=True)
    return AnswerPace(*(one + part * (other - one) for one, other in pairs))


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a model."""

    rate: Amount  # requests a second
    prompt: Above0  # tokens of a prompt that have to be computed, on average
    answer: Above0  # tokens of an answer, on average

    @property
    def context(self) -> float:
        return self.prompt + self.answer / 2


class Objectives(Struct, frozen=True, forbid_unknown_fields=True):
    """The times that a request should keep; None sets no bound."""

    first_block_s: Above0 | None = None  # from arrival to the first block
    gap_s: Above0 | None = None  # between two blocks of an answer
    gap_ratio: Above0 | None = None  # the same as a multiple of a gap without load

    def gap_limit_s(self, paces: Sequence[AnswerPace]) -> float:
        """Seconds that a gap may take: the tighter of both bounds."""
        limit_s = math.inf if self.gap_s is None else self.gap_s
        if self.gap_ratio is None or not paces:
            return limit_s
        return min(limit_s, self.gap_ratio * min(one.gap_s for one in paces))


class Split(Struct, frozen=True):
    """Workers by role, and the load that they sustain."""

    prefill: int
    decode: int
    share: float = 0.0  # of all prompts, that decode workers compute
    rate: float = 0.0  # requests a second within the objectives
    batch: float = 0.0  # answers at once on a decode worker at that rate

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    @property
    def roles(self) -> tuple[int, int]:
        return self.prefill, self.decode


class BatchBounds(NamedTuple):
    """What a batch allows a decode worker, whatever the roles of the others."""

    batch: float
    answers: float  # a second, if it computes no prompts
    help: float  # most of its time that it can spend on prompts
    left_s: float  # that a prompt may wait; 0 or less if first blocks are late without a wait


class Planner(Struct, frozen=True, dict=True):
    """The plans for one model. `mode` is the router's `--prefill`."""

    times: Times
    workload: Workload
    objectives: Objectives = Objectives()
    mode: PrefillMode = "auto"

    @cached_property
    def paces(self) -> list[AnswerPace]:
        return self.times.paces(self.workload.context)

    @cached_property
    def gap_limit_s(self) -> float:
        return self.objectives.gap_limit_s(self.paces)

    @cached_property
    def fitting(self) -> list[AnswerPace]:
        """The paces whose gaps keep the objective, and that between two measured batches whose gaps
        just do. So a gap that was measured near the objective does not decide about a plan."""
        limit_s = self.gap_limit_s
        return [one for one in self.paces if one.gap_s <= limit_s] + [
            _between(low, high, (limit_s - low.gap_s) / (high.gap_s - low.gap_s))
            for low, high in pairwise(self.paces)
            if low.gap_s < limit_s < high.gap_s
        ]

    @cached_property
    def prompt_s(self) -> float:
        return self.times.prompt_s(self.workload.prompt)

    @cached_property
    def handoff_s(self) -> float:
        return self.times.handoff_s(self.workload.prompt)

    @cached_property
    def sent_s(self) -> float:
        """Seconds between two prompts that a prefill worker sends."""
        return max(self.prompt_s, self.handoff_s)

    @cached_property
    def piece_s(self) -> float:
        return self.times.piece_s(self.workload.prompt)

    def within_reach(self, workers: int = MOST_WORKERS) -> "Planner":
        """The same without the objectives that so many workers keep at no rate."""
        whole = self.objectives
        endless = replace(whole, gap_s=None, gap_ratio=None)
        ways = (whole, endless, replace(whole, first_block_s=None))
        kept = (replace(self, objectives=one) for one in ways)
        none = replace(self, objectives=Objectives())
        return next((one for one in kept if one.best(workers).rate > 0), none)

    def within_cost(self, rate: float) -> "Planner":
        """The same without the objectives that no number of workers keeps, and without one for
        first blocks that takes over `MOST_COST` times the workers at this rate. Their number has no
        bound if prompts take nearly as long as it allows."""
        kept = self.within_reach()
        free = replace(kept, objectives=replace(kept.objectives, first_block_s=None))
        most = min(MOST_WORKERS, MOST_COST * free.least(rate).workers)
        return kept if kept.best(most, rate).rate >= rate else free

    def split(self, prefill: int, decode: int) -> Split:
        """The most that these workers sustain, with the batch and the share that allow it."""
        most, found = -1.0, Split(prefill, decode)
        for batch, answers, most_help, left_s in self._bounds if decode else ():
            prompts = prefill * self._utilisation(left_s, prefill) / self.sent_s if prefill else 0.0
            own = self._utilisation(left_s, decode) / self.prompt_s
            even = (answers - prompts / decode) / (own + answers)
            part = min(most_help, max(0.0, even))
            rate = min(prompts + part * decode * own, (1 - part) * decode * answers)
            if rate > most:
                share = min(1.0, part * decode * own / rate) if rate > 0 else 0.0
                most, found = rate, Split(prefill, decode, share, rate, batch)
        return found

    def best(self, workers: int, rate: float = 0.0, fixed: tuple[int, int] = (0, 0)) -> Split:
        """The best roles of so many workers, among which so many `fixed` ones always prefill, and
        so many never prefill for others. Of equal rates it takes that with the smallest share,
        because its gaps are even; without a bound on gaps that without handoffs. It sustains `rate`
        if any does."""
        low, high = fixed[0], max(fixed[0], workers - fixed[1])
        among = {min(max(prefill, low), high) for prefill in self._splits(workers)}
        found = [self.split(prefill, workers - prefill) for prefill in sorted(among)]
        most = max(one.rate for one in found)
        equal = [one for one in found if one.rate >= max(CLOSE * most, min(rate, most))]
        sign = 1 if math.isinf(self.gap_limit_s) else -1
        return min(equal, key=lambda one: sign * one.prefill)

    def least(self, rate: float) -> Split:
        """The fewest workers that sustain this rate; raises ValueError if no number does."""
        high = 1
        while self.best(high, rate).rate < rate:
            high *= 2
            if high > MOST_WORKERS:
                is_bounded = self.best(MOST_WORKERS).rate > 0
                few = f"it needs more than {MOST_WORKERS:,} workers, the most that a plan has"
                raise ValueError(few if is_bounded else "no number of workers meets the objectives")
        fewer = range(high // 2 + 1, high)
        low = fewer.start + bisect_left(fewer, rate, key=lambda each: self.best(each, rate).rate)
        return self.best(low, rate)

    def _utilisation(self, left_s: float, servers: float) -> float:
        """The share of their time for which so many workers may compute prompts, so that first
        blocks are in time; 0 if none suffices."""
        return max(0.0, 1 - self._wait_s / (2 * servers) / left_s) if left_s > 0 else 0.0

    @cached_property
    def _wait_s(self) -> float:
        """Twice the wait of a prompt for one worker, divided by its share of free time."""
        return self.prompt_s * math.log(1 / (1 - MET_SHARE))

    @cached_property
    def _bounds(self) -> list[BatchBounds]:
        first_s = self.objectives.first_block_s
        left_s = math.inf if first_s is None else first_s - self.prompt_s - self.handoff_s
        return [
            BatchBounds(
                one.batch,
                one.tokens_per_second / self.workload.answer,
                self.most_help(one),
                left_s - one.gap_s,
            )
            for one in self.fitting
        ]

    def most_help(self, pace: AnswerPace) -> float:
        """Most of its time that a decode worker can spend on prompts in this batch."""
        if self.mode == "remote":
            return 0.0
        limit_s = self.gap_limit_s
        if math.isinf(limit_s):
            return 1.0
        if limit_s <= 0:  # a gap that was too short to measure
            return 0.0
        pieces = math.floor((limit_s - pace.gap_s) / self.piece_s + 1e-9)
        return min(1.0, pieces * self.piece_s / limit_s)

    def _splits(self, workers: int) -> Iterator[int]:
        """Numbers of prefill workers among which the best is: none, and those at which both roles
        are busy without help. Between them a rate only rises or falls."""
        if self.mode != "remote" or workers < 2:
            yield 0
        if self.mode == "local":
            return
        near = set[int]()
        for _, answers, _, left_s in self._bounds:
            ratio = even = answers * self.sent_s
            for _ in range(3):  # how busy prefill workers may be depends on their number
                even = workers * ratio / (1 + ratio)
                useful = self._utilisation(left_s, max(1.0, even))
                ratio = answers * self.sent_s / max(0.01, useful)
            near |= {math.floor(even) + step for step in (-1, 0, 1, 2)}
        inner = sorted(one for one in near if 0 < one < workers)
        # If no batch keeps the objectives, each split sustains nothing.
        yield from inner or [1] * (self.mode == "remote" and workers > 1)
