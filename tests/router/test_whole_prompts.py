"""Prompts that one forward computes whole: only workers with large enough forwards take them."""

from __future__ import annotations

import msgspec
import pytest
from router.asking import ask, failure
from router.fake_model import worker_record
from router.fakes import FakeFleet, run

from effuse.placement.records import WorkerRecord
from effuse.protos import errors
from effuse.router.policy import IDLE, AttemptNeeds, Candidate, place, what_is_missing
from effuse.v1 import generation_pb2 as pb

LONG = "how many? " * 4  # 42 tokens in the template
TEXT = "the answer is three"


def sized(record: WorkerRecord, rows: int, attention: str = "bidirectional") -> WorkerRecord:
    return msgspec.structs.replace(
        record,
        capacity=msgspec.structs.replace(record.capacity, max_num_batched_tokens=rows),
        model=msgspec.structs.replace(record.model, prompt_attention=attention),
    )


async def announce(
    fleet: FakeFleet, rows: dict[str, int], attention: str = "bidirectional"
) -> None:
    for worker in fleet.workers:
        worker.record = sized(worker.record, rows[worker.worker_id], attention)
    await fleet.announce()


async def workers_of(fleet: FakeFleet, prompt: str = LONG) -> tuple[str, str]:
    answer = await ask(fleet, prompt=prompt)
    assert answer.text == TEXT
    return answer.stats.prefill_worker, answer.stats.decode_worker


def test_a_decode_worker_computes_a_prompt_that_is_too_long_for_prefill_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, {"p0": 41, "d0": 42})
        assert await workers_of(fleet) == ("", "d0")
        assert await workers_of(fleet, "how many?") == ("p0", "d0")

    run(body)


def test_larger_workers_of_either_kind_are_chosen() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, {"p0": 41, "p1": 42, "d0": 41, "d1": 42})
        for _ in range(3):
            assert await workers_of(fleet) == ("p1", "d1")

    run(body, num_prefill=2, num_decode=2, prefill="remote")


@pytest.mark.parametrize(
    ("mode", "rows", "most"),
    [
        ("auto", {"p0": 512, "d0": 41, "d1": 40}, 41),
        ("remote", {"p0": 41, "d0": 512, "d1": 512}, 41),
        ("local", {"p0": 512, "d0": 40, "d1": 41}, 41),
    ],
)
def test_a_prompt_that_no_worker_can_take_is_refused(
    mode: str, rows: dict[str, int], most: int
) -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, rows)
        text = (await failure(ask(fleet, prompt=LONG))).message
        assert f"prompt: expected at most {most} tokens" in text and "got 42 tokens" in text
        assert not any(worker.served for worker in fleet.workers)

    run(body, num_decode=2, prefill=mode)


def test_a_prompt_that_can_be_cut_has_no_such_limit() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, {"p0": 8, "d0": 32}, "causal_blocks")
        assert await workers_of(fleet) == ("p0", "d0")

    run(body)


def test_a_canvas_needs_a_forward_for_prompt_and_answer_and_twice_that_with_guidance() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, {"p0": 512, "d0": 50})

        async def refused(cfg_scale: float | None = None) -> str:
            decoding = pb.DecodingParams(algorithm=pb.ALGORITHM_LLADA, cfg_scale=cfg_scale)
            stopping = pb.StoppingParams(max_tokens=12)
            call = ask(fleet, prompt=LONG, decoding=decoding, stopping=stopping)
            error = await failure(call)
            assert isinstance(error, errors.InvalidRequest)
            return error.message

        assert "prompt and answer of at most 50 tokens" in (text := await refused())
        assert text.endswith("got 54 tokens")
        assert "prompt and answer of at most 25 tokens" in await refused(1.5)

    run(body)


def test_what_is_missing_names_a_worker_that_is_too_small() -> None:
    small = Candidate(sized(worker_record("d0", "decode"), 41), IDLE)
    need = AttemptNeeds(model="fake", mode="auto", whole_rows=42)
    assert place([small], need) is None
    assert "d0 is too small for the prompt" in what_is_missing([small], need)
    assert AttemptNeeds(model="fake", mode="auto", whole_rows=43).key != need.key
