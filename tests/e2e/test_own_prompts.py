"""Decode workers that compute prompts beside answers, as far as gaps with an objective allow."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from checkpoints import Architecture
from e2e.client import all_at_once, connect
from e2e.comparison import MARGIN, Pair, compare, margin, settings_of
from e2e.routers import second_router
from e2e.test_equality import raw_of, solid_jobs
from e2e.test_metrics import scrape
from e2e.tiny import TINY, tiny_fleet
from oracle.decode import decode_with

from effuse.cli.fleet import Fleet
from effuse.v1.generation_pb2 import GenerateResponse

AUTO = ("--prefill", "auto")
PIECE = re.compile(r"a step has (\d+) prompt tokens, at most (\S+)")


@cache
def long_jobs(architecture: Architecture) -> list[Pair]:
    """Jobs with prompts of most of the context, with the oracle's answers."""
    chance, pairs = random.Random(8), list[Pair]()
    for job, _ in solid_jobs(architecture, "d2f", seed=2):
        prompt = tuple(chance.choice(TINY.plain_ids) for _ in range(190))
        job = replace(job, prompt=prompt, max_tokens=24, stop_token_ids=())
        answer = decode_with(raw_of(architecture), job.prompt, settings_of(job))
        if margin(job, answer) > MARGIN:
            pairs.append((job, answer))
    return pairs[:6]


def counted(fleet: Fleet, name: str) -> float:
    return sum(n for key, n in scrape(fleet).items() if key[0] == f"effuse_own_{name}_total")


def pieces(fleet: Fleet) -> list[tuple[int, float]]:
    """Prompt tokens of each step of the decode worker, and those that the rule allowed."""
    log = (fleet.log_dir / "decode-0.log").read_text()
    return [(int(tokens), float(fit)) for tokens, fit in PIECE.findall(log)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Its router has no objective."""
    flags = ("--log-level", "debug", "--no-enable-prefix-caching")
    with tiny_fleet("sdar", connector="zmq", worker_flags=flags, router_flags=AUTO) as running:
        yield running


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Long prompts come while answers stream; the prefill worker has more to do."""
    return [*solid_jobs("sdar", "d2f", seed=2), *long_jobs("sdar")]


def test_without_an_objective_the_prefill_worker_computes_all_prompts(
    fleet: Fleet, pairs: list[Pair]
) -> None:
    before = counted(fleet, "prompt_tokens")
    for _ in range(4):
        answers = ask(fleet.address, pairs)
        assert all(answer.stats.prefill_worker == "prefill-0" for answer in answers)
    assert counted(fleet, "prompt_tokens") == before


def test_prompts_that_help_out_give_the_oracles_answers(fleet: Fleet, pairs: list[Pair]) -> None:
    """`decode_worker/test_room.py` compares a bidirectional model's tokens, without processes."""
    with second_router(fleet, *AUTO, "--gap-objective-s", "0.2") as router:
        for _ in range(40):  # until times are known, and prompts wait at the prefill worker
            ask(router.address, pairs)
            is_bounded = any(most < math.inf for _, most in pieces(fleet))
            if is_bounded and counted(fleet, "prompt_tokens") > 500:
                break
    found = pieces(fleet)
    assert sum(tokens for tokens, _ in found) == counted(fleet, "prompt_tokens") > 500
    assert all(tokens <= most for tokens, most in found)
    assert is_bounded, "no gap bounded a piece"


def ask(address: str, pairs: list[Pair]) -> list[GenerateResponse]:
    """Answers, which are the oracle's."""
    with connect(address) as client:
        answers = all_at_once(lambda pair: client.generate(pair[0].message()), pairs)
    compare(pairs, answers)
    return answers
