"""Tokens of workers of several devices against the reference decoder's, and those of the authors'
own code, for every pair of degrees.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.degrees
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoints import ARCHITECTURES, architecture_of
from e2e.client import all_at_once, connect
from e2e.kept import FAST_DLLM_V2, LLADA2, SDAR, Family, canvas
from e2e.test_equality import solid_jobs
from e2e.tiny import TINY, fleet_of, tiny_checkpoint

from effuse.cli.fleet import Fleet
from effuse.client.params import make_request
from effuse.v1 import generation_pb2 as pb

DEGREES: Final = (1, 2, 4)
ALGORITHMS: Final = ("d2f", "block_diffusion")
LOOPS: Final = {"SDAR's loop": SDAR, "LLaDA2's loop": LLADA2, "Fast-dLLM v2's loop": FAST_DLLM_V2}
"""Of models whose prompts are handed over. Prompts of a canvas never are."""
CANVASES: Final = {"LLaDA's loops": canvas("llada"), "Dream's loops": canvas("dream")}
SPREAD: Final = "LLaDA2's loop, experts spread"
REPLICAS: Final = "LLaDA2's loop, replicas"
_ANSWERS: Final = 2  # of each request
CUTS: Final = (
    *(("zmq", 0, 4, 2, 16), ("zmq", 0, 4, 4, 8), ("zmq", 1, 2, 2, 8)),
    *(("nixl", 1, 4, 2, 8), ("nixl", 2, 4, 4, 16), ("zmq", 4, 4, 2, 1)),
)
"""Of workers whose ranks cut the context: connector, both degrees, ranks that cut it, and tokens in
a page: one token, a block, or more."""

CUT_PROMPTS: Final = (
    *(("zmq", 1, 2, 1, 1, 8, 2048), ("nixl", 1, 4, 2, 1, 16, 2048), ("zmq", 1, 4, 1, 1, 8, 16)),
    *(("nixl", 1, 2, 2, 2, 8, 16), ("zmq", 1, 4, 4, 2, 4, 2048), ("nixl", 2, 2, 1, 1, 8, 24)),
)
"""Of prefill workers whose ranks cut prompts: connector, the prefill degree, these ranks, the
decode degree, ranks that cut the context there, tokens in a page, and in a forward."""

STAGES: Final = (
    *(("zmq", (1, 2), (1, 1), 16, 16), ("nixl", (2, 1), (1, 3), 16, 2048)),
    *(("nixl", (1, 3), (1, 2), 8, 8), ("zmq", (1, 1), (2, 2), 16, 2048)),
    *(
        ("zmq", (2, 2), (2, 2), 8, 16),
        ("nixl", (1, 2), (4, 1), 16, 24),
        ("zmq", (4, 1), (1, 2), 4, 8),
    ),
)
"""Of workers whose ranks have stages of layers: connector, the devices of a stage and the stages of
the prefill worker and of the decode worker, tokens in a page, and in a forward over prompts. The
models have three layers."""

Asked = tuple[pb.GenerateRequest, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet of one prefill worker, or none (degree 0), and one decode worker."""

    work: str  # an architecture, whose tokens the oracle gives, or a loop
    connector: str
    prefill: int
    decode: int
    algorithms: Sequence[str] = ALGORITHMS  # of an architecture
    context: int = 1  # ranks of the decode worker that cut the context
    page_size: int = TINY.page_size
    rows: int = 1  # ranks, for each of the prefill degree, that compute different rows of a prompt
    max_tokens: int = 2048  # in a forward of the prefill worker
    stages: tuple[int, int] = (1, 1)  # of layers, in either worker, each with as many ranks

    def __str__(self) -> str:
        name = f"{self.work}, {self.connector}, {self.prefill} to {self.decode}"
        if self.context > 1:
            name += f", context cut by {self.context}"
        if self.rows > 1:
            name += f", prompts cut by {self.rows}, forwards of {self.max_tokens}"
        if max(self.stages) > 1:
            name += ", stages {} to {}".format(*self.stages)
        if self.page_size != TINY.page_size:
            name += f", pages of {self.page_size}"
        return name


def all_cases() -> Iterator[Case]:
    """Every family whose layers differ and every loop; every connector and pair of degrees."""
    for work in (*ARCHITECTURES, *LOOPS, SPREAD, REPLICAS):
        for connector in ("nixl", "zmq"):
            for pair in itertools.product(DEGREES, DEGREES):
                yield Case(work, connector, *pair)
        for decode in DEGREES[1:]:
            yield Case(work, "zmq", 0, decode)
    for work in CANVASES:
        for decode in DEGREES:
            yield Case(work, "zmq", 0, decode)
        yield Case(work, "zmq", 0, 4, context=2)
        yield Case(work, "zmq", 0, 1, stages=(1, 3))
        yield Case(work, "zmq", 0, 2, stages=(1, 2))
    for work in (*ARCHITECTURES, *LOOPS):
        for connector, prefill, decode, context, page_size in CUTS:
            yield Case(work, connector, prefill, decode, context=context, page_size=page_size)
        for row in CUT_PROMPTS:
            connector, prefill, rows, decode, context, page_size, max_tokens = row
            if max_tokens < 2048 and work in ("llada", "dream"):
                continue  # their prompts cannot be split
            yield Case(
                *(work, connector, prefill, decode),
                context=context,
                page_size=page_size,
                rows=rows,
                max_tokens=max_tokens,
            )

    for work in (*ARCHITECTURES, *LOOPS, SPREAD):
        for connector, (prefill, before), (decode, after), page_size, most in STAGES:
            is_whole = work in ("llada", "dream")  # prompts cannot be split
            yield Case(
                *(work, connector, prefill, decode),
                page_size=page_size,
                max_tokens=2048 if is_whole else most,
                stages=(before, after),
            )


def differing(case: Case, most: int | None = None) -> tuple[int, int]:
    """(tokens that differ from the expected ones, tokens) of one case, or of its first requests."""
    with serving(case) as (fleet, asked), connect(fleet.address) as client:
        asked = asked[:most]
        requests = [request for request, _ in asked]
        answers = all_at_once(client.generate, requests)
        if max(case.context, case.rows, *case.stages) > 1:  # once more, with the KV that was kept
            answers += all_at_once(client.generate, requests)
            asked = asked * 2
    return count_wrong(asked, answers)


def count_wrong(asked: Sequence[Asked], answers: Sequence[pb.GenerateResponse]) -> tuple[int, int]:
    """(tokens that differ from the expected ones, tokens) of answers, and of those beside them."""
    num_tokens = num_wrong = 0
    for (request, expected), first in zip(asked, answers, strict=True):
        both = [first, *first.others]
        assert len(both) == max(request.n, 1)
        num_tokens += len(both) * len(expected)
        for answer in both:
            pairs = itertools.zip_longest(answer.token_ids, expected)
            num_wrong += sum(one != other for one, other in pairs)
    return num_wrong, num_tokens


def flags_of(case: Case) -> tuple[list[str], list[str]]:
    """Flags of the prefill worker, none if the fleet has none, and of the decode worker."""
    size, stages = "--tensor-parallel-size", "--pipeline-parallel-size"
    prefill = []
    if case.prefill:
        prefill = [size, str(case.prefill), stages, str(case.stages[0])]
        prefill += ["--prefill-context-parallel-size", str(case.rows)]
        if case.max_tokens < 2048:
            is_tiny = case.work in ARCHITECTURES
            block_size = TINY.block_size if is_tiny else _family(case.work).block_size
            prefill += ["--max-num-batched-tokens", str(max(case.max_tokens, block_size))]
    decode = [("--data-parallel-size" if case.work == REPLICAS else size), str(case.decode)]
    decode += [stages, str(case.stages[1]), "--decode-context-parallel-size", str(case.context)]
    return prefill, decode


@contextlib.contextmanager
def serving(case: Case) -> Iterator[tuple[Fleet, list[Asked]]]:
    """The fleet, and its requests with the expected tokens."""
    prefill, decode = flags_of(case)
    if case.work in ARCHITECTURES:  # so few pages that it preempts
        decode += ["--num-pages", str(-(-14 * TINY.page_size // (case.page_size * case.context)))]
    if case.work == SPREAD:
        prefill += ["--expert-parallel"] if case.prefill > 1 else []
        decode += ["--expert-parallel"] if case.decode > 1 else []
    with (
        tempfile.TemporaryDirectory(prefix="effuse-degrees-") as home,
        fleet_of(
            model_of(case.work, Path(home)),
            connector=case.connector,
            prefill=min(case.prefill, 1),
            worker_flags=("--page-size", str(case.page_size)),
            prefill_flags=(*prefill,),
            decode_flags=(*decode,),
        ) as fleet,
    ):
        yield fleet, asked_of(case.work, case.algorithms)


def model_of(work: str, home: Path) -> Path:
    """Writes the checkpoint of an architecture or a loop."""
    if work in ARCHITECTURES:
        return tiny_checkpoint(home / work, architecture_of(work))
    family = _family(work)
    return family.write(home / "model", family.block_size)


def asked_of(work: str, algorithms: Sequence[str] = ALGORITHMS) -> list[Asked]:
    """Requests of a work, those of an architecture for these algorithms, with the expected tokens.
    Greedy ones get `_ANSWERS` answers, which are equal, except on a canvas, where positions are
    drawn too."""
    if work in ARCHITECTURES:
        return [
            (with_answers(job.message()), expected.token_ids)
            for algorithm in algorithms
            for job, expected in solid_jobs(
                architecture_of(work), algorithm, seed=3, least_blocks=7
            )
        ]
    family = _family(work)
    asked = [
        (make_request(run.prompt, run.params, token_ids=True), run.tokens)
        for run in family.runs(family.block_size)
    ]
    if work in CANVASES:
        return asked
    return [(with_answers(request), tokens) for request, tokens in asked]


def with_answers(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request; for several answers if its tokens are not drawn."""
    if not request.sampling.temperature:
        request.n = _ANSWERS
    return request


def _family(work: str) -> Family:
    return (LOOPS | CANVASES | {SPREAD: LLADA2, REPLICAS: LLADA2})[work]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the cases' names: 'nixl, 2 to 4'")
    found = parser.parse_args(argv)
    wrong = total = count = 0
    for case in all_cases():
        if found.only not in str(case):
            continue
        began = time.monotonic()
        num_wrong, num_tokens = differing(case)
        wrong, total, count = wrong + num_wrong, total + num_tokens, count + 1
        seconds = time.monotonic() - began
        print(f"{case}: {num_wrong} of {num_tokens} differ ({seconds:.0f} s)", flush=True)
    print(f"{count} cases: {wrong} of {total} tokens differ")
    return int(wrong > 0 or not total)


if __name__ == "__main__":
    sys.exit(main())
