"""Only workers with room for a request take it: enough pages, and large enough forwards."""

from __future__ import annotations

import asyncio
import time
from itertools import product
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from decoding.engines import make_request
from router.asking import ask, failure
from router.fake_model import worker_record
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until

from effuse.config.decoding import ALGORITHMS, Algorithm, Cache, DecodeSettings
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.models.config import ModelConfig
from effuse.placement.records import WorkerRecord
from effuse.prefill_worker.prompts import make_prompt
from effuse.protos import errors
from effuse.router.fleet import ROOM_S
from effuse.router.policy import IDLE, AttemptNeeds, Candidate, Condition, place, what_is_missing
from effuse.router.sizes import Size, Sizes, room_of, round_up, sizes_of
from effuse.v1 import generation_pb2 as pb
from effuse.worker.messages import StartPrefill

LONG = "how many? " * 4  # 42 tokens in the template
TEXT = "the answer is three"


def sized(
    record: WorkerRecord,
    rows: int = 512,
    attention: str = "bidirectional",
    *,
    pages: int = 64,
    length: int = 256,
    replicas: int = 1,
) -> WorkerRecord:
    """With pages of 4 tokens, as many as a block has."""
    change = msgspec.structs.replace
    capacity = change(
        record.capacity,
        max_num_batched_tokens=rows,
        total_pages=pages,
        page_size=4,
        replicas=replicas,
    )
    model = change(record.model, prompt_attention=attention, max_model_len=length)
    return change(record, capacity=capacity, model=model)


async def announce(
    fleet: FakeFleet, rows: dict[str, int], attention: str = "bidirectional"
) -> None:
    for worker in fleet.workers:
        worker.record = sized(worker.record, rows[worker.worker_id], attention)
    await fleet.announce()


async def announce_sizes(fleet: FakeFleet, sizes: dict[str, dict[str, int]]) -> None:
    for worker in fleet.workers:
        worker.record = sized(worker.record, **sizes.get(worker.worker_id, {}))  # type: ignore[arg-type]
    await fleet.announce()


async def workers_of(
    fleet: FakeFleet, prompt: str = LONG, max_tokens: int | None = 20
) -> tuple[str, str]:
    answer = await ask(fleet, prompt=prompt, stopping=pb.StoppingParams(max_tokens=max_tokens))
    assert TEXT.startswith(answer.text) and answer.text
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
        assert f"prompt: expected at most {most} prompt tokens" in text and "got 42 tokens" in text
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


@pytest.mark.parametrize("small", [{"pages": 10}, {"length": 61}, {"pages": 28, "replicas": 2}])
def test_a_request_goes_to_workers_that_can_hold_it(small: dict[str, int]) -> None:
    """42 tokens of the prompt and 20 of the answer, without the last block: 58 in 15 pages."""

    async def body(fleet: FakeFleet) -> None:
        large = {"length": 62, "pages": 15}
        await announce_sizes(fleet, {"p0": small, "d0": small, "p1": large, "d1": large})
        for _ in range(3):
            assert (await workers_of(fleet))[1] == "d1"
        both = {(await workers_of(fleet, "how?", 9))[1] for _ in range(8)}
        assert both == {"d0", "d1"}

    run(body, num_prefill=2, num_decode=2, prefill="remote")


def test_a_prefill_worker_needs_pages_only_for_the_prompt() -> None:
    async def body(fleet: FakeFleet) -> None:
        sizes = {"p0": {"pages": 10}, "p1": {"pages": 11}, "p2": {"length": 42}}
        await announce_sizes(fleet, sizes)
        for _ in range(4):
            assert await workers_of(fleet) == ("p1", "d0")

    run(body, num_prefill=3, prefill="remote")


def test_a_decode_worker_computes_a_prompt_for_which_no_prefill_worker_has_pages() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce_sizes(fleet, {"p0": {"pages": 10}})
        assert await workers_of(fleet) == ("", "d0")

    run(body)


def test_a_request_waits_for_the_worker_that_can_hold_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        small, large = fleet.decode
        sizes = {small.worker_id: {"pages": 10}}
        await announce_sizes(fleet, sizes)
        capacity = msgspec.structs.replace(large.record.capacity, max_num_seqs=1)
        large.record = msgspec.structs.replace(large.record, capacity=capacity)
        await fleet.announce()
        large.at["commit 1"] = holds(go, reached)
        first = asyncio.create_task(workers_of(fleet))
        await reached.wait()
        second = asyncio.create_task(workers_of(fleet))
        await until(lambda: fleet.is_waiting("seat"))
        assert (await workers_of(fleet, "how?", 9))[1] == "d0"
        go.set()
        assert [(await one)[1] for one in (first, second)] == ["d1", "d1"]

    run(body, num_decode=2)


def test_a_request_waits_for_a_lost_worker_that_can_hold_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce_sizes(fleet, {"d0": {"pages": 10}})
        large = fleet.decode[1]
        large.record = msgspec.structs.replace(large.record, state="starting")
        await fleet.announce()
        waits = asyncio.create_task(workers_of(fleet))
        await until(lambda: fleet.is_waiting("worker"))
        large.record = msgspec.structs.replace(large.record, state="ready")
        await fleet.announce()
        assert (await waits)[1] == "d1"

    run(body, num_decode=2)


@pytest.mark.parametrize(
    ("mode", "sizes", "stopping", "text"),
    [
        ("auto", {"d0": {"pages": 10}}, None, "prompt: expected at most 40 prompt tokens, for wh"),
        ("auto", {"d0": {"length": 42}}, None, "prompt: expected at most 41 prompt tokens, so th"),
        ("remote", {"p0": {"pages": 9}}, None, "prompt: expected at most 36 prompt tokens, for "),
        ("auto", {"d0": {"pages": 15}}, 21, "stopping.max_tokens: expected at most 20: the prompt"),
        ("auto", {"d0": {"rows": 42}}, 23, ""),
    ],
)
def test_a_request_that_no_worker_can_hold_is_refused(
    mode: str, sizes: dict[str, dict[str, int]], stopping: int | None, text: str
) -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce_sizes(fleet, sizes)
        if not text:
            assert (await workers_of(fleet, max_tokens=stopping))[1] == "d0"
            return
        call = ask(fleet, prompt=LONG, stopping=pb.StoppingParams(max_tokens=stopping))
        error = await failure(call)
        assert isinstance(error, errors.InvalidRequest) and text in error.message
        assert not any(worker.served for worker in fleet.workers)

    run(body, prefill=mode)


def test_an_answer_without_a_limit_gets_the_room_of_the_largest_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce_sizes(fleet, {"d0": {"pages": 12}, "d1": {"pages": 15}})
        assert await workers_of(fleet, max_tokens=None) == ("p0", "d1")
        error = await failure(ask(fleet, prompt=LONG, stopping=pb.StoppingParams(min_tokens=21)))
        assert "stopping.min_tokens: expected at most 20" in error.message

    run(body, num_decode=2)


def test_a_window_needs_a_forward_for_all_of_its_blocks() -> None:
    async def body(fleet: FakeFleet) -> None:
        await announce(fleet, {"p0": 32, "d0": 20, "d1": 24}, "causal_blocks")
        for window, worker in ((4, {"d0", "d1"}), (5, {"d1"})):
            decoding = pb.DecodingParams(window=window)
            answers = [await ask(fleet, decoding=decoding) for _ in range(6)]
            assert {one.stats.decode_worker for one in answers} == worker
        text = (await failure(ask(fleet, decoding=pb.DecodingParams(window=6)))).message
        assert "decoding.window: expected at most 5 blocks of 4" in text and "got 6" in text

    run(body, num_decode=2)


def test_the_room_of_a_worker_that_has_gone_counts_for_a_while() -> None:
    async def body(fleet: FakeFleet) -> None:
        routed, large = fleet.router.fleet, sized(worker_record("d9", "decode"), pages=99)
        routed._note_rooms([large])
        assert room_of(large) in routed.rooms("fake", False)["decode"]
        routed._now = lambda: time.monotonic() + ROOM_S + 1
        routed.look()
        assert routed.rooms("fake", False)["decode"] == {room_of(fleet.decode[0].record)}
        await announce(fleet, {"p0": 512, "d0": 41})
        small = room_of(fleet.decode[0].record)
        assert routed.rooms("fake", False)["decode"] == {small}, "it has come back with less room"

    run(body)


def test_requests_with_equal_prospects_have_equal_needs() -> None:
    rooms = [Size(256, 40, 512), Size(256, 60, 512), Size(128, 80, 512)]
    assert round_up(Size(50, 30, 8), rooms) == round_up(Size(60, 40, 4), rooms)
    assert round_up(Size(60, 41, 4), rooms) == Size(128, 60, 512)
    assert round_up(Size(129, 50, 4), rooms) == Size(256, 60, 512)
    assert round_up(Size(129, 61, 4), rooms) == Size(129, 61, 4)


@pytest.mark.parametrize("architecture", ["sdar", "llada", "dream", "fast_dllm_v2"])
def test_the_router_knows_what_workers_need(tmp_path: Path, architecture: Architecture) -> None:
    config = ModelConfig.from_dir(write_tiny_checkpoint(tmp_path / "model", architecture, seed=3))
    block, attention = config.block_size, config.prompt_attention
    record = sized(worker_record("d0", "decode"), attention=attention)
    model = msgspec.structs.replace(record.model, block_size=block)
    limits = DecodeLimits(
        max_num_batched_tokens=1 << 20, max_num_seqs=8, max_model_len=256, num_pages=1 << 20,
        page_size=1, block_size=block,
    )  # fmt: skip
    names: list[Algorithm] = ["d2f", "block_diffusion"]
    if attention == "bidirectional":
        names += ["fast_dllm", "llada" if architecture == "llada" else "dream"]
    caches: tuple[Cache, ...] = get_args(Cache)
    lengths = range(1, 2 * block + 2), range(1, 3 * block)
    for name, cache, prompt_len, max_tokens in product(names, caches, *lengths):
        if cache != "none" and "cache" not in ALGORITHMS[name].settings:
            continue  # a router refuses it
        settings = DecodeSettings(
            algorithm=name, denoising_steps=block, window=2, block_length=block, cache=cache,
            cfg_scale=1.0 if name == "llada" else 0.0,
        )  # fmt: skip
        start = make_request("a", (9,) * prompt_len, max_tokens=max_tokens)
        start = msgspec.structs.replace(start, settings=settings)
        needs = Intake(config, limits).make_request(start, arrival=0, now=0.0).footprint()
        found = sizes_of(prompt_len, max_tokens, model, settings)
        rows = max(needs.most_rows, needs.first_chunk)
        assert found.decode == (prompt_len + max_tokens, needs.most_cached, rows)
        if not settings.is_canvas:
            message = StartPrefill(attempt=start.attempt, prompt_token_ids=start.prompt_token_ids)
            prompt = make_prompt(message, config, 1, 1, 0.0)
            whole = 0 if prompt.can_split else prompt_len
            assert found.prefill == (prompt_len + 1, prompt.num_paged, whole)


def test_what_is_missing_names_a_worker_that_is_too_small() -> None:
    small = Candidate(sized(worker_record("d0", "decode"), 41), IDLE)
    lost = Candidate(sized(worker_record("d1", "decode")), IDLE, Condition.LOST)
    need = AttemptNeeds(model="fake", mode="auto", sizes=Sizes(decode=Size(rows=42)))
    assert place([small], need) is None
    text = "(d1 is lost, d0 is too small for the request)"
    assert text in what_is_missing([small, lost], need)
    large = worker_record("d1", "prefill")
    idle = Candidate(sized(msgspec.structs.replace(large, may_change_role=True)), IDLE)
    assert "(d1 is in the role prefill, d0 is too small" in what_is_missing([small, idle], need)
    other = msgspec.structs.replace(need, sizes=Sizes(decode=Size(rows=43)))
    assert other.key != need.key
