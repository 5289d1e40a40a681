"""Both algorithms once more, naively: a dict of positions, no bitmap, no list of blocks.

Independent of `effuse.decode_worker` except for its settings; it defines a decoder's actions for a
script, forward by forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decoding.scripts import STOP_ID, Case


@dataclass
class Trace:
    """Results of a run: rows of each forward, the emissions of each step, and how it ended."""

    forwards: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, stored
    commits: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    stopped: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for _, tokens in self.commits for token in tokens)


class Replay:
    """State by block number; a position absent from `values` is a mask."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.prompt_len = len(case.prompt)
        self.end = self.prompt_len + case.max_tokens
        size = case.block_size
        self.spans = [
            (start, start + size)
            for start in range(case.origin, self.end, size)
            if start + size > self.prompt_len
        ]
        self.values: dict[int, int] = dict(enumerate(case.prompt))
        self.appended = 0
        self.settled = 0
        self.stored = 0
        self.full: set[int] = set()
        self.counts: dict[int, int] = {}
        self.trace = Trace()

    def masks(self, number: int) -> list[int]:
        return [p for p in range(*self.spans[number]) if p not in self.values]

    def born(self, number: int) -> int:
        return sum(p >= self.prompt_len for p in range(*self.spans[number]))

    def progress(self, number: int) -> float:
        return 1 - len(self.masks(number)) / self.born(number)

    def run(self) -> Trace:
        while not self.step():
            pass
        return self.trace

    def step(self) -> bool:
        self.append()
        self.activate()
        first = self.spans[self.stored][0]
        last = self.spans[self.appended - 1][1]
        self.trace.forwards.append((first, last, self.spans[self.settled][0] - first))
        self.stored = self.settled
        self.write()
        return self.settle()

    def append(self) -> None:
        settings = self.case.settings
        stopped = any(
            self.values.get(p) == STOP_ID for p in range(self.prompt_len, self.spans[-1][1])
        )
        if self.appended == len(self.spans) or stopped:
            return
        active = self.appended - self.settled
        if settings.algorithm == "block_diffusion":
            self.appended += active == 0
        elif active == 0:
            self.appended += 1
        elif active < settings.window:
            last = self.progress(self.appended - 1)
            self.appended += last >= settings.block_add_threshold - 1e-6

    def activate(self) -> None:
        settings = self.case.settings
        for number in range(self.appended):
            near = number == 0 or (
                self.progress(number - 1) >= settings.full_activation_threshold - 1e-6
            )
            if near or settings.algorithm == "block_diffusion":
                self.full.add(number)

    def write(self) -> None:
        for number in range(self.appended):
            masks = self.masks(number)
            if not masks:
                continue
            count = self.counts.get(number, 0)
            proposals = {p: self.case.script.propose(p, count) for p in masks}
            for position in self.chosen(number, count, proposals):
                self.values[position] = proposals[position][0]
            self.counts[number] = count + 1

    def chosen(
        self, number: int, count: int, proposals: dict[int, tuple[int, float, float]]
    ) -> list[int]:
        settings = self.case.settings
        above = [p for p in proposals if proposals[p][1] > settings.confidence_threshold + 1e-6]
        ranked = sorted(proposals, key=lambda p: (-proposals[p][2], p))
        if settings.algorithm == "d2f":
            return above or (ranked[:1] if number in self.full else [])
        steps = settings.denoising_steps
        size = self.case.block_size
        shares = [size // steps] * steps
        for step in range(size % steps):
            shares[step] += 1
        share = max(1, shares[min(count, steps - 1)])
        if settings.remasking == "entropy_bounded":
            sums = [-sum(proposals[p][2] for p in ranked[: n + 1]) for n in range(len(ranked))]
            return ranked[: max(1, sum(total < settings.entropy_bound for total in sums))]
        if settings.remasking == "sequential":
            return sorted(proposals)[:share]
        dynamic = settings.remasking == "low_confidence_dynamic"
        return above if dynamic and len(above) >= share else ranked[:share]

    def settle(self) -> bool:
        before = self.settled
        while self.settled < self.appended and not self.masks(self.settled):
            self.settled += 1
        if self.settled == before:
            return False
        start = max(self.spans[before][0], self.prompt_len)
        end = min(self.spans[self.settled - 1][1], self.end)
        tokens = [self.values[p] for p in range(start, end)]
        self.trace.stopped = STOP_ID in tokens
        if self.trace.stopped:
            tokens = tokens[: tokens.index(STOP_ID)]
        self.trace.commits.append((start - self.prompt_len, tuple(tokens)))
        return self.trace.stopped or self.settled == len(self.spans)
