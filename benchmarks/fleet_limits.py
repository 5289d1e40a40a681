"""The limits for `gpu_fleet` from a split fleet's GPUs by themselves: the same GPUs, in turns with
the fleet's loads, because a warm GPU is slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from effuse.benchmarks import gpu_handoff
from effuse.benchmarks.fleet_load import Pace, Shape, Steady
from effuse.benchmarks.fleet_plans import Plan
from effuse.benchmarks.gpu_handoff import Peer, child
from effuse.benchmarks.raw_transfer import scattered

ALONE = "effuse.benchmarks.gpu_alone"
HANDOFFS_A_SECOND = 20
BATCHES = (1, 2, 4, 8, 16)
TURNS = 10

Times = dict[str, Any]


class Limits:
    """Prefill on the GPU of the prefill worker, decode on that of the decode worker, each in an
    engine in a separate process, which is idle during the fleet's turns.
    """

    def __init__(self, plan: Plan, gpus: Sequence[str], prefill: Peer, decode: Peer) -> None:
        self._plan, self._gpus = plan, list(gpus)
        self._prefill, self._decode = prefill, decode
        # by length and prompts in one forward
        self._forwards: dict[tuple[int, int], list[float]] = {}
        self._loads: dict[tuple[Shape, int], list[Times]] = {}
        self._steady: dict[str, list[Pace]] = {}
        self._arrivals: Times = {}

    def found(self) -> dict[str, Any]:
        """Seconds of a prompt by its length, in the faster of two ways, one for each forward or as
        many as the prefill worker's limit allows; decode by load; arrivals. Means over the turns.
        """
        prefill: dict[str, float] = {}
        for (length, _), seconds in sorted(self._forwards.items()):
            mean = statistics.fmean(seconds)
            prefill[str(length)] = min(mean, prefill.get(str(length), mean))
        decode = [
            {"shape": str(shape), "at_once": at_once, **_mean(turns), "turns": turns}
            for (shape, at_once), turns in self._loads.items()
        ]
        ways = [
            {"length": length, "prompts": prompts, "seconds": seconds}
            for (length, prompts), seconds in sorted(self._forwards.items())
        ]
        found = {"prefill": prefill, "prefill_turns": ways, "decode": decode}
        steady = {name: [asdict(one) for one in paces] for name, paces in self._steady.items()}
        return {**found, "steady": steady, "arrivals": self._arrivals}

    def batches(self) -> None:
        """Smaller batches of the arriving requests, to compare gaps with."""
        for shape in dict.fromkeys(shape for shape, _ in self._plan.closed):
            for at_once in BATCHES:
                if at_once <= self._plan.split[0].max_num_seqs:
                    self._steps_of(shape, at_once, self._plan.seconds / 4, goes_on=False)

    def turn(self, shape: Shape, at_once: int, goes_on: bool) -> None:
        """Half of the measurements of a closed load, beside the fleet's own; both workers' GPUs
        together, as the fleet uses them. goes_on: it has another turn, with the same requests.
        """
        half = self._plan.seconds / 2
        jobs = [lambda: self._steps_of(shape, at_once, half, goes_on=goes_on)]
        if (shape, at_once) in self._plan.closed:
            jobs.append(lambda: self._forwards_of(shape.prompt, half))
        with ThreadPoolExecutor(max(1, len(set(self._gpus)))) as pool:
            for each in [pool.submit(job) for job in jobs]:
                each.result()

    def steady(self, load: Steady, lags: Sequence[int]) -> Pace:
        """The same number of requests in the engine by itself, with the same delays in steps."""
        pace = Pace(**self._decode.ask(do="steady", **asdict(load), lags=list(lags)))
        self._steady.setdefault(str(load), []).append(pace)
        print(f"alone: {load}: {pace}", flush=True)
        return pace

    def _steps_of(self, shape: Shape, at_once: int, seconds: float, *, goes_on: bool) -> None:
        """Rate and gaps of this many requests at a time, whose prompts' KV already exists."""
        load = {"prompt": shape.prompt, "answer": shape.answer, "at_once": at_once}
        took = self._decode.ask(do="decode", seconds=seconds, goes_on=goes_on, **load)
        self._loads.setdefault((shape, at_once), []).append(took)

    def _forwards_of(self, length: int, seconds: float) -> None:
        ways = {1, max(1, self._plan.split[0].prompt_rows // length)}
        for prompts in sorted(ways):
            load = {"prompts": prompts, "length": length, "seconds": seconds / len(ways)}
            took = self._prefill.ask(do="prefill", **load)["seconds"]
            self._forwards.setdefault((length, prompts), []).append(took)

    def arrivals(self) -> None:
        """Time of a step of 16 requests in turns without handoffs and with 20 a second; every other
        time in the opposite order.
        """
        plan = self._plan
        shape, at_once = plan.beside_arrivals
        count = max(2, round(HANDOFFS_A_SECOND * plan.seconds / 4))
        pages = plan.served.prompt // 32
        flags = ["--connector", "nixl", "--pages", str(pages), "--model", plan.model]
        flags += ["--dtype", "bfloat16" if torch.cuda.is_available() else "float32"]
        load = {"prompt": shape.prompt, "answer": shape.answer, "at_once": at_once}
        steps = {"do": "steps", "seconds": plan.seconds / 4, **load}
        turns: dict[str, list[float]] = {"without": [], "with": []}
        handoffs: list[float] = []
        self._decode.ask(do="listen")
        with gpu_handoff.end("sender", flags, self._gpus[:1]) as sender:
            for turn in range(-2, TURNS):
                held = self._decode.ask(do="reserve", handoffs=count, pages=pages)
                pushes = {
                    "do": "push_many",
                    "source": scattered(pages, 1),
                    "every_s": 1 / HANDOFFS_A_SECOND,
                    **held,
                }
                both = ("without", "with")
                for name in both if turn % 2 else reversed(both):
                    self._decode.send(**steps)
                    pushed = sender.ask(**pushes)["seconds"] if name == "with" else []
                    step_s = self._decode.receive()["step_s"]
                    if turn >= 0:
                        turns[name].append(step_s)
                        handoffs += pushed
        self._decode.ask(do="rest")
        medians = {name: statistics.median(values) for name, values in turns.items()}
        handoff = statistics.median(handoffs)
        self._arrivals = {**medians, "turns": turns, "handoff_p50_s": handoff}


@contextmanager
def limits_on(plan: Plan, gpus: Sequence[str]) -> Iterator[Limits]:
    """On the first and the last of these GPUs (none: the CPU), until the end of the block."""
    flags = ["--model", plan.model, "--max-model-len", str(-(-plan.longest // 32) * 32)]
    most = str(plan.split[0].max_num_seqs)
    with (
        child(ALONE, [*flags, "--max-num-seqs", "1"], gpus[:1]) as prefill,
        child(ALONE, [*flags, "--max-num-seqs", most], gpus[-1:]) as decode,
    ):
        prefill.receive()
        decode.receive()
        yield Limits(plan, gpus, prefill, decode)


def _mean(turns: Sequence[Times]) -> Times:
    """Of each figure; None if a turn was too short for it."""
    return {
        name: None if None in values else statistics.fmean(values)
        for name in turns[0]
        for values in [[turn[name] for turn in turns]]
    }
