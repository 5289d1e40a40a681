"""`python -m effuse.benchmarks.gpu_prefill`: prefill compared with only its products and attention.

Each case is a few prompts of one length, sent together to a prefill worker's engine. Its time is
the host's, from the messages to the last `PrefillDone`. Engine, floor and a plain PyTorch prefill
take turns, so that all run at the same clock. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch

from effuse.benchmarks.gpu_engines import Paged, paged, prefill_engine
from effuse.benchmarks.gpu_floor import graph_of
from effuse.benchmarks.gpu_models import MODELS, random_model
from effuse.benchmarks.gpu_record import kernel_classes, write_record
from effuse.benchmarks.gpu_timing import synchronize
from effuse.benchmarks.prefill_rivals import PlainPrefill, bare_prefill
from effuse.kvtransfer.messages import AttemptId
from effuse.models.part import Part
from effuse.models.transformer import Transformer
from effuse.models.weights import measure_products
from effuse.prefill_worker.engine import PrefillEngine
from effuse.worker.messages import Abort, AbortDone, PrefillDone, StartPrefill

PAGE_SIZE = 32
WARM_ROUNDS = 2
MOST_ROWS = 8192  # of one forward; more tokens take several
# (prompts, tokens of each, counted rounds)
CASES = ((1, 512, 24), (4, 512, 10), (16, 512, 5), (32, 512, 3), (1, 2048, 12), (4, 2048, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case; medians in ms."""

    model: str
    prompts: int
    length: int
    engine_ms: float  # from the first message to the last PrefillDone
    forward_ms: float  # the same forwards queued back to back, by device events
    floor_ms: float
    plain_ms: float  # eager PyTorch
    spread: float  # 90th percentile of the engine's times over the 10th

    @property
    def ratio(self) -> float:
        """Engine over floor."""
        return self.engine_ms / self.floor_ms


class Bench:
    """One model with pages and an engine."""

    def __init__(
        self, name: str, device: torch.device, most_tokens: int, *, batch_invariant: bool = False
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.name = name
        weights = random_model(MODELS[name], device, dtype).weights
        self.model = Transformer(MODELS[name], weights, batch_invariant=batch_invariant)
        if batch_invariant:
            measure_products(self.model)
        self.paged: Paged = paged(self.model, most_tokens + 64 * PAGE_SIZE, page_size=PAGE_SIZE)
        self.engine = prefill_engine(self.paged, max_num_batched_tokens=min(most_tokens, MOST_ROWS))
        self._names = count()

    def measure(self, prompts: int, length: int, rounds: int) -> Result:
        """Engine, floor and rival in turns."""
        device = self.model.device
        floor = bare_prefill(self.model, prompts, length)
        if device.type == "cuda":
            floor = graph_of(floor)
        plain = PlainPrefill(self.model, prompts, length)
        token_ids = torch.tensor(self._prompts(prompts, length), device=device)

        def run_floor() -> None:
            floor()
            synchronize(device)

        def run_plain() -> None:
            plain.run(token_ids)
            synchronize(device)

        times: list[list[float]] = [[], [], []]
        for turn in range(-WARM_ROUNDS, rounds):
            messages = self._messages(prompts, length)
            runs: list[Callable[[], None]] = [partial(compute, self.engine, messages)]
            runs += [run_floor, run_plain]
            for kept, run in zip(times, runs, strict=True):
                elapsed = elapsed_ms(run)
                if turn >= 0:
                    kept.append(elapsed)
            forget(self.engine, messages)
        engine, floors, plains = times
        return Result(
            model=self.name,
            prompts=prompts,
            length=length,
            engine_ms=median(engine),
            forward_ms=self._forward_ms(prompts, length, max(3, rounds // 2)),
            floor_ms=median(floors),
            plain_ms=median(plains),
            spread=float(np.percentile(engine, 90) / np.percentile(engine, 10)),
        )

    def profile(self, prompts: int, length: int) -> list[str]:
        """Device time of one forward and of its floor by kind of kernel."""
        parts = self._parts(prompts, length)
        floor = bare_prefill(self.model, prompts, length)
        lines = [f"{self.name}, {prompts} x {length}: ms of kernels in one forward, then the floor"]
        for run in (lambda: self.paged.runner.run(parts), floor):
            lines += [f"  {line}" for line in kernel_classes(run, repeats=4)]
        print("\n".join(lines), flush=True)
        return lines

    def _forward_ms(self, prompts: int, length: int, repeats: int) -> float:
        parts = self._parts(prompts, length)
        self.paged.runner.run(parts)
        synchronize(self.model.device)
        if self.model.device.type == "cpu":
            return elapsed_ms(lambda: self.paged.runner.run(parts))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            self.paged.runner.run(parts)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    def _prompts(self, prompts: int, length: int) -> list[list[int]]:
        generator = np.random.default_rng(length)
        drawn: list[list[int]] = generator.integers(
            0, self.model.config.mask_token_id, (prompts, length)
        ).tolist()
        return drawn

    def _messages(self, prompts: int, length: int) -> list[StartPrefill]:
        """New attempts each time."""
        names = [str(next(self._names)) for _ in range(prompts)]
        return [
            StartPrefill(attempt=AttemptId(name, 1, name), prompt_token_ids=tuple(prompt))
            for name, prompt in zip(names, self._prompts(prompts, length), strict=True)
        ]

    def _parts(self, prompts: int, length: int) -> list[Part]:
        pages = -(-length // PAGE_SIZE)
        return [
            Part(
                token_ids=prompt,
                start=0,
                pages=range(index * pages, (index + 1) * pages),
                num_stored=length,
                block_origin=self.model.config.block_origin(length),
                keep_boundary=True,
            )
            for index, prompt in enumerate(self._prompts(prompts, length))
        ]


def compute(engine: PrefillEngine, messages: Sequence[StartPrefill]) -> None:
    """Makes the engine compute these prompts; returns once it has reported all of them."""
    for message in messages:
        engine.handle(message)
    _step_until(engine, PrefillDone, len(messages))


def forget(engine: PrefillEngine, messages: Sequence[StartPrefill]) -> None:
    """Ends the attempts, whose pages are free then."""
    for message in messages:
        engine.handle(Abort(attempt=message.attempt))
    _step_until(engine, AbortDone, len(messages))


def _step_until(engine: PrefillEngine, kind: type[object], num_events: int) -> None:
    while num_events:
        engine.step()
        for event in engine.outbox():
            assert isinstance(event, kind), event
            num_events -= 1


def elapsed_ms(run: Callable[[], object]) -> float:
    """Duration of the call."""
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def table(results: Sequence[Result]) -> str:
    """One line for each case."""
    lines = [
        "model      prompts  engine ms  forward ms  floor ms  ratio  eager PyTorch ms  p90/p10"
    ]
    for r in results:
        case = f"{r.prompts} x {r.length}"
        lines.append(
            f"{r.model:9} {case:>8} {r.engine_ms:10.2f} {r.forward_ms:11.2f} {r.floor_ms:9.2f} "
            f"{r.ratio:6.3f} {r.plain_ms:17.2f} {r.spread:8.3f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_prefill")
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--case", action="append", help="PROMPTSxTOKENS, such as 4x512")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument(
        "--profile", action="store_true", help="also device time by kernel, of one prompt"
    )
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_prefill.json"))
    asked = parser.parse_args(argv)
    cases = [row for row in CASES if not asked.case or f"{row[0]}x{row[1]}" in asked.case]
    results: list[Result] = []
    notes: list[str] = []
    for name in asked.model or ["dream-7b", "llada-8b"]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        begin = time.monotonic()
        most = max(prompts * length for prompts, length, _ in cases)
        bench = Bench(name, device, most, batch_invariant=asked.batch_invariant)
        print(f"{name}: ready in {time.monotonic() - begin:.0f} s", flush=True)
        for case in cases:
            results.append(bench.measure(*case))
            print(table(results[-1:]).splitlines()[1], flush=True)
            write_record(asked.json, [asdict(r) | {"ratio": r.ratio} for r in results], notes)
        if asked.profile:
            for prompts, length, _ in cases:
                if prompts == 1:
                    notes += bench.profile(prompts, length)
        bench.engine.close()
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(table(results))
    write_record(asked.json, [asdict(r) | {"ratio": r.ratio} for r in results], notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
