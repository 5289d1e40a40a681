"""A closed load on a decode engine in this process: a number of requests at a time until all are
served.

Only messages go in and events come out, as between a worker's front and its engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.decode_worker.engine import DecodeEngine
from effuse.kvtransfer.messages import AttemptId
from effuse.models.config import ModelConfig
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker.messages import (
    Committed,
    Finished,
    Reserved,
    StartDecode,
    Verified,
)


@dataclass(slots=True)
class Served:
    """One request; points in time in seconds, and its total time."""

    submitted_s: float
    blocks: list[float] = field(default_factory=list)  # when each was committed
    sizes: list[int] = field(default_factory=list)  # tokens of each
    total_s: float = 0.0
    tokens: int = 0
    forwards: int = 0

    @property
    def first_block_s(self) -> float:
        """From its submission to its first block; 0 without any."""
        return self.blocks[0] - self.submitted_s if self.blocks else 0.0


@dataclass(slots=True)
class CountingRunner:
    """A model runner that notes how many rows each forward of prompts had."""

    runner: ModelRunner
    rows: list[int]

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self.rows.append(sum(len(part.token_ids) for part in parts))
        return self.runner.run(parts)


def requests(
    config: ModelConfig, lengths: Sequence[int], window: int, max_tokens: int
) -> list[StartDecode]:
    """Random prompts of these lengths; only its length ends an answer."""
    draw = np.random.default_rng(len(lengths))
    # At 1, no block is forced to advance besides the acceptance script.
    settings = DecodeSettings(
        algorithm="d2f",
        window=window,
        full_activation_threshold=1.0,
        denoising_steps=config.block_size,
    )
    return [
        StartDecode(
            attempt=AttemptId(name, 1, name),
            prompt_token_ids=tuple(draw.integers(0, config.mask_token_id, length).tolist()),
            stopping=Stopping(max_tokens=max_tokens),
            sampling=Sampling(seed=int(draw.integers(2**63))),
            settings=settings,
            writer=None,
        )
        for name, length in ((f"{window}-{index}", n) for index, n in enumerate(lengths))
    ]


class ClosedLoad:
    """Keeps up to `most` requests in the engine, which may be changed: `messages`, then those that
    `then` returns.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        messages: Sequence[StartDecode],
        most: int,
        then: Iterator[StartDecode] | None = None,
    ) -> None:
        self.engine = engine
        self._messages = chain(messages, then or ())
        self._next = next(self._messages, None)
        self.most = most
        self._running: dict[str, Served] = {}
        self.num_begun = 0
        self.served: list[Served] = []

    @property
    def is_done(self) -> bool:
        return self._next is None and not self._running

    def everyone(self) -> list[Served]:
        """Requests that ended, and those that run."""
        return [*self.served, *self._running.values()]

    def step(self) -> None:
        """Submits as many as there is room for, makes a step and handles the engine's events."""
        while self._next is not None and len(self._running) < self.most:
            self._running[self._next.attempt.transfer_id] = Served(time.perf_counter())
            self.engine.handle(self._next)
            self.num_begun += 1
            self._next = next(self._messages, None)
        while not self.engine.step() and self.engine.is_working():
            pass
        now = time.perf_counter()
        for event in self.engine.outbox():
            match event:
                case Committed(attempt=attempt, token_ids=token_ids):
                    served = self._running[attempt.transfer_id]
                    served.blocks.append(now)
                    served.sizes.append(len(token_ids))
                case Finished(attempt=attempt):
                    self._finish(self._running.pop(attempt.transfer_id), event, now)
                case Reserved() | Verified():
                    pass
                case _:
                    raise RuntimeError(f"a request went wrong: {event}")

    def _finish(self, served: Served, event: Finished, now: float) -> None:
        served.total_s = now - served.submitted_s
        served.tokens, served.forwards = event.num_tokens, event.forward_passes
        self.served.append(served)

    def begin(self, lags: Sequence[int]) -> None:
        """Starts a request for each of these, this many steps after the first one."""
        for step in range(max(lags) + 1):
            self.most = sum(lag <= step for lag in lags)
            self.step()

    def end(self) -> None:
        """Submits no more and serves the running ones: its slots and pages are free then."""
        self._next = None
        while not self.is_done:
            self.step()

    def run(self) -> float:
        """Serves everything; seconds from the first submission to the last end."""
        begin = time.perf_counter()
        while not self.is_done:
            self.step()
        return time.perf_counter() - begin
