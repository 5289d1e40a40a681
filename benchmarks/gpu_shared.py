"""`python -m effuse.benchmarks.gpu_shared`: sequences that begin with the same pages, read together
and one by one.

SDAR-8B's shape with random weights. First attention of one layer in CUDA graphs, in turns, for
several numbers of sequences and lengths, beside the time in which a copy reads the bytes once; also
with blocks of 32, which fill a tile of rows, so that effuse reads them apart. Then whole decode
steps of 32 requests. One by one is measured in two forms: with tiles of 128 rows for all blocks,
which is the base of the aims, and as effuse does it. Exits with 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from effuse.benchmarks.gpu_models import SDAR_8B, TINY
from effuse.benchmarks.gpu_step import PAGE_SIZE, Bench
from effuse.benchmarks.gpu_timing import (
    copy_bytes_per_us,
    fill,
    medians_us,
    next_step,
    run_marked,
)
from effuse.config.decoding import DecodeSettings
from effuse.decode_worker import device_buckets
from effuse.decode_worker.device_buckets import Integers
from effuse.kernels import attention_hopper
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.kernels.step_slots import SlotLayout
from effuse.kvtransfer.layout import KVLayout, PageMemory

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CUDA = torch.device("cuda")
REQUESTS, COMMON, OWN = 32, 4096, 128
SWEEP = [(count, common) for count in (2, 4, 8, 16, 32, 64) for common in (512, 1024, 2048, 4096)]
BLOCK = 4
SHARED_MODELS = {
    name: replace(config, architecture="sdar", block_size=BLOCK)
    for name, config in (("sdar-8b", SDAR_8B), ("tiny", TINY))
}
LEAST_STEP, LEAST_ATTENTION = 1.35, 3.0
STEPS, ROUNDS = 24, 5


@dataclass(frozen=True, slots=True)
class Point:
    """Sequences with `common` tokens of one beginning, then `own` ones, and a block in flight."""

    batch: int
    common: int
    own: int
    block: int

    @property
    def read_once(self) -> int:
        """Bytes of K and V."""
        tokens = self.common + self.batch * (self.own + self.block)
        return tokens * KV_HEADS * HEAD_DIM * 2 * 2

    @property
    def saved(self) -> int:
        """Keys that tiles need not read, as `device_buckets.LEAST_SAVED` counts them."""
        rows, tile = self.block * HEADS // KV_HEADS, device_buckets.TILE_ROWS
        tiles = self.batch * -(-rows // tile) - -(-self.batch * rows // tile)
        return tiles * self.common * KV_HEADS


class Inputs:
    """Random rows and pages of one layer."""

    def __init__(self, point: Point) -> None:
        layout = KVLayout("unified", 1, KV_HEADS, HEAD_DIM, PAGE_SIZE, "bfloat16")
        common, own = point.common // PAGE_SIZE, -(-point.own // PAGE_SIZE)
        memory = PageMemory(layout, common + point.batch * own, CUDA)
        memory.tensor.normal_()
        (self.cache,) = memory.layer_views()
        shape = point.batch * point.block, HEADS + 2 * KV_HEADS, HEAD_DIM
        fused = torch.randn(shape, dtype=torch.bfloat16, device=CUDA)
        self.q, self.k, self.v = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        order = torch.randperm(common + point.batch * own).tolist()
        shared, rest = order[:common], order[common:]
        each = [rest[i * own : (i + 1) * own] for i in range(point.batch)]
        rows, private = [point.block] * point.batch, [point.own] * point.batch
        whole = [point.common + point.own] * point.batch
        self.apart = _batch(rows, whole, [shared + pages for pages in each], point.block)
        self.together = replace(
            _batch(rows, private, each, point.block),
            shared=_batch([sum(rows)], [point.common], [shared], point.block),
        )

    def attend(self, batch: AttentionBatch) -> Tensor:
        return block_attention(self.q, self.k, self.v, *self.cache, batch, scale=HEAD_DIM**-0.5)


def _batch(
    rows: list[int], contexts: list[int], pages: list[list[int]], block: int
) -> AttentionBatch:
    origins = [0] * len(rows)
    return make_attention_batch(
        rows, contexts, pages, origins, block_size=block, page_size=PAGE_SIZE, device=CUDA
    )


def tall_tiles() -> AbstractContextManager[object]:
    """Small blocks get tiles of 128 rows as well."""
    return patch.object(attention_hopper, "MOST_SMALL_ROWS", 0)


def attention(point: Point) -> tuple[float, float, float]:
    """Microseconds of a layer: one by one in tall tiles, one by one, and together."""
    inputs = [Inputs(point) for _ in range(8)]
    error = inputs[0].attend(inputs[0].apart) - inputs[0].attend(inputs[0].together)
    assert float(error.abs().max()) < 0.05, "both ways give the same rows"

    def tall(one: Inputs) -> Tensor:
        with tall_tiles():
            return one.attend(one.apart)

    found = medians_us(
        {
            "tall": [partial(tall, one) for one in inputs],
            "apart": [partial(one.attend, one.apart) for one in inputs],
            "together": [partial(one.attend, one.together) for one in inputs],
        }
    )
    return found["tall"], found["apart"], found["together"]


class SharedBench(Bench):
    """Block diffusion, one block a request; all requests begin with the same pages."""

    models = SHARED_MODELS
    window = 1

    def _settings(self, pace: int) -> DecodeSettings:
        return DecodeSettings(
            algorithm="block_diffusion", denoising_steps=self.model.config.block_size
        )

    def _usual(self, batch: int) -> tuple[range, range]:
        rows = batch * self.model.config.block_size
        # A block that is about to be stored is counted together with the next one, all masks.
        return range(rows, 2 * rows + 1), range(1, 2 * rows + 1)

    def _requests(self, layout: SlotLayout, context: int, pace: int) -> list[Integers]:
        found = super()._requests(layout, context, pace)
        common = COMMON // PAGE_SIZE
        for row in found:
            at = layout.pages_at
            row[at : at + common] = found[0][at : at + common]
        return found


def step_ms(name: str) -> tuple[list[float], bool]:
    """Milliseconds of a step in the ways of `attention`, each the median of runs in turns; whether
    effuse reads the beginning together by its own rule."""
    bench = SharedBench(name, CUDA, REQUESTS, COMMON + OWN)
    found: list[list[float]] = [[], [], []]
    steppers = []
    for way in range(3):
        with tall_tiles() if way == 0 else nullcontext():
            stepper, requests = bench.ready(REQUESTS, COMMON + OWN, 1)
        steppers.append(stepper)
    for turn in range(-1, ROUNDS):
        for way, stepper in enumerate(steppers):
            with patch.object(device_buckets, "LEAST_SAVED", (-1 if way == 2 else 1) << 62):
                fill(stepper, requests)
                for _ in range(2):
                    next_step(stepper)
                before = stepper.num_sharing
                run = run_marked(stepper, partial(next_step, stepper), STEPS)
            assert stepper.num_sharing - before == STEPS * (way == 2)
            if turn >= 0:
                assert not run.captures, "no graph is captured in timed steps"
                found[way].append(run.step_ms)
    fill(stepper, requests)  # by effuse's own rule
    next_step(stepper)
    assert stepper._beginnings is not None
    return [median(one) for one in found], stepper._beginnings.pay_off


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints all of it."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_shared")
    parser.add_argument("--model", default="sdar-8b", choices=sorted(SHARED_MODELS))
    parser.add_argument("--no-sweep", action="store_true")
    asked = parser.parse_args(argv)
    rate = copy_bytes_per_us() / 2
    points = [] if asked.no_sweep else [Point(count, common, OWN, BLOCK) for count, common in SWEEP]
    aimed = Point(REQUESTS, COMMON, OWN, BLOCK)
    print("batch common block  saved keys  tall us  apart us  together us  ratios  read once us")
    for point in [*points, replace(aimed, block=32), aimed]:
        times = attention(point)
        tall, apart, together = times
        print(
            f"{point.batch:5} {point.common:6} {point.block:5} {point.saved:11} {tall:8.1f} "
            f"{apart:9.1f} {together:12.1f}  {tall / together:.2f}, {apart / together:.2f} "
            f"{point.read_once / rate:9.1f}",
            flush=True,
        )
    steps, shares = step_ms(asked.model)
    print(
        f"step, {REQUESTS} requests: {steps[0]:.2f} ms in tall tiles, {steps[1]:.2f} ms apart, "
        f"{steps[2]:.2f} ms together; effuse reads the beginning "
        f"{'together' if shares else 'apart'} by its own rule"
    )
    is_met = shares
    for what, (tall, apart, together), least in (
        ("attention", times, LEAST_ATTENTION),
        ("step", steps, LEAST_STEP),
    ):
        ratio = tall / together
        is_met &= ratio >= least
        print(
            f"{what}: {ratio:.2f} over tall tiles (at least {least}), {apart / together:.2f} over "
            f"today's one by one{'' if ratio >= least else '  MISSED'}"
        )
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
