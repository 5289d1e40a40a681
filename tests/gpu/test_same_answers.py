"""Answers of whole models with `batch_invariant`, alone and beside others: published shapes in full
depth, with random weights, in one decode engine on a Hopper GPU. `e2e.same_answers` has fleets.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from effuse.benchmarks.gpu_engines import decode_engine, paged
from effuse.benchmarks.gpu_load import ClosedLoad, requests
from effuse.benchmarks.gpu_models import DREAM_7B, LLADA2_MINI, random_model
from effuse.config.decoding import DecodeSettings, Sampling
from effuse.decode_worker.device_buckets import bucket
from effuse.decode_worker.device_step import DeviceStep
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.step_slots import SlotLayout
from effuse.models.config import ModelConfig
from effuse.models.transformer import Transformer
from effuse.models.weights import measure_products
from effuse.worker.messages import Committed, CoreEvent, StartDecode

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
PAGE, LONGEST, TOKENS, WINDOW = 32, 640, 64, 4
COUNT, AT_ONCE = 64, (1, 8, 32)
SHAPES = {
    "dream": (DREAM_7B, DecodeSettings(algorithm="d2f", denoising_steps=32, window=WINDOW)),
    "mini": (LLADA2_MINI, DecodeSettings(algorithm="block_diffusion", denoising_steps=32)),
}

NEIGHBOUR = """
import select, sys, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(20):
        torch.mm(x, x)
    torch.cuda.synchronize()
    count += 20
print(count, flush=True)
"""

Answers = dict[str, list[int]]


def answers_of(load: ClosedLoad) -> Answers:
    """Runs a load, and returns its answers by request."""
    found: Answers = {}
    outbox = load.engine.outbox

    def noted() -> list[CoreEvent]:
        events = list(outbox())
        for event in events:
            if isinstance(event, Committed):
                found.setdefault(event.attempt.transfer_id, []).extend(event.token_ids)
        return events

    load.engine.outbox = noted
    load.run()
    return found


class Served:
    """A model whose head is scaled, so that some tokens are sure, and its engines."""

    def __init__(self, config: ModelConfig, *, batch_invariant: bool) -> None:
        weights = random_model(config, torch.device("cuda"), torch.bfloat16).weights
        weights.head.mul_(8)
        model = Transformer(config, weights, batch_invariant=batch_invariant)
        if batch_invariant:
            measure_products(model)
        num_tokens = (max(AT_ONCE) + 1) * (LONGEST + TOKENS + PAGE)
        self._paged = paged(model, num_tokens, page_size=PAGE)
        self._limits = DecodeLimits(
            max_num_batched_tokens=max(AT_ONCE) * (WINDOW + 1) * config.block_size + 2048,
            max_num_seqs=max(AT_ONCE),
            max_model_len=LONGEST + TOKENS + PAGE,
            num_pages=self._paged.memory.num_pages,
            page_size=PAGE,
            block_size=config.block_size,
        )
        limits = self._limits
        layout = SlotLayout(
            limits.max_num_seqs,
            limits.block_size,
            max_window=WINDOW,
            max_stops=4,
            max_pages=limits.pages_for(limits.max_model_len),
        )
        rows, kv = bucket(limits.max_num_batched_tokens), self._paged.memory.layer_views()
        self._stepper = DeviceStepper(DeviceStep(model, kv, layout, rows, page_size=PAGE))

    def answers(self, asked: list[StartDecode], at_once: int) -> Answers:
        parts = self._paged
        engine = decode_engine(parts, self._limits, self._stepper, parts.runner)
        return answers_of(ClosedLoad(engine, asked, at_once))


def asked_of(config: ModelConfig, settings: DecodeSettings) -> list[StartDecode]:
    """Half of them greedy, half sampled."""
    lengths = np.random.default_rng(39).integers(33, LONGEST, COUNT).tolist()
    sampled = Sampling(temperature=0.8, seed=7)
    return [
        msgspec.structs.replace(
            one, settings=settings, sampling=sampled if number % 2 else Sampling()
        )
        for number, one in enumerate(requests(config, lengths, WINDOW, TOKENS))
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_answers_alone_equal_those_beside_others(shape: str, *, batch_invariant: bool) -> None:
    config, settings = SHAPES[shape]
    asked = asked_of(config, settings)
    served = Served(replace(config), batch_invariant=batch_invariant)
    alone, *others = (served.answers(asked, at_once) for at_once in AT_ONCE)
    assert sum(len(tokens) for tokens in alone.values()) == COUNT * TOKENS
    differ = [sum(one[name] != alone[name] for name in alone) for one in others]
    print(f"{shape}, batch_invariant={batch_invariant}: {differ} of {COUNT} differ")
    # Without the mode an answer changes: so the comparison finds changes.
    assert any(differ) != batch_invariant


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Other processes that compute on the same GPU, so that kernels are interrupted."""
    command = [sys.executable, "-P", "-c", NEIGHBOUR]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        for one in running:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        yield
        counts = [int(one.communicate("\n", timeout=60)[0]) for one in running]
        print(f"{counts} products of the neighbours")
        assert all(counts), "each has computed meanwhile"
    finally:
        for one in running:
            one.kill()
            one.wait()


def test_answers_beside_other_processes_equal_those_without() -> None:
    """A GPU saves and restores a kernel that it interrupts. That writes barriers back, also over
    other values that lie in their place by now."""
    config, settings = SHAPES["mini"]
    asked = asked_of(config, settings)
    served = Served(replace(config), batch_invariant=True)
    alone = served.answers(asked, 8)
    with neighbours(2):
        beside = [served.answers(asked, at_once) for at_once in (1, 8)]
    assert all(one == alone for one in beside)
