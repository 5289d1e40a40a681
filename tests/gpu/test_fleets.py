"""Fleets of processes on a GPU, on two, and on the CPU: the tokens of one process, even if a worker
dies while pages are in flight.

fp32, and only jobs whose answers do not depend on rounding: the rest of a batch changes the last
bits of a GPU's products, and exactness is claimed for nothing else. With REHEARSE=1 all of it runs
on the CPU; deaths over NIXL, the worst case for a dead writer's bytes, always run there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from e2e.client import Client, all_at_once, connect, load_of, wait_until
from e2e.comparison import Pair, compare, margin, settings_of, shaken
from e2e.processes import kill, restart, standing_still
from e2e.workload import Job, draw_jobs
from oracle.decode import decode_with
from oracle.forward import load_raw
from slowness import patient
from tokenizers import Tokenizer

import effuse
import effuse.models
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.problems.problem import problem
from effuse.v1 import generation_pb2 as pb
from effuse.v1.model_pb2 import WORKER_ROLE_DECODE as DECODE
from effuse.v1.model_pb2 import WORKER_ROLE_PREFILL as PREFILL
from effuse.worker.gpus import gpus_here

BUNDLED = Path(next(iter(effuse.models.__path__))) / "bundled"
BLOCK = PAGE = 16
MARGIN = 1e-3  # as in the other tests on a GPU
DRAWN, AT_LEAST = 6, 5  # jobs of each algorithm
MOST_TOKENS = 40
TURNS = 6  # in each of which a rehearsal may hold pages
HANG_S = 600.0  # tests stop engines for a minute, and one that is stopped is hung after a quarter
START_S = 180.0  # the first worker on a GPU compiles every kernel
OWN_PAGES = ("--no-enable-prefix-caching",)  # each prompt's pages are handed over

Case = tuple[int, str]  # GPUs, none of which is the CPU, and connector


def cases(numbers_of_gpus: Sequence[int], *others: Case) -> list[object]:
    """Both connectors on so many GPUs, and others; all of them on the CPU, too, for a rehearsal."""
    numbers = [*([0] if os.environ.get("REHEARSE") else []), *numbers_of_gpus]
    found = dict.fromkeys([*others, *((n, kind) for n in numbers for kind in ("nixl", "zmq"))])
    return [
        pytest.param(
            (number, kind),
            marks=[pytest.mark.gpu] if number else [],
            id=f"{kind}-{number}gpus" if number else f"{kind}-cpu",
        )
        for number, kind in found
    ]


@functools.cache
def workload() -> list[Pair]:
    """Greedy and sampled jobs of both algorithms whose prompts fill from none to a dozen pages,
    with the oracle's answers.
    """
    torch.set_num_threads(1)
    raw = load_raw(BUNDLED)
    other = shaken(raw, seed=1)
    pairs: list[Pair] = []
    for algorithm in ("d2f", "block_diffusion"):
        solid = []
        for number, drawn in enumerate(draw_jobs(5, DRAWN, algorithm, block_size=BLOCK, ids=[0])):
            prompt = _prompt(number, len(drawn.prompt))
            job = replace(drawn, prompt=prompt, max_tokens=min(drawn.max_tokens, MOST_TOKENS))
            answer, again = (decode_with(one, prompt, settings_of(job)) for one in (raw, other))
            if margin(job, answer) > MARGIN and again.token_ids == answer.token_ids:
                solid.append((job, answer))
        assert len(solid) >= AT_LEAST
        pairs += solid
    prompts = {len(job.prompt) // PAGE for job, _ in pairs}
    assert min(prompts) == 0 and max(prompts) > 5, "prompts are of too few lengths"
    assert any(job.temperature for job, _ in pairs), "nothing is sampled"
    return pairs


def _prompt(number: int, length: int) -> tuple[int, ...]:
    """One to three problems, or the beginning of one where the length is below a block."""
    words = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = [problem(2, 3 * number + at, "held_out").prompt for at in range(1 + number % 3)]
    ids = [token for text in texts for token in words.encode(text).ids]
    return tuple(ids[:length] if length < BLOCK else ids)


@contextlib.contextmanager
def fleet_on(
    num_gpus: int,
    connector: str,
    prefill: int,
    decode: int,
    flags: tuple[str, ...] = (),
    prefill_flags: tuple[str, ...] = (),
) -> Iterator[Fleet]:
    """A fleet whose workers share a GPU if there are more of them than GPUs."""
    here = gpus_here()[:num_gpus]
    if len(here) < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs, sees {len(here)}")
    config = FleetConfig(
        prefill=prefill,
        decode=decode,
        connector=connector,
        gpus=here or None,
        gpu_sharing=True,
        worker_flags=(
            *("--device", "cuda" if here else "cpu", "--dtype", "float32"),
            *("--page-size", str(PAGE), "--num-pages", "512"),
            # Fewer graphs to capture than by default.
            *("--max-num-batched-tokens", "512", "--max-num-seqs", "32"),
            *("--startup-timeout-s", str(START_S)),
            *("--hang-timeout-s", str(patient(HANG_S))),
            *flags,
        ),
        prefill_flags=prefill_flags,
        router_flags=("--prefill", "remote") if prefill else (),  # never a local prefill
        has_secret=False,  # tests ask workers, too
    )
    with Fleet(config) as fleet:
        assert {gpu for one in fleet.gpus.values() for gpu in one.names} == set(here)
        yield fleet


def ask(fleet: Fleet, pairs: Sequence[Pair]) -> list[pb.GenerateResponse]:
    with connect(fleet.address) as client:
        return all_at_once(lambda pair: client.generate(pair[0].message()), pairs)


@functools.cache
def alone(num_gpus: int) -> list[tuple[int, ...]]:
    """The tokens of one worker that prefills for itself."""
    with fleet_on(num_gpus, "zmq", 0, 1) as fleet:
        return [tuple(answer.token_ids) for answer in ask(fleet, workload())]


@pytest.mark.parametrize("case", cases([1, 2]))
def test_tokens_are_those_of_one_process(case: Case) -> None:
    (num_gpus, connector), pairs = case, workload()
    with fleet_on(num_gpus, connector, 1, 1, OWN_PAGES) as fleet:
        answers = ask(fleet, pairs)
        wait_until(lambda: _holds_nothing(fleet), "pages are left")
    assert [tuple(answer.token_ids) for answer in answers] == alone(min(num_gpus, 1))
    compare(pairs, answers)
    for (job, _), answer in zip(pairs, answers, strict=True):
        stats = answer.stats
        assert (stats.connector, stats.prefill_worker) == (connector, "prefill-0")
        assert stats.kv_pages == len(job.prompt) // PAGE


@pytest.mark.parametrize("case", cases([2, 4]))
def test_prompts_cut_over_gpus_change_no_token(case: Case) -> None:
    (num_gpus, connector), pairs = case, workload()
    cut = ("--prefill-context-parallel-size", str(num_gpus or 2), "--max-num-batched-tokens", "48")
    with fleet_on(num_gpus, connector, 1, 1, OWN_PAGES, cut) as fleet:
        answers = ask(fleet, pairs)
    assert [tuple(answer.token_ids) for answer in answers] == alone(min(num_gpus, 1))
    compare(pairs, answers)
    assert {answer.stats.prefill_worker for answer in answers} == {"prefill-0"}


@pytest.fixture(scope="module", params=cases([1], (0, "nixl")))
def crowd(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two workers of each role."""
    num_gpus, connector = request.param
    with fleet_on(num_gpus, connector, 2, 2, OWN_PAGES) as fleet:
        yield fleet


@pytest.fixture
def whole_crowd(crowd: Fleet) -> Fleet:
    """All four are there, even if another test has killed one, and know each other."""
    everybody = {f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)}
    for process in crowd.dead():
        restart(crowd, process.name, START_S)

    def all_serve() -> bool:
        answers = ask(crowd, workload())
        compare(workload(), answers)
        return _who_served(answers) == everybody

    # A rehearsal holds pages as long as a prefill engine is stopped in it.
    wait_until(lambda: _are_measured(crowd), "a link was not measured")
    wait_until(all_serve, "not everybody serves")
    wait_until(lambda: _holds_nothing(crowd), "pages are left")
    wait_until(lambda: _is_known_to_hold_nothing(crowd), "the router did not hear of it")
    return crowd


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_dies_while_pages_fly_changes_no_token(
    whole_crowd: Fleet, victim: str
) -> None:
    pairs = workload()
    with connect(whole_crowd.address) as client:
        answers = _ask_and_kill(whole_crowd, client, [job for job, _ in pairs], victim)
    compare(pairs, answers)
    wait_until(lambda: _holds_nothing(whole_crowd), "pages are left")


def _ask_and_kill(
    fleet: Fleet, client: Client, jobs: Sequence[Job], victim: str
) -> list[pb.GenerateResponse]:
    """Kills a worker while no prompt's pages have arrived, and every prompt's are under way. The
    engines stand still once more if a rehearsal held pages meanwhile, or a worker has all prompts.
    """
    for turn in range(TURNS):
        names = [f"{victim}-{turn}-{number}" for number in range(len(jobs))]
        answers = _kill_in_midst(fleet, client, jobs, names, victim)
        if answers is not None:
            return answers
        wait_until(lambda: _holds_nothing(fleet), "pages are left")
    raise AssertionError(f"a rehearsal held pages, or a worker had all, in each of {TURNS} turns")


def _kill_in_midst(
    fleet: Fleet, client: Client, jobs: Sequence[Job], names: Sequence[str], victim: str
) -> list[pb.GenerateResponse] | None:
    """The answers under these names; None if nothing was killed, because other pages were held or
    one worker had all prompts.

    First every prompt gets its pages, while the engines that would push stand still; then those
    that would take note of an arrival do, while the others push.
    """
    pages = sum(len(job.prompt) // PAGE for job in jobs)
    with ThreadPoolExecutor(len(jobs)) as threads, contextlib.ExitStack() as receivers:
        with contextlib.ExitStack() as senders:
            for name in fleet.names("prefill"):
                senders.enter_context(standing_still(fleet.processes[name].pid))
            calls = [
                threads.submit(client.generate, job.message(name))
                for job, name in zip(jobs, names, strict=True)
            ]
            try:
                wait_until(
                    lambda: _held(fleet, "decode") == pages and _receiving(fleet) == len(jobs),
                    "not every prompt has its pages reserved",
                    within_s=10.0,
                )
            except AssertionError:
                if _held(fleet, "decode") < pages:
                    raise
                senders.close()
                for call in calls:
                    call.result()
                return None
            for name in fleet.names("decode"):
                receivers.enter_context(standing_still(fleet.processes[name].pid))
        try:
            wait_until(
                lambda: _held(fleet, "prefill") == pages and not _queued(fleet),
                "not every prompt is computed",
            )
        except AssertionError:
            if _held(fleet, "prefill") <= pages:
                raise
            receivers.close()
            for call in calls:
                call.result()
            return None
        told = [client.look_up(name) for name in names]
        # A push without pages waits for nobody, and may have ended.
        hit = [
            one.request_id
            for one, job in zip(told, jobs, strict=True)
            if one.decode_worker == victim
            or (one.prefill_worker == victim and len(job.prompt) >= PAGE)
        ]
        if not 0 < len(hit) < len(jobs):
            receivers.close()
            for call in calls:
                call.result()
            return None
        assert {one.attempt for one in told} == {1}
        assert _held(fleet, "prefill") == pages, "a push has ended"
        kill(fleet, victim)
        # No request has accepted arrived pages as complete before they were abandoned.
        wait_until(
            lambda: all(client.attempt_of(name) > 1 for name in hit), "nobody missed the dead one"
        )
    return [call.result() for call in calls]


def _held(fleet: Fleet, role: str) -> int:
    """Pages that the workers of a role hold."""
    loads = [load_of(fleet.address_of(name)) for name in _workers(fleet) if name.startswith(role)]
    return sum(load.total_pages - load.free_pages for load in loads)


def _receiving(fleet: Fleet) -> int:
    """Prompts whose pages are reserved, if there are any, while nothing is denoised."""
    return sum(load_of(fleet.address_of(name)).running for name in fleet.names("decode"))


def _are_measured(fleet: Fleet) -> bool:
    """Whether each prefill worker knows its link to each decode worker that lives now."""
    with effuse.Client(fleet.address) as client:
        workers = client.workers()
    lives = {(one.worker_id, one.incarnation) for one in workers if one.role == DECODE}
    prefill = [one for one in workers if one.role == PREFILL]
    known = [{(link.peer, link.peer_incarnation) for link in one.links} for one in prefill]
    return len(known) == len(lives) == 2 and all(links >= lives for links in known)


def _is_known_to_hold_nothing(fleet: Fleet) -> bool:
    """Whether the router knows it too: with a decode worker's state of a second ago it would give
    all next prompts to the other one.
    """
    with effuse.Client(fleet.address) as client:
        return all(one.free_pages == one.total_pages for one in client.workers())


def _queued(fleet: Fleet) -> int:
    """Tokens of prompts that no forward has taken yet."""
    return sum(load_of(fleet.address_of(name)).queued_tokens for name in fleet.names("prefill"))


def _workers(fleet: Fleet) -> list[str]:
    """Those that have not ended."""
    dead = {process.name for process in fleet.dead()}
    return [name for name in (*fleet.names("prefill"), *fleet.names("decode")) if name not in dead]


def _who_served(answers: Sequence[pb.GenerateResponse]) -> set[str]:
    stats = [answer.stats for answer in answers]
    return {name for one in stats for name in (one.prefill_worker, one.decode_worker)}


def _holds_nothing(fleet: Fleet) -> bool:
    loads = [load_of(fleet.address_of(name)) for name in _workers(fleet)]
    return all(
        load.running == load.waiting == load.quarantined_pages == 0
        and load.free_pages == load.total_pages
        for load in loads
    )
