"""Both kinds of work in one engine: shared pages, whose turn it is, and what makes room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from auditing import audit_cache, audit_pool, cached_pages
from checkpoints import write_tiny_checkpoint
from decoding.engines import (
    Answer,
    Clock,
    cache_of,
    fingerprint_of,
    layout_of,
    load_tiny,
    make_request,
    oracle_settings,
    random_requests,
)
from kvtransfer.loopback import Hub, LoopbackConnector
from oracle.decode import decode

from effuse.both_worker.engine import BothEngine, split
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.pages import LayerMarks
from effuse.kvtransfer.connector import Command, PushPages
from effuse.kvtransfer.ends import HandoffReceiver, HandoffSender
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import PromptExecutor
from effuse.worker import messages
from effuse.worker.config import PrefillConfig
from effuse.worker.messages import Abort, PushTo, StartDecode, StartPrefill, WriterGone

PAGE_SIZE, BUDGET = 4, 64


class Both:
    """An engine of both kinds, all of its events, and the order of its forwards."""

    def __init__(
        self, model: Transformer, hub: Hub, clock: Clock, name: str, num_pages: int
    ) -> None:
        config = model.config
        self.name, self._model, self.clock = name, model, clock
        layout = layout_of(model, PAGE_SIZE)
        self.memory, self.pool = PageMemory(layout, num_pages, model.device), PagePool(num_pages)
        self.memory.tensor.fill_(float("nan"))
        fingerprint = fingerprint_of(model, layout)
        self.connector = LoopbackConnector(hub, self.memory, name, fingerprint, clock)
        self.connector.start()
        sending, receiving = split(self.connector)
        self.runner = ModelRunner(
            model,
            self.memory.layer_views(),
            page_size=PAGE_SIZE,
            block_size=config.block_size,
            marks=LayerMarks(config.num_layers, layout.num_groups, model.device),
        )
        limits = DecodeLimits(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=16,
            max_model_len=200,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            block_size=config.block_size,
        )
        identity = Identity(name, fingerprint, layout)
        self.forwards = ""  # one letter for each
        self.cache = cache = cache_of(model, self.pool, PAGE_SIZE)
        self.decode = DecodeEngine(
            Executor(_Noted(self, "d"), self.memory.copy_page),
            self.pool,
            cache,
            Intake(config, limits),
            HandoffReceiver(self.pool, receiving, identity, 10.0),
            Boundary(None, model.dtype, model.device),
            now=clock,
            max_request_s=1000.0,
        )
        sender = HandoffSender(sending, reservation_s=20.0, now=clock)
        self.prefill = PrefillEngine(
            PromptExecutor(_Noted(self, "p"), self.memory, sender, needs_boundary=False, mark=None),
            PrefillConfig(
                max_num_batched_tokens=BUDGET,
                max_num_seqs=16,
                max_model_len=200,
                page_size=PAGE_SIZE,
                max_request_s=1000.0,
            ),
            config,
            self.pool,
            cache,
            sender,
            fingerprint,
            now=clock,
        )
        self.engine = BothEngine(self.decode, self.prefill, receiving, now=clock)
        self.answers: dict[str, Answer] = {}

    def handle(self, message: messages.ToEngine) -> None:
        self.engine.handle(message)
        self.collect()

    def step(self) -> bool:
        moved = self.engine.step()
        self.collect()
        return moved

    def collect(self) -> None:
        for event in self.engine.outbox():
            attempt = (
                event.reservation.attempt if isinstance(event, messages.Reserved) else event.attempt
            )
            self.answers.setdefault(attempt.transfer_id, Answer()).events.append(event)

    def all_of(self, name: str, kind: type[messages.CoreEvent]) -> list[messages.CoreEvent]:
        return self.answers.setdefault(name, Answer()).of(kind)

    def said(self, attempt: AttemptId, kind: type[messages.CoreEvent]) -> bool:
        return bool(self.all_of(attempt.transfer_id, kind))

    def check_idle(self) -> None:
        """Every page is free or only in the cache."""
        audit_cache(self.cache)
        audit_pool(self.pool, cached_pages(self.cache))
        load = self.engine.load()
        assert (load.running, load.waiting, load.free_pages) == (0, 0, load.total_pages)


class _Noted:
    """The runner, with a letter for each forward."""

    def __init__(self, both: Both, letter: str) -> None:
        self._both, self._letter = both, letter
        self.progress = both.runner.progress

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self._both.forwards += self._letter
        return self._both.runner.run(parts)


class Two:
    """Two such engines in one hub, and what a router does between them."""

    def __init__(self, path: Path, num_pages: int) -> None:
        model, self.hub, self.clock = load_tiny(path), Hub(), Clock()
        self.each = [Both(model, self.hub, self.clock, name, num_pages) for name in ("a", "b")]
        self._ways: dict[str, tuple[StartDecode, Both, Both]] = {}  # source and target, by transfer
        self.num_refused = 0  # prompts that gave way

    def start(self, request: StartDecode, source: Both, target: Both) -> None:
        """Begins an answer at `target`, whose prompt `source` computes."""
        if source is target:
            target.handle(request)
            return
        source.handle(start_of(request))
        self.expect(request, source, target)

    def expect(self, request: StartDecode, source: Both, target: Both) -> None:
        """Begins an answer whose prompt `source` has."""
        asked = msgspec.structs.replace(request, writer=source.name)
        self._ways[asked.attempt.transfer_id] = asked, source, target
        target.handle(asked)

    def turn(self) -> bool:
        """A step of each, and the messages between them."""
        moved = [one.step() for one in self.each]
        for name, (request, source, target) in list(self._ways.items()):
            if source.said(request.attempt, messages.Failed):
                self.num_refused += 1
                del self._ways[name]
                target.handle(Abort(attempt=request.attempt))
                target.handle(WriterGone(transfer_id=name, has_drained=True))
                target.handle(again(request))
            elif found := target.all_of(name, messages.Reserved):
                del self._ways[name]
                assert isinstance(found[0], messages.Reserved)
                source.handle(PushTo(reservation=found[0].reservation))
        return any(moved)

    def settle(self) -> None:
        """Runs until nothing moves and nothing waits."""
        for _ in range(5000):
            if self.turn():
                continue
            if not any(one.engine.load().waiting for one in self.each) and not self._ways:
                return
            self.clock.now += 0.1
        raise AssertionError("they never come to rest")


def again(request: StartDecode) -> StartDecode:
    """Another attempt, which computes its prompt itself."""
    attempt = AttemptId(request.attempt.request_id, 2, f"{request.attempt.transfer_id}-2")
    return msgspec.structs.replace(request, attempt=attempt, writer=None)


def start_of(request: StartDecode) -> StartPrefill:
    return StartPrefill(attempt=request.attempt, prompt_token_ids=request.prompt_token_ids)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sdar") / "model", "sdar", seed=3)


@pytest.fixture
def two(sdar: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    made = Two(sdar, getattr(request, "param", 64))
    yield made
    for one in made.each:
        one.engine.close()


def asked_of(name: str, length: int = 16, max_tokens: int = 24) -> StartDecode:
    return make_request(name, range(20, 20 + length), max_tokens=max_tokens, stop_token_ids=())


@pytest.mark.parametrize("two", [24, 128], indirect=True, ids=["few pages", "enough pages"])
def test_own_prompts_and_those_of_the_other_give_the_oracles_answers(two: Two, sdar: Path) -> None:
    drawn = random_requests(24, "block_diffusion", block_size=4, sampled=True, seed=4)
    for number, request in enumerate(drawn):
        first, second = two.each if number % 2 else reversed(two.each)
        is_own = number % 3 == 0 or len(request.prompt_token_ids) < 4
        two.start(request, first if is_own else second, first)
        two.turn()
    two.settle()
    for request in drawn:
        names = (request.attempt.transfer_id, again(request).attempt.transfer_id)
        found = [one.answers[name] for one in two.each for name in names if name in one.answers]
        (answer,) = [one for one in found if one.of(messages.Finished)]
        expected = decode(sdar, request.prompt_token_ids, oracle_settings(request))
        assert answer.token_ids == expected.token_ids
    for one in two.each:
        one.check_idle()
        assert "d" in one.forwards and "p" in one.forwards


def test_two_engines_full_of_prompts_for_each_other_do_not_wait_for_ever(two: Two) -> None:
    """Each one's pages have prompts whose answers wait for pages of the other."""
    first, second = two.each
    ways = [
        (asked_of(f"{source.name}{number}", length=64), source, target)
        for source, target in ((first, second), (second, first))
        for number in range(4)
    ]
    for request, source, _ in ways:
        source.handle(start_of(request))
    for one in two.each:  # all pages are taken before any answer begins
        while one.step():
            pass
        assert one.pool.num_free == 0
    for request, source, target in ways:
        two.expect(request, source, target)
    two.settle()
    assert two.num_refused > 0
    for one in two.each:
        one.check_idle()
        done = [name for name, answer in one.answers.items() if answer.of(messages.Finished)]
        assert len(done) == 4


def test_a_step_of_answers_waits_for_one_forward_over_prompts(two: Two) -> None:
    one, _ = two.each
    for number in range(3):
        one.handle(asked_of(f"answer{number}", max_tokens=64))
    one.step()
    one.forwards = ""
    for number in range(6):  # each of them fills a forward
        attempt = AttemptId(f"p{number}", 1, f"p{number}")
        prompt = tuple(100 + number + at % 50 for at in range(64))
        one.handle(StartPrefill(attempt=attempt, prompt_token_ids=prompt))
        one.clock.now += 0.001
    for _ in range(12):
        one.step()
    assert one.forwards.startswith("dp" * 2), one.forwards
    assert "pp" not in one.forwards.rstrip("p"), one.forwards


def test_without_answers_prompts_wait_for_nothing(two: Two) -> None:
    one, _ = two.each
    for number in range(3):
        attempt = AttemptId(f"p{number}", 1, f"p{number}")
        prompt = tuple(100 + number + at % 50 for at in range(64))
        one.handle(StartPrefill(attempt=attempt, prompt_token_ids=prompt))
    for _ in range(3):
        one.step()
    assert one.forwards == "ppp"


def test_answers_take_the_pages_that_only_the_cache_holds(two: Two) -> None:
    source, target = two.each
    for number in range(4):  # 64 pages of prompts that have ended
        request = asked_of(f"p{number}", length=64, max_tokens=4)
        drawn = tuple(number * 7 + at for at in request.prompt_token_ids)
        two.start(msgspec.structs.replace(request, prompt_token_ids=drawn), source, target)
        two.settle()
    assert source.pool.count(PageState.FREE) == 0
    source.handle(asked_of("own", length=48))
    two.settle()
    assert source.said(AttemptId("request-own", 1, "transfer-own"), messages.Finished)
    source.check_idle()


class Queue:
    """A place in the queue of a device, whose work ends when a test lets it."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("length", [32, 48])  # all of it is known, or its beginning
def test_pages_that_a_device_may_still_write_do_not_leave_before(
    two: Two, monkeypatch: pytest.MonkeyPatch, is_over: bool, length: int
) -> None:
    """An answer's own prompt is known when its forward is launched, which ends later on a GPU."""
    source, target = two.each
    queue, sent = Queue(), list[PushPages]()
    monkeypatch.setattr(source.decode._executor, "_place", lambda: queue)
    send = source.connector.send

    def watch(command: Command) -> None:
        if isinstance(command, PushPages) and command.source_pages:
            sent.append(command)
        send(command)

    monkeypatch.setattr(source.prefill._sender._connector, "send", watch)
    source.handle(asked_of("own", length=32))
    source.decode.step()
    assert source.cache.num_cached == 8
    queue.is_over = is_over
    two.start(asked_of("other", length=length), source, target)
    two.settle()
    assert source.cache.num_found == (28 if length == 32 and not is_over else 32)
    before, after = [True] * is_over, [False] * (length == 48 or not is_over)
    assert [one.num_final is None for one in sent] == before + after
    assert target.said(AttemptId("request-other", 1, "transfer-other"), messages.Finished)


def test_a_prompt_gets_no_pages_before_an_older_answer(two: Two) -> None:
    one, _ = two.each
    one.handle(asked_of("old", length=128, max_tokens=64))
    other = range(147, 19, -1)  # of which nothing is cached
    one.handle(make_request("waits", other, max_tokens=64, stop_token_ids=()))
    one.step()
    assert one.engine.load().waiting == 1
    one.clock.now += 1.0
    attempt = AttemptId("p", 1, "p")
    one.handle(StartPrefill(attempt=attempt, prompt_token_ids=tuple(range(20, 52))))
    one.step()
    assert "p" not in one.forwards, "there is room for it, and the answer was there first"
    while not one.said(AttemptId("request-waits", 1, "transfer-waits"), messages.Finished):
        one.step()
    one.step()
    assert one.said(attempt, messages.PrefillDone)


def test_an_abort_reaches_the_kind_of_work_that_it_is_for(two: Two) -> None:
    one, _ = two.each
    one.handle(asked_of("a", max_tokens=64))
    attempt = AttemptId("p", 1, "p")
    one.handle(StartPrefill(attempt=attempt, prompt_token_ids=tuple(range(20, 52))))
    one.step()
    unknown = AttemptId("never", 1, "never")
    for each in (AttemptId("request-a", 1, "transfer-a"), attempt, unknown):
        one.handle(Abort(attempt=each))
        one.step()
        (done,) = one.answers[each.transfer_id].of(messages.AbortDone)
        assert isinstance(done, messages.AbortDone) and done.was_running is (each is not unknown)
    one.check_idle()
