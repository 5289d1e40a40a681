"""Prompt in, KV pages out: the handed-over pages, their times, and that every page comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec
import pytest
import torch
from auditing import AuditError, audit, audit_pool
from checkpoints import ARCHITECTURES, MASK_TOKEN_ID, VOCAB_SIZE, write_tiny_checkpoint
from kvtransfer.fixtures import FIELD_NAMES
from paged_model import PagedModel
from prefill_worker.rig import LEASE_S, MOST_S, RESERVATION_S, Rig, attempt_of

from effuse.kvtransfer.ends import OVERTIME_S
from effuse.kvtransfer.messages import Field
from effuse.prefill_worker.prompts import unfit
from effuse.worker.messages import Failed, PrefillDone, PromptPushed, PushTo

PROMPT = [3 + (7 * i) % 200 for i in range(22)]
BLOCK = 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {
        name: write_tiny_checkpoint(root / name, name, seed=3, block_size=BLOCK)
        for name in ARCHITECTURES
    }


class Sizes(TypedDict, total=False):
    """A test's options of a rig."""

    page_size: int
    budget: int
    num_pages: int


@pytest.fixture
def make(checkpoints: dict[str, Path]) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make_rig(architecture: str = "sdar", **sizes: Unpack[Sizes]) -> Rig:
        rigs.append(Rig(checkpoints[architecture], **sizes))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


def paged(architecture: str, length: int) -> int:
    return length // BLOCK * BLOCK if architecture == "sdar" else length


@pytest.mark.parametrize("page_size", [3, 4, 16])
@pytest.mark.parametrize("budget", [22, 64])
@pytest.mark.parametrize("length", [20, 22])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_handed_over_is_the_prompts_kv(
    make: Callable[..., Rig],
    checkpoints: dict[str, Path],
    architecture: str,
    length: int,
    budget: int,
    page_size: int,
) -> None:
    budget = 8 if architecture == "sdar" and budget == 22 else budget
    rig = make(architecture, budget=budget, page_size=page_size)
    prompt, count = PROMPT[:length], paged(architecture, length)
    attempt = rig.start("a", prompt)
    rig.push_to(attempt, -(-count // page_size))
    rig.settle()
    (done,) = rig.take(PrefillDone)
    (pushed,) = rig.take(PromptPushed)
    (arrived,) = rig.arrived()
    assert (done.attempt, pushed.attempt) == (attempt, attempt)
    assert pushed.bytes == pushed.pages * rig.layout.page_bytes
    assert len(rig.forward.ran) == (-(-count // 8) if budget == 8 else 1)

    reference = PagedModel(checkpoints[architecture], page_size=page_size, block_size=BLOCK)
    pages = reference.pages(count)
    origin = rig.model.config.block_origin(length)
    hidden = reference.forward(prompt[:count], 0, pages, count, origin)
    handed = rig.handed(arrived, count)
    for layer in range(rig.model.config.num_layers):
        for side, expected in enumerate(reference.stored(layer, pages, count)):
            difference = handed[layer, side].transpose(0, 1) - expected
            assert float(difference.abs().max()) <= 1e-5
    boundary = arrived.manifest.boundary
    assert boundary.prompt_len == length
    assert boundary.tail_token_ids == tuple(prompt[count:])
    if architecture == "dream":
        row = torch.frombuffer(bytearray(boundary.hidden or b""), dtype=torch.float32)
        assert float((row - hidden[count - 1]).abs().max()) <= 1e-5
    else:
        assert boundary.hidden is None
    rig.check_idle()


def test_the_unused_end_of_a_ragged_last_page_is_zero(make: Callable[..., Rig]) -> None:
    """The source pool is full of NaN: whatever was not computed would show."""
    rig = make(page_size=16)
    rig.push_to(rig.start("a", PROMPT), 2)
    rig.settle()
    (arrived,) = rig.arrived()
    last = rig.target_memory.tensor[rig.pages_of(arrived)[-1].page_id]
    assert last[..., : 20 - 16, :].isfinite().all()
    assert not last[..., 20 - 16 :, :].any()


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_shorter_than_a_block_hands_over_no_page(rig: Rig, length: int) -> None:
    rig.push_to(rig.start("a", PROMPT[:length]), 0)
    rig.settle()
    (pushed,) = rig.take(PromptPushed)
    (arrived,) = rig.arrived()
    assert (pushed.pages, pushed.bytes, rig.forward.ran) == (0, 0, [])
    assert arrived.manifest.boundary.tail_token_ids == tuple(PROMPT[:length])
    assert len(rig.take(PrefillDone)) == 1
    rig.check_idle()


def test_no_logits_are_ever_computed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("prefill computed logits")

    monkeypatch.setattr(type(rig.model), "logits", never)
    rig.push_to(rig.start("a", PROMPT), 5)
    rig.settle()
    assert len(rig.take(PromptPushed)) == 1
    assert all(not part.candidates for parts in rig.forward.ran for part in parts)


def test_prompts_share_a_forward_under_the_token_budget(make: Callable[..., Rig]) -> None:
    rig = make(budget=24)
    for name, length in (("a", 8), ("b", 22), ("c", 9)):
        rig.push_to(rig.start(name, PROMPT[:length]), length // BLOCK)
    rig.settle()
    sizes = [[len(part.token_ids) for part in parts] for parts in rig.forward.ran]
    assert sizes == [[8, 16], [4, 8]]
    assert len(rig.take(PromptPushed)) == 3


def test_a_bidirectional_prompt_is_never_split(make: Callable[..., Rig]) -> None:
    rig = make("dream", budget=24)
    for name in ("a", "b"):
        rig.push_to(rig.start(name, PROMPT), 6)
    rig.settle()
    assert [[len(part.token_ids) for part in parts] for parts in rig.forward.ran] == [[22], [22]]


def test_final_pages_are_pushed_while_later_ones_are_computed(make: Callable[..., Rig]) -> None:
    rig = make(budget=8)
    reservation = rig.push_to(rig.start("a", PROMPT), 5)
    rig.step()
    rig.hub.settle()
    assert rig.take(PrefillDone) == []
    landed = [bool(rig.target_memory.tensor[page.page_id].any()) for page in reservation.pages]
    assert landed == [True, True, False, False, False]
    rig.settle()
    assert len(rig.arrived()) == 1


def test_computing_does_not_wait_for_the_reservation_but_pages_do(rig: Rig) -> None:
    attempt = rig.start("a", PROMPT)
    rig.settle()
    assert len(rig.take(PrefillDone)) == 1
    assert rig.engine.load().free_pages == rig.pool.num_pages - 5
    rig.push_to(attempt, 5)
    rig.settle()
    assert len(rig.take(PromptPushed)) == 1
    rig.check_idle()


def test_source_pages_are_held_until_the_push_is_acknowledged(rig: Rig) -> None:
    rig.hub.pause()
    rig.push_to(rig.start("a", PROMPT), 5)
    rig.settle()
    assert rig.engine.load().free_pages == rig.pool.num_pages - 5
    with pytest.raises(AuditError, match="5 pages leaked"):
        audit_pool(rig.pool, held=())
    audit(rig.engine)
    rig.hub.resume()
    rig.settle()
    assert rig.engine.load().free_pages == rig.pool.num_pages


def test_prompts_wait_for_pages_in_their_order(make: Callable[..., Rig]) -> None:
    rig = make(num_pages=6)
    attempts = [rig.start("a", PROMPT), rig.start("b", PROMPT[::-1])]
    small = rig.start("c", PROMPT[:4])
    rig.settle()
    assert [done.attempt for done in rig.take(PrefillDone)] == [attempts[0]]
    assert rig.engine.load().waiting == 2
    for attempt in attempts:
        rig.push_to(attempt, 5)
        rig.settle()
    rig.push_to(small, 1)
    rig.settle()
    assert [pushed.attempt for pushed in rig.take(PromptPushed)] == [*attempts, small]


@pytest.mark.parametrize(
    ("architecture", "prompt", "says"),
    [
        ("sdar", [], "must not be empty"),
        ("sdar", [5] * 200, "200 tokens"),
        ("sdar", [5, VOCAB_SIZE], f"0..{VOCAB_SIZE - 1}"),
        ("sdar", [5, MASK_TOKEN_ID], f"mask token {MASK_TOKEN_ID}"),
        ("sdar", [5] * 150, "needs 37 pages of 4 tokens; the pool has 32"),
        ("llada", [5] * 65, "65 tokens cannot be split; max_num_batched_tokens is 64"),
    ],
)
def test_what_can_never_be_computed_is_refused_with_the_numbers(
    make: Callable[..., Rig], architecture: str, prompt: list[int], says: str
) -> None:
    rig = make(architecture)
    attempt = rig.start("a", prompt)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.attempt, failed.code) == (attempt, "INVALID_ARGUMENT")
    assert failed.field == "prompt" and says in failed.message
    good = rig.start("b", PROMPT)
    rig.push_to(good, -(-paged(architecture, 22) // 4))
    rig.settle()
    assert [pushed.attempt for pushed in rig.take(PromptPushed)] == [good]
    rig.take(PrefillDone)
    rig.check_idle()


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_a_reservation_of_another_model_is_refused_by_the_field(rig: Rig, name: str) -> None:
    attempt = rig.start("a", PROMPT)
    reservation = rig.reserve(attempt, 5)
    fields = tuple(Field(f.name, "else") if f.name == name else f for f in reservation.fingerprint)
    rig.engine.handle(PushTo(reservation=msgspec.structs.replace(reservation, fingerprint=fields)))
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.code, failed.field) == ("FAILED_PRECONDITION", name)
    assert "'else'" in failed.message
    rig.check_idle()


@pytest.mark.parametrize("num_pages", [0, 4, 6])
def test_a_reservation_of_another_size_is_refused(rig: Rig, num_pages: int) -> None:
    rig.push_to(rig.start("a", PROMPT), num_pages)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.code == "INVALID_ARGUMENT"
    assert f"needs 5 pages, {num_pages} are reserved" in failed.message
    rig.check_idle()


def test_a_receiver_that_cuts_the_context_may_hold_all_of_a_prompt(rig: Rig) -> None:
    """Its third page is half full: on one of its two ranks. With a fourth it had another prompt."""
    attempt = rig.start("a", PROMPT)
    prompt, reserved = rig.engine.table.prompts[attempt.transfer_id], rig.reserve(attempt, 0)
    (shard,) = reserved.shards
    part = msgspec.structs.replace(shard.part, turns=2)
    shards = (msgspec.structs.replace(shard, part=part),)
    told = [
        unfit(
            prompt, msgspec.structs.replace(reserved, shards=shards, num_held=held), is_first=True
        )
        for held in (2, 3, 4)
    ]
    text = "the prompt needs 5 pages, 0 are reserved beside {} held ones"
    assert told == [text.format(4), "", text.format(8)]


def test_a_second_reservation_and_one_for_nobody_are_refused(rig: Rig) -> None:
    reservation = rig.push_to(rig.start("a", PROMPT), 5)
    rig.engine.handle(PushTo(reservation=reservation))
    rig.push_to(attempt_of("b"), 5)
    rig.settle()
    first, second = rig.take(Failed)
    assert "second reservation" in first.message
    assert "this attempt has no prompt" in second.message
    rig.take(PrefillDone)
    rig.check_idle()


def test_a_reservation_that_comes_too_late_is_not_answered_a_second_time(rig: Rig) -> None:
    """The front sent it before it knew that the attempt had failed."""
    attempt = rig.start("a", PROMPT)
    rig.settle()
    rig.time += RESERVATION_S + 1
    rig.settle()
    rig.push_to(attempt, 5)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.field == "reservation"
    rig.take(PrefillDone)
    rig.check_idle()


def test_an_attempt_that_runs_cannot_be_started_again(rig: Rig) -> None:
    rig.start("a", PROMPT)
    rig.start("a", PROMPT)
    rig.settle()
    assert [failed.code for failed in rig.take(Failed)] == ["ALREADY_EXISTS"]
    assert len(rig.take(PrefillDone)) == 1


def test_a_failing_forward_fails_only_what_was_in_it(rig: Rig) -> None:
    rig.forward.fails = 1
    first = rig.start("a", PROMPT)
    rig.settle()
    second = rig.start("b", PROMPT)
    rig.push_to(second, 5)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.attempt, failed.code, failed.retryable) == (first, "INTERNAL", True)
    assert "planted" not in failed.message
    assert [pushed.attempt for pushed in rig.take(PromptPushed)] == [second]
    rig.take(PrefillDone)
    rig.check_idle()


def test_a_device_that_always_fails_ends_the_process(rig: Rig) -> None:
    rig.forward.fails = 100
    with pytest.raises(RuntimeError, match="planted"):
        for number in range(50):
            rig.start(str(number), PROMPT)
            rig.settle()


def test_a_reservation_that_never_comes_ends_the_attempt(rig: Rig) -> None:
    attempt = rig.start("a", PROMPT)
    rig.settle()
    rig.time += RESERVATION_S + 1
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.attempt, failed.code, failed.field) == (attempt, "UNAVAILABLE", "reservation")
    assert "no reservation arrived within 20 s" in failed.message
    rig.take(PrefillDone)
    rig.check_idle()


def test_a_push_that_never_ends_is_given_up_but_its_pages_wait(rig: Rig) -> None:
    rig.hub.pause()
    rig.push_to(rig.start("a", PROMPT), 5)
    rig.settle()
    rig.time += LEASE_S + OVERTIME_S + 1
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.code == "UNAVAILABLE" and "lease of 10 s" in failed.message
    rig.take(PrefillDone)
    rig.check_idle()


def test_an_attempt_has_a_longest_time(make: Callable[..., Rig]) -> None:
    rig = make(num_pages=5)
    attempts = [rig.start("a", PROMPT), rig.start("b", PROMPT)]
    rig.step()
    rig.time += MOST_S + 1
    rig.settle()
    assert {f.attempt for f in rig.take(Failed)} == set(attempts)
    rig.take(PrefillDone)
    rig.check_idle()


def test_load_counts_what_there_is(make: Callable[..., Rig]) -> None:
    rig = make(budget=8, num_pages=6)
    rig.start("a", PROMPT)
    rig.start("b", PROMPT)
    rig.step()
    load = rig.engine.load()
    assert rig.engine._config.max_num_batched_tokens == 8
    assert (load.running, load.waiting, load.runnable) == (1, 1, 1)
    assert (load.queued_tokens, load.free_pages, load.total_pages) == (12 + 20, 1, 6)
    assert load.steps == 1
