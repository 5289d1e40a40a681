"""The load of a model, the times of its workers, and the objectives that requests kept, as the
requests of one router show them.

The router, `effuse bench` and the benchmarks judge an answer by the same rule: its first block is
in time, and so is every gap between two blocks, as in DistServe (arXiv 2401.09670). Pure: no I/O;
moments are on one monotonic clock in seconds. `planner.py` has the forms of loads and times.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from effuse.placement.records import ModelInfo
from effuse.router.planner import AnswerPace, PromptTime, Times, Workload

BIN_S: Final = 2.0
MOST_S: Final = 120.0
"""How far back the load is known, in pieces of `BIN_S` seconds."""
NEW_S: Final = 10.0
"""The latest part of the load. If it differs from the earlier part, only it counts."""
LEAST_S: Final = 4.0
"""The shortest time from which a rate follows."""
DEVIATIONS: Final = 4.0
"""Standard deviations beyond which two parts of a load differ."""
MOST_WEIGHT: Final = 256
"""Observations after which the weight of all earlier ones is halved."""
LEAST_GAPS: Final = 16
"""Gaps without which the pace of a batch is not known."""


@dataclass(slots=True)
class Amounts:
    """Independent amounts: their number, sum, and sum of squares."""

    number: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, amount: float) -> None:
        self.number += 1
        self.total += amount
        self.squares += amount * amount

    @classmethod
    def sum_of(cls, parts: Sequence["Amounts"]) -> "Amounts":
        return cls(
            sum(one.number for one in parts),
            sum(one.total for one in parts),
            sum(one.squares for one in parts),
        )

    def differs(self, earlier: "Amounts", times: float) -> bool:
        """Whether this is no chance, after `earlier` in a span that was longer by 1 / `times`: as a
        compound Poisson process, the number as well as the sum."""
        number = times * earlier.number
        spread = math.sqrt(number * (1 + times))
        total_spread = math.sqrt(times * earlier.squares * (1 + times))
        return (
            abs(self.number - number) > DEVIATIONS * spread
            or abs(self.total - times * earlier.total) > DEVIATIONS * total_spread
        )


@dataclass(slots=True)
class Bin:
    """The load of `BIN_S` seconds."""

    start: float
    prompts: Amounts = field(default_factory=Amounts)
    answers: Amounts = field(default_factory=Amounts)


class LoadLog:
    """The arrivals of the last minutes. It forgets all that came before a jump."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque()
        self._prompt = 0.0  # mean lengths, as far as they are known
        self._answer = 0.0

    def note_prompt(self, tokens: int, now: float) -> None:
        """A request has begun, with a prompt of so many tokens."""
        self._bin(now).prompts.add(tokens)

    def note_answer(self, tokens: int, now: float) -> None:
        """A request has ended well, with so many tokens in all of its answers."""
        self._bin(now).answers.add(max(1, tokens))

    def workload(self, now: float, *, hits: float = 0.0, waiting: int = 0) -> Workload | None:
        """The load; None before a request has ended. `hits`: the share of prompt tokens that need
        no computing. `waiting`: requests in the queue, which should begin within `NEW_S`."""
        self._bin(now)
        self._forget(now)
        prompts = Amounts.sum_of([one.prompts for one in self._bins])
        answers = Amounts.sum_of([one.answers for one in self._bins])
        self._prompt = prompts.total / prompts.number if prompts.number else self._prompt
        self._answer = answers.total / answers.number if answers.number else self._answer
        if not self._prompt or not self._answer:
            return None
        rate = prompts.number / max(LEAST_S, now - self._bins[0].start) + waiting / NEW_S
        return Workload(rate, max(1.0, self._prompt * (1 - hits)), self._answer)

    def _bin(self, now: float) -> Bin:
        """The latest one; none is left out, so that silence counts."""
        if not self._bins or now - self._bins[-1].start > MOST_S:
            self._bins.append(Bin(now))
        while now - self._bins[-1].start >= BIN_S:
            self._bins.append(Bin(self._bins[-1].start + BIN_S))
        while now - self._bins[0].start > MOST_S:
            self._bins.popleft()
        return self._bins[-1]

    def _forget(self, now: float) -> None:
        latest = [one for one in self._bins if now - one.start <= NEW_S + BIN_S]
        earlier = list(self._bins)[: -len(latest)]
        if not earlier or now - latest[0].start < NEW_S - BIN_S:
            return
        times = (now - latest[0].start) / (latest[0].start - earlier[0].start)
        for name in ("prompts", "answers"):
            new, old = ([getattr(one, name) for one in part] for part in (latest, earlier))
            if Amounts.sum_of(new).differs(Amounts.sum_of(old), times):
                self._bins = deque(latest)
                return


@dataclass(slots=True)
class CommitTimes:
    """Commits of answers in batches of about one size and context."""

    number: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    context: float = 0.0  # sum
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_WEIGHT))

    def add(self, tokens: int, seconds: float, context: int) -> None:
        if self.number >= MOST_WEIGHT:
            self.number, self.tokens = self.number / 2, self.tokens / 2
            self.seconds, self.context = self.seconds / 2, self.context / 2
        self.number += 1
        self.tokens += tokens
        self.seconds += seconds
        self.context += context
        self.gaps.append(seconds)

    def pace(self, batch: float) -> AnswerPace:
        """The pace of a worker with so many answers at once."""
        gap_s = sorted(self.gaps)[math.ceil(0.99 * len(self.gaps)) - 1]
        rate = batch * self.tokens / max(1e-6, self.seconds)
        return AnswerPace(batch, rate, gap_s, self.context / self.number)


def num_left_out(model: ModelInfo, tokens: int, cached: int) -> int:
    """How many tokens of a prompt no worker computes: those that were cached, and the end of a
    block-causal prompt, which is in the answer's first block."""
    is_causal = model.prompt_attention == "causal_blocks"
    return min(tokens, cached + (tokens % model.block_size if is_causal else 0))


class Measured:
    """The times of a model's workers; workers of one model count as equal."""

    def __init__(self) -> None:
        self._prompts: dict[int, list[float]] = {}  # number, tokens, seconds by doubling length
        self._paces: dict[
            tuple[int, int], CommitTimes
        ] = {}  # by half a doubling of batch, and context
        self._busy_until: dict[object, float] = {}
        self._computed, self._left_out = 0.0, 0.0  # tokens
        self._moved, self._bytes = 0.0, 0.0  # tokens, and the bytes of their pages

    @property
    def hits(self) -> float:
        """Share of prompt tokens that need no computing."""
        return self._left_out / max(1.0, self._computed + self._left_out)

    def note_prompt(
        self, life: object, tokens: int, left_out: int, seconds: float, end: float
    ) -> None:
        """A worker has computed a prompt in the `seconds` before `end`, except for `left_out` of
        its tokens. Only the time since the last prompt's end counts, because a worker computes
        several at once. `life` is None if the seconds are those of this prompt only."""
        self._computed, self._left_out = _decayed(self._computed, self._left_out, 1e6)
        self._computed += tokens - left_out
        self._left_out += left_out
        if tokens <= left_out:
            return
        before = self._busy_until.get(life, -math.inf)
        if life is not None:
            self._busy_until[life] = max(before, end)
        busy_s = max(0.0, min(seconds, end - before))
        sums = self._prompts.setdefault(round(math.log2(tokens - left_out)), [0.0, 0.0, 0.0])
        if sums[0] >= MOST_WEIGHT:
            sums[:] = (one / 2 for one in sums)
        for at, more in enumerate((1.0, tokens - left_out, busy_s)):
            sums[at] += more

    def note_handoff(self, tokens: int, num_bytes: int) -> None:
        """The pages of a prompt have moved."""
        self._moved, self._bytes = _decayed(self._moved, self._bytes, 1e6)
        self._moved, self._bytes = self._moved + tokens, self._bytes + num_bytes

    def note_commit(self, batch: int, context: int, tokens: int, seconds: float) -> None:
        """An answer of `context` tokens got `tokens` more after so many seconds without prompts, on
        a worker with so many answers."""
        key = round(2 * math.log2(batch)), round(math.log2(context))
        self._paces.setdefault(key, CommitTimes()).add(tokens, seconds, context)

    def keep_lives(self, lives: Sequence[object]) -> None:
        """Forgets workers that are not among these."""
        self._busy_until = {one: self._busy_until[one] for one in lives if one in self._busy_until}

    def times(self, piece_tokens: float, link_bytes_per_second: float) -> Times:
        """All that is known."""
        prompts = [
            PromptTime(tokens / number, seconds / number)
            for number, tokens, seconds in self._prompts.values()
            if seconds > 0
        ]
        answers = [
            pace.pace(round(2 ** (batch / 2), 2))
            for (batch, _), pace in self._paces.items()
            if len(pace.gaps) >= LEAST_GAPS and pace.tokens
        ]
        return Times(
            tuple(sorted(prompts, key=lambda one: one.tokens)),
            tuple(sorted(answers, key=lambda one: (one.batch, one.context))),
            piece_tokens=piece_tokens,
            kv_bytes_per_token=self._bytes / max(1.0, self._moved),
            link_bytes_per_second=link_bytes_per_second,
        )


class Kept(NamedTuple):
    """Which objectives a request kept; None stands for one that it did not have."""

    first_block: bool | None
    gap: bool | None

    @property
    def all(self) -> bool | None:
        """Whether it kept each of its objectives; None if it had none."""
        had = [one for one in self if one is not None]
        return all(had) if had else None


@dataclass(frozen=True, slots=True)
class Goals:
    """Objectives of one request in seconds; infinity means none."""

    first_block_s: float = math.inf  # from arrival
    gap_s: float = math.inf  # every gap between two blocks

    def or_else(self, others: "Goals") -> "Goals":
        """The same, with those of `others` in the place of those that it does not have."""
        pairs = ((self.first_block_s, others.first_block_s), (self.gap_s, others.gap_s))
        return Goals(*(other if math.isinf(own) else own for own, other in pairs))

    def kept(self, first_block_s: float, gaps_s: Iterable[float]) -> Kept:
        """Which objectives an answer with these times in seconds kept."""
        return Kept(
            None if math.isinf(self.first_block_s) else first_block_s <= self.first_block_s,
            None if math.isinf(self.gap_s) else max(gaps_s, default=0.0) <= self.gap_s,
        )

    def missed(self) -> Kept:
        """The same for a request that failed, which kept none of them."""
        return self.kept(math.inf, (math.inf,))


NO_GOALS: Final = Goals()


class KeptShares:
    """The share of the latest requests that kept all their objectives, by model and class."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[float, float]] = {}  # kept, missed

    def note(self, model: str, request_class: str, *, is_kept: bool) -> None:
        """A request that had an objective has ended."""
        kept, missed = self._counts.get((model, request_class), (0.0, 0.0))
        counts = kept + is_kept, missed + (not is_kept)
        self._counts[model, request_class] = _decayed(*counts, 2 * MOST_WEIGHT)

    def lines(self, model: str) -> list[str]:
        """A line for each class, for operators."""
        return [
            f"{kept / (kept + missed):.1%} of the latest requests"
            f"{f' of class {name}' if name else ''} met their objectives"
            for (of, name), (kept, missed) in sorted(self._counts.items())
            if of == model
        ]


def _decayed(one: float, other: float, most: float) -> tuple[float, float]:
    """Both halved once their sum is larger than `most`."""
    return (one / 2, other / 2) if one + other > most else (one, other)
