"""The fleet's tokens are the reference decoder's, with any connector and any preemption.

Jobs whose decisions depend on the last bits of a float are left out, so that another processor's
rounding does not break the comparison; the oracle counts the cases that must occur.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import Architecture
from e2e.client import all_at_once, connect, load_of, wait_until
from e2e.comparison import MARGIN, Pair, compare, margin, settings_of
from e2e.tiny import TINY, tiny_checkpoint, tiny_fleet
from e2e.workload import Job, draw_jobs
from oracle.decode import decode_with
from oracle.forward import RawModel, load_raw
from oracle.settings import Occurrences

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb

CONCURRENT = 16
DRAWN = 36
FEW_PAGES = 14
PREEMPTED = 8  # of which so few pages hold two
KNOWN = 3  # whose pages are all kept in so few


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Served:
    """A fleet, its model, and its connector."""

    architecture: Architecture
    connector: str
    preempted: str  # the algorithm whose requests are preempted, if any are
    fleet: Fleet


Kind = tuple[Architecture, str, str, tuple[str, ...]]
ROOMY: Kind = ("sdar", "nixl", "", ())
# Decode workers with few pages; the other attention, and the other layout.
SCARCE: list[Kind] = [
    ("sdar", "zmq", "block_diffusion", ("--attention", "flex")),
    ("dream", "nixl", "d2f", ("--kv-layout", "distinct")),
]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Shared by the tests of one kind of fleet, for which earlier requests do not matter."""
    architecture, connector, preempted, flags = request.param
    few = ("--num-pages", str(FEW_PAGES)) if preempted else ()
    with tiny_fleet(
        architecture, connector=connector, worker_flags=flags, decode_flags=few
    ) as fleet:
        yield Served(architecture, connector, preempted, fleet)


def name_of(kind: Kind) -> str:
    return "-".join(kind[:2])


@pytest.mark.parametrize("served", [ROOMY, *SCARCE], indirect=True, ids=name_of)
def test_tokens_equal_the_oracles(served: Served) -> None:
    for algorithm in {"d2f", "block_diffusion"} - {served.preempted}:
        pairs = solid_jobs(served.architecture, algorithm, seed=2)
        answers = ask(served.fleet, [job for job, _ in pairs])
        compare(pairs, answers)
        _all_handed_over(answers, served.connector)
        _cases_occurred(pairs, algorithm, served.architecture)
    _counted_the_same_bytes(served.fleet)


@pytest.mark.parametrize("served", [ROOMY], indirect=True, ids=name_of)
def test_tokens_equal_the_oracles_where_a_prompts_beginning_is_cached(served: Served) -> None:
    pairs = solid_jobs("sdar", "d2f", seed=2)
    jobs = [job for job, _ in pairs]
    for answers in (ask(served.fleet, jobs), ask(served.fleet, jobs)):
        compare(pairs, answers)
        _all_handed_over(answers, served.connector, least=0)
    for job, answer in zip(jobs, answers, strict=True):
        unit, block = max(TINY.page_size, TINY.block_size), TINY.block_size
        paged = len(job.prompt) // block * block
        # Of a wholly known prompt nothing is computed, unless its pages cannot leave at once.
        known, but_last = paged // unit * unit, max(0, paged - 1) // unit * unit
        # The decode worker has all whole units, too.
        assert answer.stats.kv_pages == -(-paged // TINY.page_size) - paged // unit
        # 0 where the answer was complete before the prefill worker's word of it was read.
        assert answer.stats.cached_prompt_tokens in (0, but_last, known)
    assert sum(answer.stats.cached_prompt_tokens for answer in answers) > 4 * CONCURRENT


@pytest.mark.parametrize("served", SCARCE[1:], indirect=True, ids=name_of)
def test_equal_prompts_of_a_bidirectional_model_hand_nothing_over(served: Served) -> None:
    """A push without a page still brings the boundary, and proves that the prompt is the same."""
    pairs = solid_jobs("dream", "d2f", seed=4)[:KNOWN]
    jobs = [job for job, _ in pairs]
    for is_known in (False, True):
        answers = ask(served.fleet, jobs)
        compare(pairs, answers)
        assert all((one.stats.kv_pages == 0) is is_known for one in answers)


@pytest.mark.parametrize("served", SCARCE, indirect=True, ids=name_of)
def test_tokens_equal_the_oracles_while_requests_are_preempted(served: Served) -> None:
    """Each family, connector, algorithm and layout once, and the other attention. Preempted
    requests already have all pages."""
    decode = served.fleet.address_of("decode-0")
    earlier = load_of(decode).preemptions
    pairs = solid_jobs(served.architecture, served.preempted, seed=3, least_blocks=7)[:PREEMPTED]
    preempted = 0
    for _ in range(5):  # on a busy machine prompts may be so late that answers do not meet
        answers = ask(served.fleet, [job for job, _ in pairs])
        compare(pairs, answers)
        preempted += sum(answer.stats.preemptions for answer in answers)
        if preempted:
            break
    assert preempted > 0, "nobody was preempted"
    assert load_of(decode).preemptions == earlier + preempted
    wait_until(lambda: _has_all_pages(decode), "pages are left")


@cache
def solid_jobs(
    architecture: Architecture, algorithm: str, seed: int, least_blocks: int = 0
) -> list[Pair]:
    """Jobs with the oracle's answers; every second one ends at a token that it would write, unless
    they are to be long. The connector does not affect the oracle, which runs once.
    """
    raw = raw_of(architecture)
    pairs: list[Pair] = []
    for number, job in enumerate(
        draw_jobs(
            seed,
            DRAWN,
            algorithm,
            block_size=TINY.block_size,
            ids=TINY.plain_ids,
            least_blocks=least_blocks,
        )
    ):
        answer = decode_with(raw, job.prompt, settings_of(job))
        if not least_blocks and number % 2 == 0 and len(answer.token_ids) > 4:
            job = _stopping_at(job, answer.token_ids[len(answer.token_ids) // 2])
            answer = decode_with(raw, job.prompt, settings_of(job, raw))
        if margin(job, answer) > MARGIN:
            pairs.append((job, answer))
        if len(pairs) == CONCURRENT:
            return pairs
    raise AssertionError(f"only {len(pairs)} of {DRAWN} jobs are far from every edge")


@cache
def raw_of(architecture: Architecture) -> RawModel:
    """The model of every fleet of the architecture here."""
    with tempfile.TemporaryDirectory(prefix="effuse-oracle-") as home:
        return load_raw(tiny_checkpoint(Path(home) / architecture, architecture))


def _stopping_at(job: Job, token: int) -> Job:
    return Job(
        **(
            {field.name: getattr(job, field.name) for field in fields(Job)}
            | {"stop_token_ids": (token,)}
        )
    )


def ask(fleet: Fleet, jobs: list[Job]) -> list[pb.GenerateResponse]:
    with connect(fleet.address) as client:
        return all_at_once(lambda job: client.generate(job.message()), jobs)


def _all_handed_over(
    answers: list[pb.GenerateResponse], connector: str, least: int = CONCURRENT
) -> None:
    """No request was prefilled locally, and the moved bytes are pages times page bytes."""
    for answer in answers:
        stats = answer.stats
        assert (stats.connector, stats.prefill_worker) == (connector, "prefill-0")
        assert stats.kv_bytes == stats.kv_pages * TINY.page_bytes
    assert sum(answer.stats.kv_pages for answer in answers) > least


def _counted_the_same_bytes(fleet: Fleet) -> None:
    received = load_of(fleet.address_of("decode-0")).kv_bytes
    assert received > 0
    assert received % TINY.page_bytes == 0
    # Prefill may learn that its last pages have arrived only after the whole answer.
    wait_until(
        lambda: load_of(fleet.address_of("prefill-0")).kv_bytes == received,
        "prefill has not counted the bytes that decode received",
    )


def _has_all_pages(worker: str) -> bool:
    load = load_of(worker)
    return load.free_pages == load.total_pages


def _cases_occurred(pairs: list[Pair], algorithm: str, architecture: Architecture) -> None:
    seen = Occurrences()
    for _, answer in pairs:
        seen.add(answer.occurred)
    assert seen.cut_last_blocks > 0
    if architecture == "sdar":
        assert seen.prompts_shorter_than_block > 0
        assert seen.ragged_tails > 0
    if algorithm == "d2f":
        assert seen.semi_active_writes > 0
        assert seen.steps_settling_several > 0
        assert seen.blocks_waiting > 0
        assert seen.stops_before_later_blocks > 0, "no end in the middle of the pipeline"
