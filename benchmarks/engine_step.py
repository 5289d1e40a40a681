"""A decode step of the engine beside the bare torch forward of the same rows.

Sixteen held-out problems are decoded by the bundled model, pipelined. Every step is timed, and
right after it a plain forward over the same rows, contexts and head rows; the figure is the ratio
of sums.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import torch

from effuse.benchmarks.bare_forward import BareForward
from effuse.benchmarks.report import Figure
from effuse.cli.local import Ask, LocalEngine
from effuse.models.part import Part, PartResult
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.problems.problem import problem
from effuse.router.tokenizer import Tokenizer, bundled_directory
from effuse.worker.engine_core import Forward
from effuse.worker.messages import Settings

REQUESTS = 16
ROUNDS = 3
MAX_TOKENS = 176
MOST_RATIO = 1.3


class _Recorder:
    """Looks on as the engine runs its forward."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.parts: Sequence[Part] = ()

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self.parts = parts
        return self._forward.run(parts)


class _TimedEngine(LocalEngine):
    """Times each step, and the bare forward of the same rows after it."""

    recorder: _Recorder

    def __init__(self, model: Transformer, max_model_len: int) -> None:
        super().__init__(
            model, max_num_seqs=REQUESTS, max_model_len=max_model_len, observe=self._watch
        )
        self._model = model
        self.engine_s: list[float] = []
        self.bare_s: list[float] = []
        self.rows: list[int] = []

    def _watch(self, forward: Forward) -> Forward:
        self.recorder = _Recorder(forward)
        return self.recorder

    def step(self) -> bool:
        start = time.perf_counter()
        worked = super().step()
        took = time.perf_counter() - start
        parts = self.recorder.parts
        if len(parts) >= REQUESTS // 2 and all(part.candidates for part in parts):
            self.engine_s.append(took)
            self.bare_s.append(_bare_s(self._model, parts))
            self.rows.append(sum(len(part.token_ids) for part in parts))
        return worked


def measure() -> tuple[Figure, list[str]]:
    """The figure, and what it was measured over."""
    torch.set_num_threads(1)
    directory = bundled_directory()
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
    prompts = asyncio.run(_prompts())
    engine = _TimedEngine(model, max(map(len, prompts)) + MAX_TOKENS)
    settings = Settings(
        algorithm="d2f",
        window=4,
        confidence_threshold=0.9,
        block_add_threshold=0.1,
        full_activation_threshold=0.95,
        score="confidence",
        remasking="low_confidence_dynamic",
        denoising_steps=model.config.block_size,
    )
    asks = [Ask(prompt_token_ids=p, max_tokens=MAX_TOKENS, settings=settings) for p in prompts]
    for _ in range(ROUNDS):
        engine.run(asks, lambda: None)
    ratio = sum(engine.engine_s) / sum(engine.bare_s)
    figure = Figure(
        name="decode step of the engine, CPU",
        value=ratio,
        limit=MOST_RATIO,
        unit="x",
        bound="at most",
        against="bare torch forward of the same rows, context, attention and lm_head",
    )
    note = (
        f"engine step: {len(engine.engine_s)} steps of {REQUESTS // 2} to {REQUESTS} requests, "
        f"{statistics.mean(engine.rows):.0f} rows on average, "
        f"{1e3 * statistics.median(engine.engine_s):.2f} ms a step, "
        f"{1e3 * statistics.median(engine.bare_s):.2f} ms bare"
    )
    return figure, [note]


async def _prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(bundled_directory())
    try:
        texts = [problem(5, index, "held_out").prompt for index in range(REQUESTS)]
        return [tuple(await tokenizer.encode(text)) for text in texts]
    finally:
        tokenizer.close()


def _bare_s(model: Transformer, parts: Sequence[Part]) -> float:
    bare = BareForward(model, parts, model.config.block_size)
    bare.run()
    start = time.perf_counter()
    bare.run()
    return time.perf_counter() - start
