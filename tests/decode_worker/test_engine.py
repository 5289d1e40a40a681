"""The engine's life around its forwards: refusals, failures, drafts, deadlines, stalls, load."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from auditing import free_ids
from checkpoints import VOCAB_SIZE, write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, make_request

from effuse.models.part import Part, PartResult
from effuse.models.transformer import Transformer
from effuse.worker import messages
from effuse.worker.messages import BlockState, Resume
from effuse.worker.shell import WorkerMetrics, WorkerReadings

PROMPT = tuple(range(20, 33))


class Faulty:
    """A forward that fails, or gives NaN for one request, on demand."""

    def __init__(self, rig: Rig) -> None:
        self._inner = rig.forward
        self.raises = False
        self.poisoned: int | None = None  # prompt length of the request that gets NaN

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        if self.raises:
            raise RuntimeError("secret: address 0xdeadbeef")
        results = self._inner.run(parts)
        return [
            dataclasses.replace(result, confidences=[float("nan")] * len(result.confidences))
            if part.block_origin == self.poisoned
            else result
            for part, result in zip(parts, results, strict=True)
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_tiny(write_tiny_checkpoint(tmp_path_factory.mktemp("x") / "m", "llada", seed=3))


@pytest.fixture
def rig(model: Transformer) -> Rig:
    return Rig(model)


def faulty(model: Transformer) -> tuple[Rig, Faulty]:
    rig = Rig(model)
    forward = Faulty(rig)
    rig.forward = forward
    rig.connect(None)
    return rig, forward


def test_a_local_answer_says_reserved_verified_commits_finished(rig: Rig) -> None:
    answer = rig.start(make_request("a", PROMPT, max_tokens=12, stop_token_ids=()))
    rig.run()
    kinds = [type(event).__name__ for event in answer.events]
    assert kinds[:2] == ["Reserved", "Verified"] and kinds[-1] == "Finished"
    assert set(kinds[2:-1]) == {"Committed"}
    assert not answer.finished.stopped and answer.finished.num_tokens == 12
    assert rig.engine.counters.kv_bytes == 0


def test_a_failing_forward_fails_its_requests_and_the_engine_lives_on(model: Transformer) -> None:
    rig, forward = faulty(model)
    first = rig.start(make_request("a", PROMPT))
    rig.step()
    forward.raises = True
    rig.step()
    assert (first.failed.code, first.failed.retryable) == ("INTERNAL", True)
    assert "secret" not in first.failed.message
    assert rig.pool.num_free == rig.pool.num_pages
    forward.raises = False
    second = rig.start(make_request("b", PROMPT, stop_token_ids=()))
    rig.run()
    assert second.finished.num_tokens == 16


def test_a_lost_device_ends_the_process_after_some_failures(model: Transformer) -> None:
    rig, forward = faulty(model)
    forward.raises = True
    for index in range(7):
        rig.start(make_request(str(index), PROMPT))
        rig.step()
    rig.start(make_request("last", PROMPT))
    with pytest.raises(RuntimeError, match="secret"):
        rig.step()


def test_nan_fails_only_its_own_request(model: Transformer) -> None:
    rig, forward = faulty(model)
    forward.poisoned = 5
    healthy = rig.start(make_request("a", PROMPT, stop_token_ids=()))
    poisoned = rig.start(make_request("b", PROMPT[:5]))
    rig.run()
    assert (poisoned.failed.code, poisoned.failed.retryable) == ("INTERNAL", False)
    assert healthy.finished.num_tokens == 16


def test_a_running_attempt_is_not_started_twice(rig: Rig) -> None:
    rig.start(make_request("a", PROMPT))
    answer = rig.start(make_request("a", PROMPT))
    assert answer.failed.code == "ALREADY_EXISTS"


GOOD = make_request("a", PROMPT)
HALF = BlockState((9, 9, 9, 9), b"\x03", True, 1)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        pytest.param(make_request("a", ()), "at least one token", id="empty-prompt"),
        pytest.param(make_request("a", (VOCAB_SIZE,)), f"0..{VOCAB_SIZE - 1}", id="token-id"),
        pytest.param(make_request("a", (-1,)), "got -1..-1", id="negative-id"),
        pytest.param(  # more than a word of a device's slot holds
            make_request("a", PROMPT, stop_token_ids=((1 << 32) - 1,)),
            "stop_token_ids must lie in",
            id="stop-id",
        ),
        pytest.param(make_request("a", PROMPT, max_tokens=500), "513 tokens", id="too-long"),
        pytest.param(make_request("a", PROMPT, window=9), "max_window 8, got 9", id="wide-window"),
        pytest.param(
            make_request("a", PROMPT, stop_token_ids=range(17)),
            "max_stop_ids 16, got 17",
            id="many-stops",
        ),
        pytest.param(make_request("a", PROMPT, denoising_steps=5), "block size 4", id="steps"),
        pytest.param(
            make_request("a", PROMPT, resume=Resume(committed_token_ids=(9,) * 3, frontier=())),
            "do not end at the end of a block",
            id="off-grid",
        ),
        pytest.param(
            make_request(
                "a",
                PROMPT,
                resume=Resume(committed_token_ids=(9, 9, 9, 256), frontier=()),
            ),
            "contain a stop id",
            id="ended",
        ),
        pytest.param(
            make_request("a", PROMPT, resume=Resume(committed_token_ids=(), frontier=(HALF,) * 5)),
            "more blocks than",
            id="frontier-too-long",
        ),
        pytest.param(
            make_request(
                "a", PROMPT, window=1, resume=Resume(committed_token_ids=(), frontier=(HALF,) * 2)
            ),
            "the settings allow 1",
            id="frontier-beyond-window",
        ),
        pytest.param(
            make_request(
                "a",
                PROMPT,
                resume=Resume(
                    committed_token_ids=(), frontier=(BlockState((9, 9), b"\x03", True, 1),)
                ),
            ),
            "4 ids and 1 bytes",
            id="short-block",
        ),
        pytest.param(
            make_request(
                "a",
                PROMPT,
                resume=Resume(
                    committed_token_ids=(), frontier=(BlockState((9,) * 4, b"\0", True, 1),)
                ),
            ),
            "has no mask",
            id="no-mask",
        ),
        pytest.param(
            make_request("a", PROMPT, algorithm="block_diffusion", remasking="random"),
            "remasking: expected one of low_confidence_dynamic, ",
            id="order",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    rig: Rig, request_: messages.StartDecode, said: str
) -> None:
    answer = rig.start(request_)
    assert answer.failed.code == "INVALID_ARGUMENT" and not answer.failed.retryable
    assert said in answer.failed.message
    assert not rig.step()


def test_a_client_is_told_which_of_its_fields_is_beyond_this_worker(rig: Rig) -> None:
    wide = rig.start(make_request("a", PROMPT, window=9))
    many = rig.start(make_request("b", PROMPT, stop_token_ids=range(17)))
    order = make_request("c", PROMPT, algorithm="block_diffusion", remasking="low_confidence")
    assert wide.failed.field == "decoding.window"
    assert rig.start(order).failed.field == "decoding.remasking"
    assert many.failed.field == "stopping.stop_token_ids"


def test_what_never_fits_is_refused_with_numbers(model: Transformer) -> None:
    small = Rig(model, num_pages=4, page_size=4, budget=12)
    pages = small.start(make_request("a", PROMPT[:4], max_tokens=40, window=1))
    assert "10 pages of 4" in pages.failed.message and "has 4" in pages.failed.message
    rows = small.start(make_request("b", PROMPT[:4], max_tokens=16, window=4))
    assert "16 tokens" in rows.failed.message and "is 12" in rows.failed.message
    prompt = small.start(make_request("c", PROMPT, max_tokens=1, window=1))
    assert "13 tokens cannot be split" in prompt.failed.message


def test_an_attempt_that_takes_too_long_ends(model: Transformer) -> None:
    rig = Rig(model, max_request_s=50.0)
    answer = rig.start(make_request("a", PROMPT))
    rig.step()
    rig.clock.now = 50.5
    rig.step()
    assert answer.failed.code == "DEADLINE_EXCEEDED" and "50 s" in answer.failed.message
    assert rig.pool.num_free == rig.pool.num_pages


def test_drafts_show_the_blocks_in_flight_where_asked_for(rig: Rig) -> None:
    quiet = rig.start(make_request("a", PROMPT, max_tokens=24, stop_token_ids=()))
    loud = rig.start(make_request("b", PROMPT, max_tokens=24, stop_token_ids=(), drafts=True))
    rig.run()
    drafts = [event for event in loud.events if isinstance(event, messages.Draft)]
    assert drafts and not any(isinstance(event, messages.Draft) for event in quiet.events)
    for draft in drafts:
        assert draft.token_offset % 4 == 0 and any(draft.block.masks)
    first = {draft.token_offset: draft.block.masks for draft in reversed(drafts)}
    whole = set(range(0, 24, 4))  # at its beginning, so that even one forward's writes are seen
    assert first == dict.fromkeys(whole, b"\x0f")
    assert quiet.token_ids == loud.token_ids


def test_each_part_of_its_own_prompt_but_the_last_is_reported_where_asked_for(
    tmp_path: Path,
) -> None:
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "sdar", seed=3))
    rig = Rig(model, budget=22)
    prompt = [20 + index % 40 for index in range(90)]
    asked = make_request("a", prompt, max_tokens=24, stop_token_ids=())
    loud = rig.start(msgspec.structs.replace(asked, progress=True))
    rig.run()
    parts = [one for one in loud.events if isinstance(one, messages.PromptProgress)]
    counts = [one.computed_tokens for one in parts]
    assert len(counts) >= 2 and counts == sorted(set(counts)) and counts[-1] < 88
    kinds = [type(event).__name__ for event in loud.events]
    assert kinds[: len(counts) + 2] == ["Reserved", *["PromptProgress"] * len(counts), "Verified"]
    again = rig.start(make_request("b", prompt, max_tokens=24, stop_token_ids=()))
    rig.run()
    assert not any(isinstance(one, messages.PromptProgress) for one in again.events)
    assert again.token_ids == loud.token_ids


def test_load_tells_what_the_engine_has(model: Transformer) -> None:
    rig = Rig(model, max_num_seqs=1)
    for name in "ab":
        rig.engine.handle(make_request(name, PROMPT, max_tokens=9, stop_token_ids=()))
    load = rig.engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.blocks_left) == (0, 2, 26, 6)
    rig.step()
    load = rig.engine.load()
    assert (load.running, load.waiting, load.runnable, load.steps) == (1, 1, 1, 1)
    assert load.free_pages == load.total_pages - 4
    rig.run()
    load = rig.engine.load()
    assert (load.running, load.waiting, load.queued_tokens, load.blocks_left) == (0, 0, 0, 0)
    assert load.free_pages == load.total_pages


def test_a_long_prompt_is_chunked_at_block_boundaries(tmp_path: Path) -> None:
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", "sdar", seed=3))
    prompt = [20 + index % 40 for index in range(90)]
    answers = []
    for budget in (4096, 22):
        rig = Rig(model, budget=budget)
        rig.engine.handle(make_request("a", prompt, stop_token_ids=()))
        rig.run()
        answers.append(rig.answers["transfer-a"].token_ids)
    assert answers[0] == answers[1]
    assert rig.engine.counters.steps > 88 // 20


def test_requests_join_and_leave_at_any_step(model: Transformer) -> None:
    alone: dict[str, tuple[int, ...]] = {}
    requests = [
        make_request(str(index), PROMPT[: 4 + index], max_tokens=8 + 3 * index, stop_token_ids=())
        for index in range(6)
    ]
    for request in requests:
        rig = Rig(model)
        rig.engine.handle(request)
        rig.run()
        alone |= {name: answer.token_ids for name, answer in rig.answers.items()}
    rig = Rig(model)
    for request in requests:
        rig.engine.handle(request)
        rig.step()
        rig.step()
    rig.run()
    assert {name: answer.token_ids for name, answer in rig.answers.items()} == alone


def test_messages_survive_their_encoding(rig: Rig) -> None:
    rig.start(make_request("a", PROMPT, drafts=True))
    rig.run()
    for event in rig.answers["transfer-a"].events:
        data = msgspec.msgpack.encode(event)
        assert msgspec.msgpack.decode(data, type=type(event)) == event


def test_waste_by_the_metrics_is_what_the_memory_shows(model: Transformer) -> None:
    """Free pages are made new, so a place for a token has been written if it has other bits."""
    rig, new = Rig(model, page_size=6, num_pages=64, caches=False), 123.0
    rig.memory.tensor.fill_(new)
    size, longest = rig.limits.page_size, rig.limits.max_model_len
    metrics = WorkerMetrics(
        lambda: WorkerReadings(
            role="decode", model_name="tiny", load=rig.engine.load(), restarts=0, tasks=0,
            page_size=size, max_model_len=longest,
        )
    )  # fmt: skip
    for number in range(4):
        rig.start(make_request(str(number), PROMPT[: 5 + number], max_tokens=24))
    seen = set[tuple[float, ...]]()
    while rig.step():
        rig.memory.tensor[free_ids(rig.pool._free)] = new
        requests = [one for one in rig.engine.roster.by_transfer.values() if one.pages]
        pages = rig.memory.tensor[[page for one in requests for page in one.page_ids]]
        written = (pages != new).all(dim=-1).all(dim=4).flatten(1, 3).all(dim=1).sum(dim=-1)
        empty = size * int((written == 0).sum())
        partial = len(pages) * size - empty - int(written.sum())
        tokens, held = int(written.sum()), len(pages) * size
        found = (
            metrics.value("effuse_kv_waste_ratio", {"cause": "reserved"}),
            metrics.value("effuse_kv_waste_ratio", {"cause": "internal"}),
            metrics.value("effuse_kv_unused_ratio", {"allocation": "paged"}),
            metrics.value("effuse_kv_unused_ratio", {"allocation": "contiguous"}),
        )
        pool, buffers = 64 * size, len(requests) * longest
        assert found == (
            empty / pool,
            partial / pool,
            (empty + partial) / held if held else 0,
            1 - tokens / buffers if requests else 0,
        )
        seen.add(found)
    assert len(seen) > 4
