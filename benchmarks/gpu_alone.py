"""Limits of `gpu_fleet` on one GPU by itself: a child process that times what its parent asks for.

Prefill: forwards of prompts queued back to back, by the host's clock from the first to the end of
the last. Decode: the decode worker's engine in a closed loop over prompts that count as already
handed over (`HandedOver`), so that only steps run. With a sender, handoffs arrive in pages beside
the engine's own while it steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count, pairwise

import msgspec
import numpy as np
import torch

from effuse.benchmarks.fleet_load import TOKENS_A_FORWARD, Steady
from effuse.benchmarks.gpu_engines import decode_engine, paged
from effuse.benchmarks.gpu_handoff_end import End, respond, serve
from effuse.benchmarks.gpu_load import ClosedLoad, Served, requests
from effuse.benchmarks.gpu_models import MODELS, random_model
from effuse.benchmarks.gpu_serve import HandedOver
from effuse.benchmarks.gpu_timing import synchronize
from effuse.cli.figures import percentile
from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker.device_stepper import make_stepper
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.models.part import Part
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

PAGE_SIZE = 32
SPARE_PAGES = 1024  # beyond the engine's, for handoffs that arrive while it steps


class Alone:
    """One GPU's engine parts, with commands for `serve`."""

    def __init__(self, model: Transformer, max_num_seqs: int, max_model_len: int) -> None:
        size = model.config.block_size
        self._model = model
        num_pages = max_num_seqs * -(-max_model_len // PAGE_SIZE)
        self._paged = paged(model, (num_pages + SPARE_PAGES) * PAGE_SIZE, page_size=PAGE_SIZE)
        self._paged.memory.tensor.normal_()  # random like real KV; zeros cost a GPU less
        self._limits = DecodeLimits(
            # Like a worker's: handed-over prompts need no rows, but the scheduler counts them.
            max_num_batched_tokens=2 * size * max_num_seqs + max_model_len,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            block_size=size,
        )
        self._stepper = make_stepper(model, self._paged.memory.layer_views(), self._limits)
        self._end: End | None = None
        self._load: ClosedLoad | None = None
        self._names = count()
        self._arrived = 0

    def _prefill(self, prompts: int, length: int, seconds: float) -> None:
        """Seconds of a prompt's forward, with this many in one."""
        pages, mask = -(-length // PAGE_SIZE), self._model.config.mask_token_id
        draw = np.random.default_rng(length)
        parts = [
            Part(
                token_ids=draw.integers(0, mask, length).tolist(),
                start=0,
                pages=range(at * pages, (at + 1) * pages),
                num_stored=length,
                block_origin=self._model.config.block_origin(length),
                keep_boundary=True,
            )
            for at in range(prompts)
        ]
        self._forwards(parts, 2)
        once = self._forwards(parts, 2) / 2
        repeats = max(2, round(seconds / once))
        respond(seconds=self._forwards(parts, repeats) / repeats / prompts)

    def _forwards(self, parts: list[Part], repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            self._paged.runner.run(parts)
        synchronize(self._model.device)
        return time.perf_counter() - begin

    def _decode(
        self, prompt: int, answer: int, at_once: int, seconds: float, goes_on: bool = False
    ) -> None:
        """Rate of tokens and gaps between blocks with `at_once` requests at any time; the load is
        kept for the next command if it goes on.
        """
        load = self._load = self._load or self._begin(prompt, answer, at_once)
        begin, _ = self._run(load, seconds)
        taken = time.perf_counter() - begin
        gaps = [gap for one in load.everyone() for gap in _gaps(one, begin)]
        tokens = sum(
            size
            for one in load.everyone()
            for at, size in zip(one.blocks, one.sizes, strict=True)
            if at >= begin
        )
        ended = [one for one in load.served if one.blocks[-1] >= begin]
        forwards = sum(one.forwards for one in ended)
        blocks = sum(len(one.blocks) for one in ended)
        if not goes_on:
            self._end_load()
        respond(
            tokens_per_s=tokens / taken,
            gap_p50_s=percentile(gaps, 0.5),
            gap_p99_s=percentile(gaps, 0.99),
            forwards_a_block=forwards / blocks if blocks else None,
        )

    def _steady(
        self, prompt: int, at_once: int, first: int, last: int, spare: int, lags: Sequence[int]
    ) -> None:
        """Pace of requests that run beside each other from one of their blocks to another, each
        with its lag in steps behind the first.
        """
        steady = Steady(prompt, at_once, first, last, spare)
        block_size = self._model.config.block_size
        draw = self._messages(prompt, steady.shape(block_size).answer)
        load = self._closed([next(draw) for _ in range(at_once)], prompt, most=0)
        load.begin(lags)
        running = load.everyone()
        while any(len(one.blocks) <= last for one in running):
            load.step()
            if load.served:
                raise RuntimeError("a request ended before all had come that far")
        respond(**asdict(steady.pace([one.blocks for one in running], block_size)))
        load.end()

    def _rest(self) -> None:
        """Ends a continued load."""
        self._end_load()
        respond()

    def _end_load(self) -> None:
        if self._load is not None:
            self._load.end()
        self._load = None

    def _listen(self) -> None:
        """Opens the spare pages to a sender."""
        self._end = End("receiver", "nixl", self._paged.memory)
        respond()

    def _reserve(self, handoffs: int, pages: int) -> None:
        """Reservations of spare pages, which handoffs with enough time between them take in
        turns.
        """
        assert self._end is not None
        first, slots = self._limits.num_pages, SPARE_PAGES // pages
        names = [f"arriving {next(self._names)}" for _ in range(handoffs)]
        respond(
            reservations=[
                self._end.expect(
                    name, [first + (at % slots) * pages + page for page in range(pages)]
                )
                for at, name in enumerate(names)
            ]
        )

    def _steps(self, prompt: int, answer: int, at_once: int, seconds: float) -> None:
        """Time of a step, and how many handoffs arrived meanwhile; the load continues from call to
        call.
        """
        if self._load is None:
            self._load = self._begin(prompt, answer, at_once)
        begin, steps = self._run(self._load, seconds)
        arrived = self._arrived
        respond(step_s=(time.perf_counter() - begin) / max(1, steps), steps=steps, arrived=arrived)

    def _closed(
        self,
        messages: list[StartDecode],
        prompt: int,
        *,
        most: int,
        then: Iterator[StartDecode] | None = None,
    ) -> ClosedLoad:
        forward = HandedOver(self._model, prompt)
        engine = decode_engine(self._paged, self._limits, self._stepper, forward)
        return ClosedLoad(engine, messages, most, then)

    def _begin(self, prompt: int, answer: int, at_once: int) -> ClosedLoad:
        draw = self._messages(prompt, answer)
        first = [
            msgspec.structs.replace(
                next(draw), stopping=Stopping(max_tokens=max(1, answer * number // at_once))
            )
            for number in range(1, at_once + 1)
        ]
        load = self._closed(first, prompt, most=1, then=draw)
        # One for each step, like clients at different times: otherwise all would begin and end
        # their blocks together.
        load.begin(range(at_once))
        while len(load.served) < at_once // 2 + 1:
            load.step()
        return load

    def _run(self, load: ClosedLoad, seconds: float) -> tuple[float, int]:
        """When it began, and the number of steps, without those of prompts."""
        self._arrived = 0
        before, begin = _num_steps(load), time.perf_counter()
        while time.perf_counter() < begin + seconds:
            load.step()
            if self._end is not None:
                self._arrived += self._end.arrived()
        return begin, _num_steps(load) - before

    def _messages(self, prompt: int, answer: int) -> Iterator[StartDecode]:
        config = self._model.config
        (made,) = requests(config, [prompt], 1, answer)
        draw = np.random.default_rng(prompt)
        settings = msgspec.structs.replace(
            made.settings,
            algorithm="block_diffusion",
            remasking="low_confidence_static",
            denoising_steps=config.block_size // TOKENS_A_FORWARD,
        )
        for number in self._names:
            attempt = msgspec.structs.replace(
                made.attempt, request_id=f"{number}", transfer_id=f"{number}"
            )
            # Each with its own prompt and seed, because equal ones share pages and answers.
            yield msgspec.structs.replace(
                made,
                attempt=attempt,
                prompt_token_ids=tuple(draw.integers(0, config.mask_token_id, prompt).tolist()),
                sampling=Sampling(seed=int(draw.integers(2**63))),
                settings=settings,
            )


def _num_steps(load: ClosedLoad) -> int:
    """The engine also counts computing a prompt's KV, which is nothing here."""
    return load.engine.counters.steps - load.num_begun


def _gaps(served: Served, begin: float) -> list[float]:
    blocks = [at for at in served.blocks if at >= begin]
    return [after - before for before, after in pairwise(blocks)]


def main() -> None:
    """Serves commands from standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(MODELS[asked.model], device, dtype)
    alone = Alone(model, asked.max_num_seqs, asked.max_model_len)
    respond(ready=True)
    serve(alone)


if __name__ == "__main__":
    main()
