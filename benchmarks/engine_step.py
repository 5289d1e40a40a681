"""A decode step of the engine compared with the bare torch forward of the same rows.

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
from effuse.benchmarks.gpu_engines import paged
from effuse.benchmarks.gpu_load import ClosedLoad
from effuse.benchmarks.report import Figure
from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool
from effuse.models.part import Forward, Part, PartResult
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.problems.problem import problem
from effuse.router.tokenizer import Tokenizer, bundled_directory
from effuse.worker.messages import StartDecode

REQUESTS = 16
ROUNDS = 3
MAX_TOKENS = 176
MOST_RATIO = 1.3
PAGE_SIZE = 16
MOST_S = 3600.0


class _Recorder:
    """Observes the engine's forwards."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.parts: Sequence[Part] = ()

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self.parts = parts
        return self._forward.run(parts)


class _TimedEngine(DecodeEngine):
    """Times each step, and the bare forward of the same rows after it."""

    def __init__(self, model: Transformer, max_model_len: int) -> None:
        config = model.config
        parts = paged(model, REQUESTS * (max_model_len + PAGE_SIZE), page_size=PAGE_SIZE)
        pool = PagePool(parts.memory.num_pages)
        limits = DecodeLimits(
            max_num_batched_tokens=2048,
            max_num_seqs=REQUESTS,
            max_model_len=max_model_len,
            num_pages=pool.num_pages,
            page_size=PAGE_SIZE,
            block_size=config.block_size,
        )
        identity = Identity("benchmark", parts.fingerprint, parts.memory.layout)
        self.recorder = _Recorder(parts.runner)
        super().__init__(
            Executor(self.recorder, parts.memory.copy_page),
            pool,
            parts.make_cache(pool),
            Intake(config, limits),
            HandoffReceiver(pool, None, identity, MOST_S),
            Boundary(
                hidden_size=config.hidden_size if config.shift_logits else None,
                dtype=model.dtype,
                device=model.device,
            ),
            now=time.monotonic,
            max_request_s=MOST_S,
        )
        self._model = model
        self.engine_s: list[float] = []
        self.bare_s: list[float] = []
        self.rows: list[int] = []

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
    """The figure, and its sample."""
    torch.set_num_threads(1)
    directory = bundled_directory()
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
    prompts = asyncio.run(_prompts())
    engine = _TimedEngine(model, max(map(len, prompts)) + MAX_TOKENS)
    for number in range(ROUNDS):
        ClosedLoad(engine, _messages(model, prompts, number), REQUESTS).run()
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


def _messages(
    model: Transformer, prompts: Sequence[tuple[int, ...]], round_number: int
) -> list[StartDecode]:
    config = model.config
    stops = frozenset(config.eos_token_ids)
    return [
        StartDecode(
            attempt=AttemptId(name, 1, name),
            prompt_token_ids=prompt,
            stopping=Stopping(max_tokens=MAX_TOKENS, stop_token_ids=stops),
            sampling=Sampling(),
            settings=DecodeSettings(algorithm="d2f", denoising_steps=config.block_size),
            writer=None,
        )
        for name, prompt in ((f"{round_number}-{at}", one) for at, one in enumerate(prompts))
    ]


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
