"""Tokens of workers of several devices against the reference decoder's, for every pair of degrees.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.degrees
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoints import ARCHITECTURES, Architecture
from e2e.test_equality import ask, solid_jobs
from e2e.tiny import tiny_fleet

DEGREES = (1, 2, 4)
ALGORITHMS = ("d2f", "block_diffusion")


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet of one prefill worker, or none (degree 0), and one decode worker."""

    architecture: Architecture
    connector: str
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.architecture}, {self.connector}, {self.prefill} to {self.decode}"


def all_cases() -> Iterator[Case]:
    """Every family whose layers differ, every connector, every pair of degrees."""
    for architecture in ARCHITECTURES:
        for connector in ("nixl", "zmq"):
            for pair in itertools.product(DEGREES, DEGREES):
                yield Case(architecture, connector, *pair)
        for decode in DEGREES[1:]:
            yield Case(architecture, "zmq", 0, decode)


def differing(case: Case, *, num_pages: int = 14) -> tuple[int, int]:
    """(tokens that differ from the reference decoder's, tokens) of one case. The decode worker has
    so few pages that it preempts.
    """
    size = "--tensor-parallel-size"
    with tiny_fleet(
        case.architecture,
        connector=case.connector,
        prefill=min(case.prefill, 1),
        prefill_flags=(size, str(case.prefill)),
        decode_flags=(size, str(case.decode), "--num-pages", str(num_pages)),
    ) as fleet:
        num_tokens = num_wrong = 0
        for algorithm in ALGORITHMS:
            pairs = solid_jobs(case.architecture, algorithm, seed=3, least_blocks=7)
            answers = ask(fleet, [job for job, _ in pairs])
            for (_, expected), answer in zip(pairs, answers, strict=True):
                found = tuple(answer.token_ids)
                num_tokens += len(expected.token_ids)
                num_wrong += sum(
                    one != other for one, other in itertools.zip_longest(found, expected.token_ids)
                )
    return num_wrong, num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a part of the cases' names, such as 'nixl, 2 to 4'")
    found = parser.parse_args(argv)
    wrong = total = 0
    for case in all_cases():
        if found.only and found.only not in str(case):
            continue
        began = time.monotonic()
        num_wrong, num_tokens = differing(case)
        wrong, total = wrong + num_wrong, total + num_tokens
        print(
            f"{case}: {num_wrong} of {num_tokens} differ ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    print(f"{wrong} of {total} tokens differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
