"""Rehearsals in a prefill engine: pages that are lent, pushed and given back, beside prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from auditing import audit
from checkpoints import write_tiny_checkpoint
from prefill_worker.rig import DECODE, Rig, attempt_of

from effuse.kvtransfer import push as push_module
from effuse.kvtransfer import pushes
from effuse.kvtransfer.messages import Reservation
from effuse.kvtransfer.push import Push
from effuse.kvtransfer.transport import Chunk
from effuse.prefill_worker import engine
from effuse.worker.messages import Abort, AbortDone, Failed, PromptPushed, PushRehearsal

PROMPT = [3 + (7 * i) % 200 for i in range(22)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar", seed=3)


@pytest.fixture
def rig(checkpoint: Path) -> Iterator[Rig]:
    made = Rig(checkpoint, budget=8, num_pages=8)
    made.memory.tensor.zero_()
    yield made
    made.close()


def rehearse(rig: Rig, num_pages: int, name: str = "r", *, in_groups: bool = False) -> Reservation:
    reserved = rig.reserve(attempt_of(name), num_pages)
    rig.engine.handle(PushRehearsal(reservation=reserved, in_groups=in_groups))
    return reserved


def test_free_pages_are_pushed_verified_and_given_back(rig: Rig) -> None:
    rehearse(rig, 4)
    audit(rig.engine)
    assert rig.pool.num_free == 4
    rig.settle()
    (pushed,) = rig.take(PromptPushed)
    num_bytes = 4 * rig.layout.page_bytes
    assert (pushed.pages, pushed.bytes, pushed.transport) == (4, num_bytes, "memory")
    (arrived,) = rig.arrived()
    assert arrived.manifest.boundary.prompt_len == 0
    assert rig.engine.load().kv_bytes == 0, "a rehearsal is no prompt's KV"
    assert not rig.forward.ran
    rig.check_idle()


def test_a_rehearsal_that_was_aborted_before_it_came_never_begins(rig: Rig) -> None:
    """Its receiver's pages may belong to others by then."""
    rig.engine.handle(Abort(attempt=attempt_of("r")))
    rehearse(rig, 4)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.code == "ABORTED"
    assert not rig.arrived() and rig.pool.num_free == 8


def test_pages_are_pushed_by_groups_of_layers_as_those_of_prompts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[tuple[int, int]] = []
    take = pushes.Pushes._deliver

    def deliver(self: pushes.Pushes, push: Push, chunk: Chunk) -> bool:
        groups.append((chunk.groups.start, chunk.groups.stop))
        return take(self, push, chunk)

    monkeypatch.setattr(pushes.Pushes, "_deliver", deliver)
    monkeypatch.setattr(push_module, "LEAST_BYTES", 1)
    rehearse(rig, 4, in_groups=True)
    rig.settle()
    (pushed,) = rig.take(PromptPushed)
    assert pushed.bytes == 4 * rig.layout.page_bytes
    assert rig.layout.num_groups > 1
    assert groups == [(at, at + 1) for at in range(rig.layout.num_groups)]
    rig.check_idle()


def test_more_than_half_of_what_is_free_is_not_lent(rig: Rig) -> None:
    rehearse(rig, 5)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.code, failed.retryable) == ("RESOURCE_EXHAUSTED", True)
    assert "5 of 8 free pages" in failed.message
    rig.check_idle()


def test_a_pool_of_one_page_lends_it(checkpoint: Path) -> None:
    rig = Rig(checkpoint, budget=8, num_pages=1)
    rig.memory.tensor.zero_()
    rehearse(rig, 1)
    rig.settle()
    assert rig.take(PromptPushed)
    rig.check_idle()
    rig.close()


def test_prompts_that_wait_come_before_more_than_a_few_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.start("prompt", PROMPT)
    rehearse(rig, 1, "few")
    monkeypatch.setattr(engine, "FEW_PAGES", 0)
    rehearse(rig, 1)
    rig.settle()
    (pushed,) = rig.take(PromptPushed)
    assert pushed.attempt == attempt_of("few")
    (failed,) = rig.take(Failed)
    assert failed.code == "RESOURCE_EXHAUSTED"
    assert failed.attempt == attempt_of("r")


def test_a_prompt_is_computed_beside_a_rehearsal(rig: Rig) -> None:
    rig.hub.pause()
    rehearse(rig, 2)
    rig.push_to(rig.start("prompt", PROMPT), 5)
    rig.settle()
    rig.hub.resume()
    rig.settle()
    assert {pushed.attempt.transfer_id for pushed in rig.take(PromptPushed)} == {
        "transfer-prompt",
        "transfer-r",
    }
    assert rig.engine.load().kv_bytes == 5 * rig.layout.page_bytes
    rig.said.clear()
    rig.check_idle()


def test_an_abort_gives_the_pages_back_once_nothing_reads_them(rig: Rig) -> None:
    rig.hub.pause()
    reserved = rehearse(rig, 2)
    rig.settle()
    rig.engine.handle(Abort(attempt=reserved.attempt))
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=reserved.attempt, was_running=True)]
    rig.check_idle()


def test_a_receiver_that_refuses_ends_it(rig: Rig) -> None:
    reserved = rig.reserve(attempt_of("r"), 2)
    rig.receiver.abort(reserved.transfer_id)
    rig.engine.handle(PushRehearsal(reservation=reserved))
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.attempt == attempt_of("r")
    rig.check_idle()


def test_a_receiver_that_is_not_there_ends_it(rig: Rig) -> None:
    del rig.hub.members[DECODE]
    rehearse(rig, 2)
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
    rig.check_idle()


def test_a_name_that_is_running_is_refused(rig: Rig) -> None:
    rig.hub.pause()
    reserved = rehearse(rig, 2)
    rig.engine.handle(PushRehearsal(reservation=reserved))
    rig.settle()
    (failed,) = rig.take(Failed)
    assert failed.code == "ALREADY_EXISTS"
    rig.hub.resume()
    rig.settle()
    assert len(rig.take(PromptPushed)) == 1
    rig.check_idle()
