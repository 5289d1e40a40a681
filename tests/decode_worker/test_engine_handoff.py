"""Pages from a remote writer: reserve, verify, start; and every way in which that can end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from auditing import audit
from checkpoints import ARCHITECTURES, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import (
    INCARNATION,
    Answer,
    Rig,
    load_tiny,
    make_request,
    oracle_settings,
    random_requests,
)
from decoding.source import SOURCE, Source
from kvtransfer.loopback import Hub, LoopbackConnector
from oracle.decode import decode

from effuse.config.decoding import Stopping
from effuse.kvtransfer.connector import ArrivalRefused, Cause, FinishPush, PushPages
from effuse.kvtransfer.messages import Reservation
from effuse.kvtransfer.pool import PageState
from effuse.models.transformer import Transformer
from effuse.worker import messages
from effuse.worker.messages import Abort, StartDecode, WriterGone

PROMPT = tuple(range(20, 33))


class Pair:
    """A decode engine and a source in one hub."""

    def __init__(
        self,
        model: Transformer,
        kind: type[Rig] = Rig,
        *,
        is_two_sided: bool = False,  # one-sided writers are the ones to beware of
        **limits: int,
    ) -> None:
        self.rig = kind(model, **limits)  # type: ignore[arg-type]
        self.hub = Hub(is_two_sided=is_two_sided)
        self.target = LoopbackConnector(
            self.hub, self.rig.memory, INCARNATION, self.rig.fingerprint, self.rig.clock
        )
        self.target.start()
        self.rig.connect(self.target)
        self.source = Source(model, self.hub, self.rig.clock, page_size=self.rig.limits.page_size)

    def reserve(self, request: StartDecode) -> tuple[Answer, Reservation]:
        self.rig.engine.handle(request)
        self.rig.step()
        answer = self.rig.answers[request.attempt.transfer_id]
        (reserved,) = answer.events
        assert isinstance(reserved, messages.Reserved)
        return answer, reserved.reservation

    def serve(self, requests: list[StartDecode]) -> None:
        """Hands over every prompt once its reservation is known; returns when all is idle."""
        to_push = {request.attempt.transfer_id: request for request in requests}
        for request in requests:
            self.rig.engine.handle(request)
        while self.rig.step():
            for name in [name for name in to_push if name in self.rig.answers]:
                (reserved,) = self.rig.answers[name].events
                assert isinstance(reserved, messages.Reserved)
                self.source.push(to_push.pop(name), reserved.reservation)

    def writer_gone(self) -> None:
        """The writer of the one transfer has let go of it."""
        self.rig.engine.handle(WriterGone(transfer_id="transfer-a", has_drained=True))
        self.rig.step()

    def close(self) -> None:
        self.target.close()
        self.source.connector.close()


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sdar") / "model", "sdar", seed=3)


@pytest.fixture(params=[Rig, DeviceRig], ids=["host", "device"])
def pair(sdar: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(load_tiny(sdar), request.param)
    yield made
    audit(made.rig.engine)
    made.close()


def remote(name: str = "a", **changes: object) -> StartDecode:
    return make_request(name, PROMPT, writer=SOURCE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Rig, DeviceRig], ids=["host", "device"])
@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_handed_over_prompts_give_the_oracles_answers_preempted_or_not(
    architecture: str, algorithm: str, kind: type[Rig], tmp_path: Path
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=5)  # type: ignore[arg-type]
    pair = Pair(load_tiny(directory), kind, num_pages=20, page_size=3, budget=64)
    requests = [
        msgspec.structs.replace(request, writer=SOURCE, stopping=Stopping(max_tokens=24))
        for request in random_requests(8, algorithm, block_size=4, sampled=True, seed=9)
    ]
    pair.serve(requests)
    moved = 0
    for request in requests:
        answer = pair.rig.answers[request.attempt.transfer_id]
        expected = decode(directory, request.prompt_token_ids, oracle_settings(request))
        assert answer.token_ids == expected.token_ids
        verified = answer.events[1]
        assert isinstance(verified, messages.Verified)
        moved += verified.bytes
    assert moved == pair.rig.engine.counters.kv_bytes > 0
    assert moved % pair.rig.layout.page_bytes == 0
    assert pair.rig.engine.counters.preemptions > 0
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages
    pair.close()


def test_the_reservation_says_where_to_write(pair: Pair) -> None:
    _, reservation = pair.reserve(remote())
    assert len(reservation.pages) == 3  # 12 of 13 prompt tokens lie in whole blocks of 4
    assert reservation.incarnation == INCARNATION
    assert reservation.shards[0].page_bytes == pair.rig.layout.page_bytes
    assert pair.rig.pool.count(PageState.RECEIVING) == 3
    assert not pair.rig.step()
    pair.rig.engine.handle(Abort(attempt=remote().attempt))
    pair.writer_gone()


def test_a_prompt_shorter_than_a_block_hands_over_no_page(pair: Pair) -> None:
    request = msgspec.structs.replace(remote(), prompt_token_ids=PROMPT[:3])
    answer, reservation = pair.reserve(request)
    assert reservation.pages == ()
    pair.source.push(request, reservation)
    pair.rig.run()
    assert answer.finished.num_tokens == len(answer.token_ids) > 0


def test_abort_quarantines_until_the_writer_is_gone(pair: Pair) -> None:
    answer, _ = pair.reserve(remote())
    pair.rig.engine.handle(Abort(attempt=remote().attempt))
    pair.rig.step()
    assert answer.events[-1] == messages.AbortDone(attempt=remote().attempt, was_running=True)
    assert pair.rig.pool.count(PageState.QUARANTINED) == 3
    assert pair.rig.engine.load().quarantined_pages == 3
    pair.writer_gone()
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages


def test_a_late_push_after_abort_is_refused_and_changes_nothing(pair: Pair) -> None:
    answer, reservation = pair.reserve(remote())
    pair.rig.engine.handle(Abort(attempt=remote().attempt))
    before = pair.rig.memory.tensor.clone()
    pair.source.push(remote(), reservation)
    pair.rig.run()
    assert bool((pair.rig.memory.tensor == before).all())
    assert isinstance(answer.events[-1], messages.AbortDone)
    pair.writer_gone()


def test_an_aborted_attempt_is_refused_afterwards(pair: Pair) -> None:
    pair.rig.engine.handle(Abort(attempt=remote().attempt))
    answer = pair.rig.start(remote())
    assert answer.failed.code == "ABORTED"
    assert answer.events[0] == messages.AbortDone(attempt=remote().attempt, was_running=False)


def test_the_lease_ends_a_handoff_that_never_comes(pair: Pair) -> None:
    answer, _ = pair.reserve(remote())
    pair.rig.clock.now = 9.9
    assert not pair.rig.step()
    pair.rig.clock.now = 10.0
    assert pair.rig.step()
    # The code by which the router knows that the writer must be replaced.
    assert (answer.failed.code, answer.failed.retryable) == ("DEADLINE_EXCEEDED", True)
    assert "10 s" in answer.failed.message
    assert pair.rig.pool.count(PageState.QUARANTINED) == 3
    pair.writer_gone()
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages


def test_a_writer_that_is_gone_early_fails_its_attempt(pair: Pair) -> None:
    answer, _ = pair.reserve(remote())
    pair.writer_gone()
    pair.rig.collect()
    assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages


def test_a_byte_changed_on_the_way_is_data_loss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, reservation = pair.reserve(remote())
    write = pair.rig.memory.write

    def spoil(
        page_ids: list[int],
        groups: range,
        payload: list[memoryview],
        heads: range,
    ) -> None:
        write(page_ids, groups, payload, heads)
        pair.rig.memory.bytes_at(page_ids[1])[5] ^= 1

    monkeypatch.setattr(pair.rig.memory, "write", spoil)
    pair.source.push(remote(), reservation)
    pair.rig.run()
    assert (answer.failed.code, answer.failed.retryable) == ("DATA_LOSS", True)
    assert pair.rig.pool.count(PageState.QUARANTINED) == 3
    pair.writer_gone()


@pytest.mark.parametrize("kind", [Rig, DeviceRig], ids=["host", "device"])
def test_a_refused_handoff_whose_pages_are_free_at_once_ends_its_attempt_alone(
    sdar: Path, kind: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A two-sided connector reports together that it refuses and that nothing arrives any more."""
    pair = Pair(load_tiny(sdar), kind, is_two_sided=True)
    answer, reservation = pair.reserve(remote())
    monkeypatch.setattr(pair.rig.memory, "write", lambda *_: None)  # the bytes never arrive
    pair.source.push(remote(), reservation)
    pair.rig.run()
    assert (answer.failed.code, answer.failed.retryable) == ("DATA_LOSS", True)
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages
    pair.writer_gone()
    audit(pair.rig.engine)
    pair.close()


@pytest.mark.parametrize(
    ("cause", "code", "retryable"),
    [
        (Cause.FINGERPRINT, "FAILED_PRECONDITION", False),
        (Cause.INCARNATION, "FAILED_PRECONDITION", True),
        (Cause.PEER, "UNAVAILABLE", True),
        (Cause.SEAL, "DATA_LOSS", True),
        (Cause.GENERATION, "DATA_LOSS", True),
    ],
)
def test_what_the_connector_refuses_fails_the_attempt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, cause: Cause, code: str, retryable: bool
) -> None:
    answer, _ = pair.reserve(remote())
    refused = [
        ArrivalRefused("transfer-a", cause, "both sides"),
        ArrivalRefused("transfer-z", cause, "other"),
    ]
    monkeypatch.setattr(pair.target, "poll", lambda: refused)
    pair.rig.step()
    failed = answer.failed
    assert (failed.code, failed.retryable, failed.message) == (code, retryable, "both sides")
    pair.writer_gone()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"prompt_len": 12}, "hold a prompt of 12 tokens", id="prompt-len"),
        pytest.param({"tail_token_ids": (99,)}, "last tokens differ", id="tail"),
    ],
)
def test_a_wrong_boundary_state_is_data_loss(
    pair: Pair, changes: dict[str, object], said: str
) -> None:
    answer, reservation = pair.reserve(remote())
    boundary = msgspec.structs.replace(pair.source.compute(remote()), **changes)
    pair.source.connector.send(PushPages(reservation, tuple(range(3)), 0))
    pair.source.connector.send(FinishPush(reservation, lambda: boundary))
    pair.rig.run()
    assert answer.failed.code == "DATA_LOSS" and said in answer.failed.message
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages


def test_another_prompt_of_the_same_length_and_end_is_data_loss(pair: Pair) -> None:
    """Its pages arrive whole and its boundary fits: only its digest shows that it is another
    prompt's.
    """
    answer, reservation = pair.reserve(remote())
    other = msgspec.structs.replace(remote(), prompt_token_ids=(19, *PROMPT[1:]))
    pair.source.push(other, reservation)
    pair.rig.run()
    assert (answer.failed.code, answer.failed.retryable) == ("DATA_LOSS", True)
    assert "KV of another prompt" in answer.failed.message
    assert pair.rig.pool.num_free == pair.rig.pool.num_pages


def test_a_dream_handoff_without_its_hidden_vector_is_data_loss(tmp_path: Path) -> None:
    pair = Pair(load_tiny(write_tiny_checkpoint(tmp_path / "model", "dream")))
    answer, reservation = pair.reserve(remote())
    boundary = msgspec.structs.replace(pair.source.compute(remote()), hidden=None)
    pair.source.connector.send(PushPages(reservation, tuple(range(len(reservation.pages))), 0))
    pair.source.connector.send(FinishPush(reservation, lambda: boundary))
    pair.rig.run()
    assert answer.failed.code == "DATA_LOSS" and "got none" in answer.failed.message
    pair.close()


def test_remote_prefill_without_a_connector_is_refused(sdar: Path) -> None:
    answer = Rig(load_tiny(sdar)).start(remote())
    assert answer.failed.code == "FAILED_PRECONDITION"


def test_a_resumed_answer_starts_from_a_handed_over_prompt(pair: Pair) -> None:
    whole, reservation = pair.reserve(remote(max_tokens=24))
    pair.source.push(remote(), reservation)
    pair.rig.run()
    first = whole.commits[0]
    again, reservation = pair.reserve(
        remote(
            "b",
            max_tokens=24,
            resume=messages.Resume(committed_token_ids=first.token_ids, frontier=first.frontier),
        )
    )
    pair.source.push(remote("b"), reservation)
    pair.rig.run()
    rest = [token for commit in again.commits for token in commit.token_ids]
    assert again.commits[0].token_offset == len(first.token_ids)
    assert [*first.token_ids, *rest] == list(whole.token_ids)


def test_waiting_for_pages_holds_back_the_reservation_not_the_answer(sdar: Path) -> None:
    pair = Pair(load_tiny(sdar), num_pages=8, page_size=4)
    prompt = tuple(range(20, 37))
    requests = [
        make_request(name, prompt, writer=SOURCE, max_tokens=16, stop_token_ids=()) for name in "ab"
    ]
    for request in requests:
        pair.rig.engine.handle(request)
    pair.rig.step()
    load = pair.rig.engine.load()
    assert (load.running, load.waiting, load.runnable) == (1, 1, 0)
    pair.serve([])
    (reserved,) = pair.rig.answers["transfer-a"].events
    assert isinstance(reserved, messages.Reserved)
    pair.source.push(requests[0], reserved.reservation)
    while "transfer-b" not in pair.rig.answers:
        assert pair.rig.step()
    (reserved,) = pair.rig.answers["transfer-b"].events
    assert isinstance(reserved, messages.Reserved)
    pair.source.push(requests[1], reserved.reservation)
    pair.rig.run()
    assert [answer.finished.num_tokens for answer in pair.rig.answers.values()] == [16, 16]
    pair.close()
