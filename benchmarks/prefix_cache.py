"""The time of a prompt whose beginning is in the prefix cache, compared with the bare forward of
the rest.

In turns, on one engine: prompts of which nothing is cached, prompts of which everything but the
last eighth is, and the model's forward of such an eighth over pages of a whole prompt, which is the
limit. On a GPU a model of SDAR-8B's shape.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import count
from statistics import median

import numpy as np
import torch

from effuse.benchmarks import gpu_models
from effuse.benchmarks.gpu_engines import Paged, paged, prefill_engine
from effuse.benchmarks.gpu_models import TINY, random_model
from effuse.benchmarks.gpu_prefill import compute, elapsed_ms, forget
from effuse.benchmarks.gpu_timing import synchronize
from effuse.benchmarks.report import Figure
from effuse.kvtransfer.messages import AttemptId
from effuse.models.part import Part
from effuse.models.transformer import Transformer
from effuse.models.weights import measure_products
from effuse.prefill_worker.engine import PrefillEngine
from effuse.worker.messages import StartPrefill

SDAR_8B = replace(gpu_models.SDAR_8B, block_size=16, max_position_embeddings=16384)
SMALL = replace(
    TINY,
    architecture="sdar",
    num_layers=6,
    hidden_size=192,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=448,
    qkv_bias=False,
    qk_norm=True,
    block_size=16,
)
LENGTH, REST, PAGE_SIZE = 2048, 256, 32
ROUNDS, WARM_UP = 9, 2
MOST_RATIO = 1.3


def measure(*, batch_invariant: bool = False) -> tuple[Figure, list[str]]:
    """The figure, and the times behind it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, dtype = (SDAR_8B, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    weights = random_model(config, device, dtype).weights
    model = Transformer(config, weights, batch_invariant=batch_invariant)
    if batch_invariant:
        measure_products(model)
    parts = paged(model, 4 * LENGTH, page_size=PAGE_SIZE)
    engine = prefill_engine(parts, max_num_batched_tokens=LENGTH)
    generator, names = np.random.default_rng(1), count()

    def drawn(length: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, config.mask_token_id, length).tolist())

    def run_ms(prompt: tuple[int, ...]) -> float:
        return _run_ms(engine, str(next(names)), prompt)

    def forward_ms() -> float:
        return elapsed_ms(lambda: _run_forward(parts, drawn(REST)))

    known = drawn(LENGTH - REST)
    times: list[list[float]] = [[], [], []]
    for turn in range(-WARM_UP, ROUNDS):
        taken_ms = run_ms(drawn(LENGTH)), run_ms(known + drawn(REST)), forward_ms()
        for kept, one in zip(times, taken_ms, strict=True):
            if turn >= 0:
                kept.append(one)
    found = engine.load().prefix_hits
    assert found == (ROUNDS + WARM_UP - 1) * len(known), found
    engine.close()
    whole, rest, bare = (median(one) for one in times)
    figure = Figure(
        name=f"prompt of {LENGTH} tokens, all but {REST} of them known",
        value=rest / bare,
        limit=MOST_RATIO,
        unit="times",
        bound="at most",
        against=f"the model's forward of {REST} tokens over those pages",
    )
    note = (
        f"prefix cache: {whole:.2f} ms if nothing is known, {rest:.2f} ms if the beginning "
        f"is ({whole / rest:.1f} times as fast), {bare:.2f} ms for the rest's forward alone"
    )
    return figure, [note]


def _run_forward(parts: Paged, token_ids: tuple[int, ...]) -> None:
    """The content of those pages does not matter for the time."""
    part = Part(
        token_ids=token_ids,
        start=LENGTH - REST,
        pages=range(LENGTH // PAGE_SIZE),
        num_stored=REST,
        block_origin=0,
        keep_boundary=False,
    )
    parts.runner.run([part])
    synchronize(parts.model.device)


def _run_ms(engine: PrefillEngine, name: str, prompt: tuple[int, ...]) -> float:
    """From the message until the engine has reported that the prompt is computed."""
    message = StartPrefill(attempt=AttemptId(name, 1, name), prompt_token_ids=prompt)
    taken_ms = elapsed_ms(lambda: compute(engine, [message]))
    forget(engine, [message])
    return taken_ms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.prefix_cache")
    parser.add_argument("--batch-invariant", action="store_true")
    figure, notes = measure(**vars(parser.parse_args()))
    print(f"{figure.name}: {figure.value:.2f} {figure.unit} {figure.against}", *notes, sep="\n")
