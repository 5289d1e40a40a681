"""Load and times from the events of requests."""

from __future__ import annotations

import random

import msgspec
import pytest
from router.asking import ask
from router.fakes import FakeFleet, run

from effuse.placement.records import PromptAttention
from effuse.router.measures import LoadLog, Measured


def arrive(
    load: LoadLog, rng: random.Random, rate: float, prompt: int, since: float, until: float
) -> None:
    """Poisson arrivals, each with an answer of 128 tokens."""
    now = since + rng.expovariate(rate)
    while now < until:
        load.note_prompt(round(prompt * rng.uniform(0.5, 1.5)), now)
        load.note_answer(128, now)
        now += rng.expovariate(rate)


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_load_is_averaged_over_two_minutes(seed: int) -> None:
    load, rng = LoadLog(), random.Random(seed)
    arrive(load, rng, 20.0, 2048, 0.0, 300.0)
    found = load.workload(300.0)
    assert found is not None
    assert found.rate == pytest.approx(20, rel=0.1)
    assert found.prompt == pytest.approx(2048, rel=0.05)
    assert found.answer == 128


@pytest.mark.parametrize(("rate", "prompt"), [(20.0, 8192), (80.0, 512), (2.0, 512)])
def test_a_jump_of_rate_or_length_counts_after_seconds(rate: float, prompt: int) -> None:
    load, rng = LoadLog(), random.Random(1)
    arrive(load, rng, 20.0, 512, 0.0, 60.0)
    for now in range(62, 76, 2):
        arrive(load, rng, rate, prompt, now - 2.0, float(now))
        found = load.workload(float(now))
    assert found is not None
    assert found.rate == pytest.approx(rate, rel=0.35)
    assert found.prompt == pytest.approx(prompt, rel=0.15)


def test_silence_ends_a_load_and_keeps_its_lengths() -> None:
    load = LoadLog()
    arrive(load, random.Random(2), 10.0, 1000, 0.0, 60.0)
    assert load.workload(60.0) is not None
    found = load.workload(75.0)
    assert found is not None
    assert found.rate == 0.0
    assert found.prompt == pytest.approx(1000, rel=0.1)
    found = load.workload(10_000.0)
    assert found is not None and found.rate == 0.0


def test_there_is_no_load_before_an_answer() -> None:
    load = LoadLog()
    assert load.workload(1.0) is None
    load.note_prompt(100, 1.0)
    assert load.workload(2.0) is None
    load.note_answer(0, 2.0)
    assert load.workload(2.0) is not None


def test_cached_tokens_and_requests_that_wait_are_part_of_the_load() -> None:
    load = LoadLog()
    for now in range(20):
        load.note_prompt(1000, float(now))
        load.note_answer(100, float(now))
    found = load.workload(20.0, hits=0.75, waiting=50)
    assert found is not None
    assert found.prompt == 250.0
    assert found.rate == pytest.approx(1.0 + 5.0, rel=0.1)


def test_a_prompt_counts_the_time_since_the_one_before() -> None:
    """Three prompts wait at a worker and end every 0.1 s, so their own times overlap."""
    measured = Measured()
    for number in (1, 2, 3):
        measured.note_prompt("p", 1000, 0, 0.1 * number, 0.1 * number)
    measured.note_prompt("p", 1000, 0, 0.1, 60.0)  # after a pause
    measured.note_prompt("other", 1000, 0, 0.1, 60.0)
    (one,) = measured.times(0, 0).prompts
    assert one.tokens == 1000
    assert one.seconds == pytest.approx(0.1)


def test_prompts_are_kept_by_length_and_hits_apart() -> None:
    measured = Measured()
    for number in range(1000):
        measured.note_prompt("p", 500, 0, 0.01, 2.0 * number)
        measured.note_prompt("p", 4000, 0, 0.2, 2.0 * number + 1)
        measured.note_prompt("p", 4000, 4000, 0.0, 2.0 * number + 1)
    short, long = measured.times(0, 0).prompts
    assert (short.tokens, short.seconds) == pytest.approx((500, 0.01))
    assert (long.tokens, long.seconds) == pytest.approx((4000, 0.2))
    assert measured.hits == pytest.approx(4000 / 8500, rel=0.01)


def test_a_prompt_of_which_nothing_is_computed_takes_no_time_of_others() -> None:
    measured = Measured()
    measured.note_prompt("p", 11, 11, 0.0001, 1.9)
    measured.note_prompt("p", 1000, 0, 1.0, 2.0)
    (one,) = measured.times(0, 0).prompts
    assert (one.tokens, one.seconds) == pytest.approx((1000, 1.0))


@pytest.mark.parametrize(
    ("attention", "block_size", "computed"),
    [("bidirectional", 4, 9), ("causal_blocks", 4, 6), ("causal_blocks", 16, None)],
)
def test_only_tokens_that_a_worker_has_computed_have_a_time(
    attention: PromptAttention, block_size: int, computed: int | None
) -> None:
    """Of 11 tokens, of which a cache had 2. The last block of a block-causal prompt is decode's."""

    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.workers:
            model = msgspec.structs.replace(
                worker.record.model, prompt_attention=attention, block_size=block_size
            )
            worker.record = msgspec.structs.replace(worker.record, model=model)
        await fleet.announce()
        assert (await ask(fleet)).usage.prompt_tokens == 11
        measured = fleet.router.steering.of("fake").measured
        found = [one.tokens for one in measured.times(0, 0).prompts]
        assert found == ([] if computed is None else [computed])
        assert measured.hits == pytest.approx(1 - (computed or 0) / 11)

    run(body)


def test_a_pace_is_that_of_the_whole_batch() -> None:
    """Each of 8 answers gets 32 tokens every 0.1 s; one gap in 64 is longer."""
    measured = Measured()
    for number in range(1024):
        measured.note_commit(8, 1000, 32, 0.2 if number % 64 == 0 else 0.1)
        measured.note_commit(1, 1000, 32, 0.04)
        measured.note_commit(2, 1000, 32, 0.05)
    for _ in range(3):
        measured.note_commit(64, 1000, 32, 0.5)  # too few to know it
    one, two, eight = measured.times(0, 0).answers
    assert (one.batch, one.gap_s) == (1.0, 0.04)
    assert one.tokens_per_second == pytest.approx(800)
    assert (two.tokens_per_second, two.gap_s) == pytest.approx((1280, 0.05))
    assert (eight.batch, eight.gap_s, eight.context) == (8.0, 0.2, 1000.0)
    assert eight.tokens_per_second == pytest.approx(8 * 320, rel=0.02)


def test_bytes_of_pages_are_known_once_some_have_moved() -> None:
    measured = Measured()
    assert measured.times(0, 0).kv_bytes_per_token == 0.0
    measured.note_handoff(1000, 57_000_000)
    assert measured.times(512, 1e9).kv_bytes_per_token == 57_000
    assert measured.times(512, 1e9).link_bytes_per_second == 1e9
