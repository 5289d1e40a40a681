"""An abort in every state: answered once, when nothing reads its pages, and then refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from auditing import audit
from checkpoints import write_tiny_checkpoint
from prefill_worker.rig import Rig, attempt_of

from effuse.kvtransfer.connector import Cancel, Command, Forget, ForgetLife
from effuse.worker.messages import AbortDone, Failed, PrefillDone, PromptPushed, ReceiverGone

PROMPT = [3 + (7 * i) % 200 for i in range(22)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar", seed=3)


@pytest.fixture
def rig(checkpoint: Path) -> Iterator[Rig]:
    made = Rig(checkpoint, budget=8, num_pages=8)
    yield made
    made.close()


def waiting(rig: Rig) -> None:
    rig.start("other", PROMPT)
    rig.start("a", PROMPT)
    rig.step()


def just_started(rig: Rig) -> None:
    rig.start("a", PROMPT)


def computing(rig: Rig) -> None:
    rig.start("a", PROMPT)
    rig.step()


def computed(rig: Rig) -> None:
    rig.start("a", PROMPT)
    rig.settle()


def pushing(rig: Rig) -> None:
    rig.hub.pause()
    rig.push_to(rig.start("a", PROMPT), 5)
    rig.step()


def finishing(rig: Rig) -> None:
    pushing(rig)
    rig.settle()


STATES = [waiting, just_started, computing, computed, pushing, finishing]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("times", [1, 2])
def test_an_abort_ends_an_attempt_wherever_it_is(
    rig: Rig, reach: Callable[[Rig], None], times: int
) -> None:
    reach(rig)
    for _ in range(times):
        rig.abort(attempt_of("a"))
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of("a"), was_running=True)]
    rig.hub.resume()
    rig.abort(attempt_of("other"))
    rig.settle()
    rig.take(PrefillDone), rig.take(AbortDone)
    rig.check_idle()
    assert not rig.target_memory.tensor.any() or reach not in (pushing, finishing)
    assert rig.arrived() == []


def withheld(rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: type[Command]) -> list[Command]:
    """Commands of this kind, which the source's connector does not get."""
    kept: list[Command] = []
    send = rig.source.send

    def sift(command: Command) -> None:
        if isinstance(command, kind):
            kept.append(command)
        else:
            send(command)

    monkeypatch.setattr(rig.source, "send", sift)
    return kept


def test_an_abort_is_answered_only_when_the_push_has_drained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = withheld(rig, monkeypatch, Cancel)
    pushing(rig)
    rig.abort(attempt_of("a"))
    rig.settle()
    assert asked == [Cancel("transfer-a")]
    assert rig.take(AbortDone) == []
    assert rig.engine.load().free_pages == 3
    monkeypatch.undo()
    rig.source.send(Cancel("transfer-a"))
    rig.settle()
    assert len(rig.take(AbortDone)) == 1
    assert rig.engine.load().free_pages == 8


def test_an_abort_after_a_failure_waits_for_the_drain_and_did_not_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld(rig, monkeypatch, Cancel)
    reservation = rig.push_to(rig.start("a", PROMPT), 5)
    rig.target.send(Forget(reservation.transfer_id))
    rig.settle()
    (failed,) = rig.take(Failed)
    assert (failed.code, failed.retryable) == ("ABORTED", True)
    rig.abort(attempt_of("a"))
    rig.settle()
    assert rig.take(AbortDone) == []
    monkeypatch.undo()
    rig.source.send(Cancel("transfer-a"))
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of("a"), was_running=False)]


def test_an_abort_of_what_is_over_or_unknown_is_answered_at_once(rig: Rig) -> None:
    rig.push_to(rig.start("a", PROMPT), 5)
    rig.settle()
    assert len(rig.take(PromptPushed)) == 1
    for name in ("a", "never"):
        rig.abort(attempt_of(name))
        rig.step()
        assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of(name), was_running=False)]


def test_what_comes_after_an_abort_is_refused(rig: Rig) -> None:
    rig.abort(attempt_of("a"))
    rig.start("a", PROMPT)
    rig.push_to(attempt_of("a"), 5)
    rig.settle()
    assert [failed.code for failed in rig.take(Failed)] == ["ABORTED"]
    rig.take(AbortDone)
    rig.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_storms_of_aborts_leave_nothing_behind(checkpoint: Path, seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(checkpoint, budget=12, num_pages=12, max_num_seqs=4)
    names = [str(number) for number in range(40)]
    ended: set[str] = set()
    reserved: set[str] = set()
    aborted: set[str] = set()
    for name in names:
        rig.start(name, PROMPT[: rng.randint(1, 22)])
    while len(ended) < len(names):
        name = rng.choice(names)
        match rng.random():
            case chance if chance < 0.1 and name not in aborted:
                aborted.add(name)
                rig.abort(attempt_of(name))
            case chance if chance < 0.2:
                rig.hub.pause()
            case chance if chance < 0.4:
                rig.hub.resume()
            case chance if chance < 0.8 and name not in reserved:
                reserved.add(name)
                if name not in ended:
                    _reserve(rig, name)
        rig.step()
        audit(rig.engine)
        ended |= {e.attempt.request_id.removeprefix("request-") for e in _ends(rig)}
    rig.hub.resume()
    rig.take(PrefillDone)
    rig.settle()
    rig.take(AbortDone)
    rig.check_idle()
    rig.close()


def _reserve(rig: Rig, name: str) -> None:
    prompt = rig.engine.table.prompts.get(f"transfer-{name}")
    if prompt is not None and rig.target_pool.num_free > 6:
        rig.push_to(attempt_of(name), prompt.num_paged // 4)
        for report in rig.arrived():
            rig.target_pool.release(rig.pages_of(report))
    else:
        rig.abort(attempt_of(name))


def _ends(rig: Rig) -> list[AbortDone | PromptPushed | Failed]:
    return [*rig.take(AbortDone), *rig.take(PromptPushed), *rig.take(Failed)]


def test_the_connector_forgets_a_receiver_that_is_gone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = withheld(rig, monkeypatch, ForgetLife)
    gone = ReceiverGone(incarnation="decode-2")
    assert rig.engine.meanwhile([gone]) == [gone], "lost within a forward"
    rig.engine.handle(gone)
    assert forgotten == [ForgetLife("decode-2")]
