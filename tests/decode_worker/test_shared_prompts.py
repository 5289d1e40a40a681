"""Answers to one request: the prompt's KV comes once, and an ending one takes nothing from
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from checkpoints import write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import INCARNATION, Rig, load_tiny, make_request, oracle_settings
from decoding.source import SOURCE, Source
from kvtransfer.loopback import Hub, LoopbackConnector
from oracle.decode import decode

from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker.request import DecodeRequest
from effuse.kvtransfer.pool import PageState
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker import messages
from effuse.worker.messages import Abort, StartDecode, WriterGone

PROMPT = tuple(range(20, 33))
GONE = WriterGone(transfer_id="transfer-0", has_drained=True)


class CountingRunner:
    """Runs forwards, and counts what of prompts and settled text is computed in them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.prompt_rows = 0
        self.prompts = 0  # that were begun

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        prefills = [part for part in parts if not part.candidates]
        self.prompt_rows += sum(len(part.token_ids) for part in prefills)
        self.prompts += sum(part.start == 0 for part in prefills)
        return self.runner.run(parts)


class Answers:
    """An engine with a writer beside it, and requests for answers to one prompt."""

    def __init__(self, directory: Path, kind: type[Rig] = Rig, **limits: int) -> None:
        self.directory = directory
        model = load_tiny(directory)
        self.rig = kind(model, **({"page_size": 3} | limits))  # type: ignore[arg-type]
        assert isinstance(self.rig.forward, ModelRunner)
        self.forward = self.rig.forward = CountingRunner(self.rig.forward)
        hub = Hub(is_two_sided=False)
        self.target = LoopbackConnector(
            hub, self.rig.memory, INCARNATION, self.rig.fingerprint, self.rig.clock
        )
        self.target.start()
        self.rig.connect(self.target)
        self.source = Source(model, hub, self.rig.clock, page_size=self.rig.limits.page_size)
        self.asked: list[StartDecode] = []

    def ask(self, count: int, *, is_remote: bool = True, max_tokens: int = 24) -> None:
        """Asks for so many answers; the first one's prompt comes from a writer, or from nowhere."""
        for index in range(count):
            request = make_request(
                str(index),
                PROMPT,
                max_tokens=max_tokens,
                writer=SOURCE if is_remote and index == 0 else None,
                group="g",
                sampling=Sampling(temperature=1.0, seed=7, answer_index=index),
            )
            self.asked.append(request)
            self.rig.start(request)

    def push(self) -> None:
        """The first one's prompt arrives."""
        self.rig.step()
        (reserved,) = self.rig.answers["transfer-0"].events
        assert isinstance(reserved, messages.Reserved)
        self.source.push(self.asked[0], reserved.reservation)

    def abort(self, index: int) -> None:
        self.rig.engine.handle(Abort(attempt=self.asked[index].attempt))

    def check(self, *but: int) -> None:
        """Runs to the end: every answer but these is the oracle's, and no page is left."""
        self.rig.run()
        for index, request in enumerate(self.asked):
            if index not in but:
                told = self.rig.answers[request.attempt.transfer_id].token_ids
                prompt, settings = request.prompt_token_ids, oracle_settings(request)
                assert told == decode(self.directory, prompt, settings).token_ids
        assert self.rig.pool.num_free == self.rig.pool.num_pages

    @property
    def num_shared(self) -> int:
        return self.rig.engine.counters.prompts_shared

    def close(self) -> None:
        self.target.close()
        self.source.connector.close()


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sdar") / "model", "sdar", seed=3)


@pytest.fixture(params=[Rig, DeviceRig], ids=["host", "device"])
def answers(sdar: Path, request: pytest.FixtureRequest) -> Iterator[Answers]:
    made = Answers(sdar, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [Rig, DeviceRig], ids=["host", "device"])
@pytest.mark.parametrize("architecture", ["sdar", "dream", "llada"])
def test_answers_are_those_of_single_requests_and_the_prompt_comes_once(
    architecture: str, kind: type[Rig], tmp_path: Path
) -> None:
    """Pages of 3 tokens: prompt and answer touch one page of each architecture."""
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=5)  # type: ignore[arg-type]
    answers = Answers(directory, kind)
    answers.ask(4)
    answers.push()
    answers.check()
    told = {answers.rig.answers[one.attempt.transfer_id].token_ids for one in answers.asked}
    assert len(told) == 4, "each answer draws for itself"
    start = answers.rig.model.config.block_origin(len(PROMPT)) or len(PROMPT) // 4 * 4
    pages = -(-start // 3)
    assert answers.rig.engine.counters.kv_bytes == pages * answers.rig.layout.page_bytes
    assert (answers.forward.prompt_rows, answers.num_shared) == (0, 3)
    answers.close()


def test_whoever_prefills_for_itself_does_it_for_all(answers: Answers) -> None:
    answers.ask(3, is_remote=False)
    answers.check()
    assert (answers.forward.prompt_rows, answers.num_shared) == (12, 2)


def test_shared_pages_count_once(answers: Answers) -> None:
    """12 tokens are stored before the first block: four whole pages, which all share."""
    answers.ask(4)
    answers.push()
    while answers.num_shared < 3:
        answers.rig.step()
    held = answers.rig.pool.count(PageState.COMMITTED)
    assert held < 4 * 4 and answers.rig.engine.load().running == 4
    answers.check()


def test_others_wait_for_the_prompt_and_let_strangers_pass(answers: Answers) -> None:
    answers.ask(2)
    answers.rig.run()
    stranger = answers.rig.start(make_request("stranger", PROMPT, max_tokens=4))
    answers.rig.run()
    assert stranger.finished.num_tokens > 0
    assert answers.rig.answers["transfer-1"].events == [], "it holds nothing yet"
    assert answers.rig.engine.load().waiting == 1
    answers.push()
    answers.check()


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "writer-gone"])
def test_where_the_handoff_fails_one_of_the_others_prefills(
    answers: Answers, is_aborted: bool
) -> None:
    answers.ask(4)
    answers.rig.run()
    if is_aborted:
        answers.abort(0)
    answers.rig.engine.handle(GONE)
    answers.check(0)
    assert (answers.forward.prompt_rows, answers.num_shared) == (12, 2)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_whoever_is_cancelled_takes_nothing_from_others(
    sdar: Path, order: tuple[int, ...], steps: int
) -> None:
    """All but the last one of an order are cancelled, some steps apart."""
    answers = Answers(sdar)
    answers.ask(3)
    answers.push()
    answers.rig.step()
    for index in order[:2]:
        for _ in range(steps):
            answers.rig.step()
        answers.abort(index)
    answers.check(*order[:2])
    answers.close()


@pytest.mark.parametrize("kind", [Rig, DeviceRig], ids=["host", "device"])
@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_who_is_preempted_takes_the_prompt_from_another_one_again(
    architecture: str, kind: type[Rig], tmp_path: Path
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=5)  # type: ignore[arg-type]
    answers = Answers(directory, kind, num_pages=18, budget=64, caches=False)
    answers.ask(4, max_tokens=32)
    answers.push()
    answers.check()
    again = answers.num_shared - 3
    assert again > 0
    assert answers.forward.prompts == answers.rig.engine.counters.preemptions - again
    answers.close()


def test_where_all_are_preempted_one_computes_the_prompt_again(sdar: Path) -> None:
    answers = Answers(sdar, num_pages=17)
    older = make_request("older", PROMPT[::-1], max_tokens=36, stop_token_ids=())
    answers.rig.start(older)
    answers.ask(2, is_remote=False)
    answers.check()
    assert answers.rig.engine.counters.preemptions >= 2
    assert answers.forward.prompts == 3 and answers.num_shared == 2
    answers.close()


def test_another_prompt_under_the_same_name_is_not_shared(answers: Answers) -> None:
    """The name of a group comes from outside."""
    answers.ask(1)
    other = make_request("other", PROMPT[::-1], max_tokens=24, group="g")
    answers.asked.append(other)
    answers.rig.start(other)
    answers.push()
    answers.check()
    assert (answers.forward.prompt_rows, answers.num_shared) == (12, 0)


def test_an_answer_that_is_resumed_shares_the_prompt_alone(answers: Answers) -> None:
    """Its text that is final was never in another one's pages."""
    answers.ask(3, is_remote=False)
    answers.rig.run()
    whole = [answers.rig.answers[one.attempt.transfer_id] for one in answers.asked]
    commit = whole[2].commits[0]
    assert commit.frontier, "the answer is longer than a commit"
    resumed = msgspec.structs.replace(
        answers.asked[2],
        attempt=msgspec.structs.replace(answers.asked[2].attempt, transfer_id="again"),
        resume=messages.Resume(committed_token_ids=commit.token_ids, frontier=commit.frontier),
    )
    first = msgspec.structs.replace(
        answers.asked[0],
        attempt=msgspec.structs.replace(answers.asked[0].attempt, transfer_id="first"),
        stopping=Stopping(max_tokens=48),
    )
    rows = answers.forward.prompt_rows
    answers.rig.start(first)
    answers.rig.step()
    told = answers.rig.start(resumed)
    answers.rig.run()
    later = tuple(token for one in told.commits for token in one.token_ids)
    assert commit.token_ids + later == whole[2].token_ids
    assert answers.num_shared == 3
    # The cache has the prompt, and the settled block goes beside it in no whole unit.
    assert answers.forward.prompt_rows == rows + 4


@pytest.mark.parametrize("kind", [Rig, DeviceRig], ids=["host", "device"])
def test_who_comes_late_goes_on_from_the_prompts_end(kind: type[Rig], tmp_path: Path) -> None:
    """A model that shifts its logits: the vector there is another one than where the first is."""
    directory = write_tiny_checkpoint(tmp_path / "model", "dream", seed=5)
    answers = Answers(directory, kind)
    answers.ask(1, max_tokens=48)
    answers.push()
    while len(answers.rig.answers["transfer-0"].commits) < 3:
        answers.rig.step()
    late = make_request(
        "late",
        PROMPT,
        max_tokens=24,
        group="g",
        sampling=Sampling(temperature=1.0, seed=7, answer_index=1),
    )
    answers.asked.append(late)
    answers.rig.start(late)
    answers.check()
    assert (answers.forward.prompts, answers.num_shared) == (0, 1)
    answers.close()


def test_who_was_resumed_knows_no_vector_behind_the_prompt(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", "dream", seed=5)
    answers = Answers(directory, caches=False)
    answers.ask(1, is_remote=False, max_tokens=48)
    answers.rig.run()
    commit = answers.rig.answers["transfer-0"].commits[1]
    whole = answers.rig.answers["transfer-0"].token_ids
    again = msgspec.structs.replace(
        answers.asked[0],
        attempt=msgspec.structs.replace(answers.asked[0].attempt, transfer_id="again"),
        resume=messages.Resume(
            committed_token_ids=whole[: commit.token_offset + len(commit.token_ids)],
            frontier=commit.frontier,
        ),
    )
    answers.rig.start(again)
    answers.rig.step()
    other = make_request("other", PROMPT, max_tokens=24, group="g")
    answers.asked.append(other)
    answers.rig.start(other)
    answers.check()
    assert (answers.forward.prompts, answers.num_shared) == (3, 0)
    answers.close()


@pytest.mark.parametrize(
    ("temperature", "remasking"), [(0.0, "random"), (1.0, "low_confidence")], ids=["lot", "draw"]
)
def test_canvases_share_nothing_and_draw_for_themselves(
    temperature: float, remasking: str, tmp_path: Path
) -> None:
    """By lot masks are chosen, or tokens drawn; either way by each answer for itself."""
    directory = write_tiny_checkpoint(tmp_path / "model", "llada", seed=5)
    told = []
    for name, index, group in (("a", 0, ""), ("b", 0, "g"), ("c", 1, "g"), ("d", 1, "")):
        answers = Answers(directory)
        sampling = Sampling(temperature=temperature, seed=7, answer_index=index)
        request = make_request(
            name,
            PROMPT,
            algorithm="llada",
            remasking=remasking,
            block_length=16,
            group=group,
            sampling=sampling,
        )
        other = msgspec.structs.replace(
            request, attempt=msgspec.structs.replace(request.attempt, transfer_id="other")
        )
        answers.rig.start(request)
        answers.rig.start(other)
        answers.rig.run()
        assert answers.num_shared == 0
        told.append(answers.rig.answers[request.attempt.transfer_id].token_ids)
        assert told[-1] == answers.rig.answers["other"].token_ids
        answers.close()
    assert told[0] == told[1] != told[2] == told[3]


def test_requests_without_a_group_share_nothing(answers: Answers) -> None:
    for name in ("a", "b"):
        answers.rig.start(make_request(name, PROMPT))
    answers.rig.run()
    assert (answers.forward.prompt_rows, answers.num_shared) == (24, 0)


def test_answers_that_wait_for_their_prompt_are_not_compared_with_each_other(
    sdar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be done at every step of whatever runs beside them."""
    num_looked, holds_prompt = 0, vars(DecodeRequest)["holds_prompt"]

    def look(request: DecodeRequest) -> object:
        nonlocal num_looked
        num_looked += 1
        return holds_prompt.fget(request)

    answers = Answers(sdar, max_num_seqs=64)
    answers.ask(64)
    answers.rig.step()
    monkeypatch.setattr(DecodeRequest, "holds_prompt", property(look))
    answers.rig.step()
    answers.close()
    assert 64 <= num_looked <= 2 * 64
