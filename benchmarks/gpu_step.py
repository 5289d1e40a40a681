"""`python -m effuse.benchmarks.gpu_step`: whole decode steps compared with a bare graph of their
products.

Model shapes with random weights, a scripted acceptance (`gpu_script`), window 4 x 32, every batch
and context in one process. The same steps run twice: by themselves, for tokens a second and the
device's idle time, and in turns with their bare products, for the ratio. `--arrivals` also measures
requests that end and make room for others. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch

from effuse.benchmarks.gpu_engines import Paged, decode_engine
from effuse.benchmarks.gpu_floor import Floor, Turns, in_turns
from effuse.benchmarks.gpu_load import ClosedLoad
from effuse.benchmarks.gpu_models import MODELS, random_model
from effuse.benchmarks.gpu_record import (
    Arrivals,
    arrivals_line,
    longest_kernels,
    profiled,
    waits,
    waits_line,
    write_record,
)
from effuse.benchmarks.gpu_script import Dealer, deal
from effuse.benchmarks.gpu_serve import HandedOver, replacing
from effuse.benchmarks.gpu_timing import (
    MarkedStepper,
    Run,
    fill,
    next_step,
    run_alone,
    run_marked,
    used_in,
)
from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.decode_worker import denoise
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.device_buckets import Integers
from effuse.decode_worker.device_slots import slot_row
from effuse.decode_worker.device_step import DeviceStep
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.decode_worker.sequence import Sequence as Tokens
from effuse.kernels.step_slots import RecordColumn, SlotLayout
from effuse.kvtransfer.layout import MOST_GROUPS, KVLayout, PageMemory, num_groups_of
from effuse.kvtransfer.messages import KVPart
from effuse.models.config import ModelConfig
from effuse.models.group import ALL, RankPlace
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import measure_products

WINDOW = 4
PAGE_SIZE = 32
ANSWER = 640
RAMP_STEPS = 40  # until blocks settle at an even pace
WARM_STEPS = 6
# (batch, timed steps, steps of a turn)
BATCHES = ((1, 64, 8), (8, 32, 4), (16, 24, 2), (32, 16, 2), (64, 16, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One batch and context; times in ms a step."""

    model: str
    batch: int
    context: int
    rows: float  # in use, mean
    candidates: float
    alone: Run
    waits: int  # times that a request did not fit a step
    turns: Turns
    ratio: float  # of the turns: steps over bare products
    strayed: int  # steps with other rows or candidates than their products


class Bench:
    """One model, its pages and the settings that all batches share."""

    models = MODELS
    window = WINDOW

    def __init__(
        self,
        name: str,
        device: torch.device,
        most_batch: int,
        most_context: int,
        place: RankPlace = ALL,
        *,
        batch_invariant: bool = False,
    ) -> None:
        config = self.models[name]
        self.batch_invariant = batch_invariant
        self.name = name
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = self._model(config, device, dtype, place)
        heads, cut = self.model.shard.kv_heads, place.context and place.context.cut
        groups = num_groups_of(config.num_layers, MOST_GROUPS["nixl"])
        turn = (cut.rank, cut.degree) if cut else (0, 1)
        layout = KVLayout(
            "unified",
            *(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE),
            str(dtype).removeprefix("torch."),
            rank=place.rank,
            held=KVPart(heads.start, heads.stop, 0, groups, *turn),
        )
        self.page_size = layout.span
        num_pages = most_batch * (layout.pages_for(most_context + ANSWER) + 1)
        self.memory = PageMemory(layout, num_pages, device)
        self.memory.tensor.normal_()
        self.floor = self._floor(most_batch * (self.window + 2) * config.block_size)

    def measure(self, batch: int, context: int, pace: int, steps: int, size: int) -> Result:
        """Runs `steps` steps of `batch` requests, then in turns of `size` with bare products."""
        stepper, requests = self.ready(batch, context, pace)
        alone, kept = run_alone(stepper, steps)
        used = used_in(kept, stepper.layout)
        turns, used_again = self.in_turns(stepper, requests, used, size)
        return Result(
            model=self.name,
            batch=batch,
            context=context,
            rows=float(used[:, 0].mean()),
            candidates=float(used[:, 1].mean()),
            alone=alone,
            waits=int((np.stack(kept)[:, :, RecordColumn.STEPPED] == 0).sum()),
            turns=turns,
            ratio=turns.ratio,
            strayed=int((used != used_again).any(1).sum()),
        )

    def ready(
        self, batch: int, context: int, pace: int
    ) -> tuple[MarkedStepper, Sequence[Integers]]:
        """A stepper with `batch` requests after its first steps, and their rows at the start."""
        stepper, layout = self._stepper(batch, context, pace)
        requests = self._requests(layout, context, pace)
        fill(stepper, requests)
        for _ in range(WARM_STEPS):
            next_step(stepper)
        return stepper, requests

    def in_turns(
        self, stepper: MarkedStepper, requests: Sequence[Integers], used: Integers, size: int
    ) -> tuple[Turns, Integers]:
        """The requests again, in turns with products of rows `used` [steps, 2]; new rows."""
        bare = [self.floor.replay(*pair) for pair in used.tolist()]
        kept: list[Integers] = []

        def step() -> None:
            kept.append(next_step(stepper))

        fill(stepper, requests)
        in_turns(self.model.device, step, list(islice(cycle(bare), WARM_STEPS)), size)
        kept.clear()
        turns = in_turns(self.model.device, step, bare, size)
        return turns, used_in(kept, stepper.layout)

    def arrivals(self, batch: int, context: int, pace: int, answer: int, steps: int) -> Arrivals:
        """Steps of a decode worker's engine while requests of `answer` tokens end and are replaced.

        A prompt's pages count as handed over; the other costs of an arrival are real.
        """
        stepper, _ = self._stepper(batch, context, pace, is_mixed=True)
        forward = HandedOver(self.model, context)
        engine = decode_engine(self._paged(), self._limits(batch, context), stepper, forward)
        # By then the first requests have ended, one after another.
        ramp = -(-answer // pace)
        count = 2 * batch + batch * (ramp + 2 * steps) * pace // answer
        messages = replacing(self.model.config, count, batch, context, self.window, answer)
        load = ClosedLoad(engine, messages, batch)
        for _ in range(ramp):
            load.step()
        ended = len(load.served)
        run = run_marked(stepper, load.step, steps)
        joined = len(load.served) - ended
        found = waits(profiled(load.step, steps), steps)
        return Arrivals(
            model=self.name,
            batch=batch,
            context=context,
            answer=answer,
            joined=joined,
            run=run,
            joined_profiled=len(load.served) - ended - joined,
            waits=found,
        )

    def profile(self, batch: int, context: int, pace: int, path: Path) -> list[str]:
        """Device time by kernel over a few steps, and the host's waiting calls."""
        stepper, _ = self.ready(batch, context, pace)
        found = profiled(lambda: next_step(stepper), 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.table(sort_by="self_device_time_total", row_limit=40))
        heading = f"{self.name}, batch {batch}, context {context}, {waits_line(waits(found, 8))}"
        return [heading, *longest_kernels(found, 8)]

    def _model(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, place: RankPlace
    ) -> Transformer:
        model = random_model(config, device, dtype, place)
        if self.batch_invariant:
            measure_products(model := Transformer(config, model.weights, batch_invariant=True))
        return model

    def _floor(self, most_rows: int) -> Floor:
        return Floor(self.model, most_rows)

    def _settings(self, pace: int) -> DecodeSettings:
        return DecodeSettings(
            algorithm="d2f",
            window=self.window,
            # At 1, no block is forced to advance besides the script.
            full_activation_threshold=0.95 if pace >= self.window else 1.0,
            denoising_steps=self.model.config.block_size,
        )

    def _usual(self, batch: int) -> tuple[range, range]:
        """The rows and the masks in steps of requests in mid-answer."""
        size = self.model.config.block_size
        rows, masks = batch * self.window * size, batch * (self.window - 2) * size
        return (
            range(rows - size, rows + max(size, rows // 8) + 1),
            range(masks * 3 // 4, max(masks * 3 // 2, masks + 2 * size) + 1),
        )

    def _stepper(
        self, batch: int, context: int, pace: int, *, is_mixed: bool = False
    ) -> tuple[MarkedStepper, SlotLayout]:
        """A stepper with the graphs of `batch` requests; with `is_mixed` also of new requests."""
        size = self.model.config.block_size
        pages = -(-(context + ANSWER) // self.page_size)
        layout = SlotLayout(batch, size, max_window=self.window, max_stops=4, max_pages=pages)
        num_rows = batch * (self.window + 2) * size
        kv = self.memory.layer_views()
        step = DeviceStep(self.model, kv, layout, num_rows, page_size=self.page_size)
        if self.model.device.type == "cuda":
            step.adjust = Dealer(step.table, step.rows.first_candidate, pace)
        stepper = MarkedStepper(step)
        rows, masks = self._usual(batch)
        if is_mixed:
            rows, masks = range(rows.start // 4, rows.stop), range(masks.start // 4, masks.stop)
        # All graphs that the steps may need, because a capture in between would be timed with them.
        stepper.prepare(rows, masks, range(context, context + ANSWER))
        return stepper, layout

    def _requests(self, layout: SlotLayout, context: int, pace: int) -> list[Integers]:
        """A row of the slot table for each slot, their pages in random order."""
        order = np.random.default_rng(1).permutation(self.memory.num_pages).astype(np.int32)
        pages = np.split(order[: layout.num_slots * layout.max_pages], layout.num_slots)
        return [self._row(layout, slot, context, pace, own) for slot, own in enumerate(pages)]

    def _row(
        self, layout: SlotLayout, slot: int, context: int, pace: int, pages: Integers
    ) -> Integers:
        """A request in mid-answer, its blocks at all stages, 0 to 7 steps ahead of others."""
        config = self.model.config
        settings = self._settings(pace)
        prompt = np.random.default_rng(slot).integers(0, config.mask_token_id, context).tolist()
        sequence = Tokens(
            prompt,
            origin=config.block_origin(context),
            block_size=layout.block_size,
            mask_token_id=config.mask_token_id,
            stopping=Stopping(max_tokens=ANSWER),
        )
        sequence.store(context)
        for _ in range(RAMP_STEPS + int(np.random.default_rng([7, slot]).integers(8))):
            plan = denoise.open_step(sequence, settings)
            _scripted(sequence, settings, plan, pace)
        denoise.open_step(sequence, settings)
        return slot_row(
            layout,
            sequence,
            settings,
            Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=slot),
            generation=slot + 1,
            pages=pages.tolist(),
            page_size=self.page_size,
        )

    def _paged(self) -> Paged:
        size, views = self.model.config.block_size, self.memory.layer_views()
        runner = ModelRunner(self.model, views, page_size=self.page_size, block_size=size)
        return Paged(self.model, self.memory, runner)

    def _limits(self, batch: int, context: int) -> DecodeLimits:
        size = self.model.config.block_size
        return DecodeLimits(
            max_num_batched_tokens=batch * (context + (self.window + 2) * size),
            max_num_seqs=batch,
            max_model_len=context + ANSWER,
            num_pages=self.memory.num_pages,
            page_size=self.page_size,
            block_size=size,
        )


def _scripted(sequence: Tokens, settings: DecodeSettings, plan: StepPlan, pace: int) -> None:
    dealt = deal(plan, [block.masks_left for block in sequence.blocks], pace)
    denoise.apply_step(sequence, settings, plan, dealt)


def table(results: Sequence[Result]) -> str:
    """One line for each batch and context; step, bare and ratio are those in turns."""
    heading = "model      ctx batch   rows  cands  padding  step ms  bare ms  ratio (of turns)"
    lines = [f"{heading}    alone ms  idle  tok/s  launch ms  strayed"]
    for r in results:
        low, high = r.turns.spread
        lines.append(
            f"{r.model:9} {r.context:5} {r.batch:5} {r.rows:6.0f} {r.candidates:6.0f} "
            f"{100 * (r.alone.rows / r.rows - 1):7.1f}% {r.turns.mean_step_ms:8.2f} "
            f"{r.turns.mean_bare_ms:8.2f} {r.turns.ratio:6.3f} ({low:.3f}..{high:.3f}) "
            f"{r.alone.step_ms:8.2f} {100 * r.alone.idle_share:4.1f}% {r.alone.tokens_per_s:6.0f} "
            f"{r.alone.launch_ms:10.3f} {r.strayed:8}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_step")
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--pace", type=int, default=4, help="tokens a request and step")
    parser.add_argument(
        "--arrivals", type=int, metavar="TOKENS", help="also with requests of so many tokens each"
    )
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also device time by kernel")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_step.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    asked = parser.parse_args(argv)
    if asked.arrivals is not None and not 1 <= asked.arrivals <= ANSWER:
        parser.error(f"--arrivals must lie in 1..{ANSWER}, got {asked.arrivals}")
    results: list[Result | Arrivals] = []
    notes: list[str] = []
    deadline = time.monotonic() + asked.seconds
    for name in asked.model or ["dream-7b", "llada-8b"]:
        _measure_model(name, asked, deadline, results, notes)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print("\n".join([*notes, table([each for each in results if isinstance(each, Result)])]))
    return 0


def _measure_model(
    name: str,
    asked: argparse.Namespace,
    deadline: float,
    results: list[Result | Arrivals],
    notes: list[str],
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contexts = asked.context or [512, 2048]
    batches = [row for row in BATCHES if not asked.batch or row[0] in asked.batch]
    most = max(row[0] for row in batches)
    bench = Bench(name, device, most, max(contexts), batch_invariant=asked.batch_invariant)
    for context in contexts:
        for batch, steps, size in batches:
            if time.monotonic() > deadline:
                return
            result = bench.measure(batch, context, asked.pace, steps, size)
            results.append(result)
            print(table([result]).splitlines()[1], flush=True)
            if asked.arrivals:
                found = bench.arrivals(batch, context, asked.pace, asked.arrivals, 2 * steps)
                results.append(found)
                print(arrivals_line(found), flush=True)
            _write(asked.json, results, notes)
    notes.append(f"{name}, floor: {bench.floor.choices() or 'every product by linear'}")
    for batch in [row[0] for row in batches if row[0] in (1, 16) and asked.profile]:
        path = asked.json.with_name(f"profile_{name}_{batch}.txt")
        notes += bench.profile(batch, contexts[-1], asked.pace, path)
    _write(asked.json, results, notes)


def _write(path: Path, results: Sequence[Result | Arrivals], notes: Sequence[str]) -> None:
    kinds = [{"kind": type(each).__name__} | asdict(each) for each in results]
    write_record(path, kinds, notes)


if __name__ == "__main__":
    sys.exit(main())
