"""A decode engine whose forwards are several at a time, each of other requests."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import write_tiny_checkpoint
from decode_worker.test_engine_storm import Storm, survive
from decoding.engines import Rig, load_tiny, make_request, random_requests
from decoding.staged import StagedRig, Stages

from effuse.decode_worker.build import denoises_on_device
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.room import Launch, Room
from effuse.kvtransfer.messages import PageRef
from effuse.models.transformer import Transformer
from effuse.worker.config import DecodeConfig
from effuse.worker.messages import Abort, AbortDone, StartDecode


class ThreeStages(StagedRig):
    count = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_tiny(write_tiny_checkpoint(tmp_path_factory.mktemp("m") / "model", "sdar", seed=3))


def answered(rig: Rig, requests: list[StartDecode]) -> list[tuple[int, ...]]:
    answers = [rig.start(request) for request in requests]
    rig.run()
    assert rig.pool.num_free == rig.pool.num_pages
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("kind", [StagedRig, ThreeStages])
@pytest.mark.parametrize("num_pages", [256, 20])
def test_answers_are_those_of_one_forward_at_a_time(
    model: Transformer, kind: type[StagedRig], num_pages: int
) -> None:
    requests = random_requests(8, "d2f", block_size=4, seed=5, sampled=True)
    expected = answered(Rig(model, num_pages=num_pages), requests)
    rig = kind(model, num_pages=num_pages)
    assert answered(rig, requests) == expected
    assert (rig.engine.counters.preemptions > 0) == (num_pages == 20)


def test_stages_compute_at_the_same_time(model: Transformer) -> None:
    """While the last stage ends a forward, the first one has the next one, of other requests."""
    rig = ThreeStages(model)
    prompts = [[20 + at] * 8 for at in range(6)]
    requests = [make_request(str(at), prompt, max_tokens=24) for at, prompt in enumerate(prompts)]
    answered(rig, requests)
    stages, under_way = rig.stages, rig.stages.under_way()
    assert max(map(len, under_way)) == 3
    ends = [at for at, (kind, _) in enumerate(stages.events) if kind == "end"]
    busy = [at for at in ends if len(under_way[at]) == 2]  # two others go on
    assert len(busy) > len(ends) // 2
    for numbers in under_way:
        pages = [set(part.pages) for number in numbers for part in stages.parts[number]]
        assert sum(map(len, pages)) == len(set().union(*pages)), "no request is in two of them"
    assert {len(stages.parts[number]) for number in range(1, 6)} == {2}, "a third of six requests"


def test_one_request_has_one_forward_at_a_time(model: Transformer) -> None:
    rig = StagedRig(model)
    answered(rig, [make_request("a", [30] * 9, max_tokens=16)])
    assert max(map(len, rig.stages.under_way())) == 1
    assert not rig.engine.is_working()


def test_an_aborted_request_frees_its_pages_once_its_forward_has_ended(model: Transformer) -> None:
    rig = StagedRig(model)
    requests = [make_request(name, [30] * 9, max_tokens=32) for name in "abcd"]
    expected = answered(Rig(model), requests[1:])
    answers = [rig.start(request) for request in requests]
    while len(rig.stages.events) < 9:
        rig.step()
    assert rig.engine.is_working(), "a forward is under way"
    rig.engine.handle(Abort(attempt=requests[0].attempt))
    rig.run()
    assert [answer.token_ids for answer in answers[1:]] == expected
    assert rig.pool.num_free == rig.pool.num_pages


def test_an_aborted_request_gets_no_result_of_the_forward_that_was_under_way(
    model: Transformer,
) -> None:
    """Whatever it would be: of its prompt, of a step, or the last one."""
    moments = 0
    for steps in range(1, 30):
        rig = StagedRig(model)
        requests = [make_request(name, [30] * 9, max_tokens=12) for name in "ab"]
        answer, _ = [rig.start(request) for request in requests]
        for _ in range(steps):
            rig.step()
        running = {one.transfer_id: one for one in rig.engine.roster.running}
        own = running.get(requests[0].attempt.transfer_id)
        if own is None or not rig.engine._executor.is_under_way(own):
            continue
        moments, before = moments + 1, len(answer.events)
        rig.engine.handle(Abort(attempt=requests[0].attempt))
        rig.run()
        assert list(map(type, answer.events[before:])) == [AbortDone]
        assert rig.pool.num_free == rig.pool.num_pages
    assert moments > 4


class LateWork:
    """Work of a device that ends once the host waits for it."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class LateRig(StagedRig):
    """A device writes a forward's pages after its results were read."""

    def make_executor(self) -> Executor:
        self.work: list[LateWork] = []

        def place() -> LateWork:
            self.work.append(LateWork())
            return self.work[-1]

        self.stages = Stages(self.forward, self.count)
        return Executor(self.forward, self.memory.copy_page, place, pipeline=self.stages)


def test_pages_of_an_aborted_prompt_are_free_once_the_device_has_written_them(
    model: Transformer,
) -> None:
    """Its forward is only read because it was aborted, and then still runs on the device."""
    rig = LateRig(model)
    request = make_request("a", [30] * 9, max_tokens=8)
    rig.start(request)
    rig.step()
    assert rig.stages.under_way()[-1] == [0] and not rig.work
    rig.engine.handle(Abort(attempt=request.attempt))
    assert rig.pool.num_free == rig.pool.num_pages
    assert rig.work and all(one.is_over for one in rig.work)


@pytest.mark.parametrize("page", [3, 4])
def test_copied_pages_are_free_once_the_first_stage_has_copied(
    model: Transformer, page: int
) -> None:
    """It copies behind forwards that have begun, and a writer of a free page does not wait."""
    rig = StagedRig(model)
    rig.start(make_request("a", [30] * 9, max_tokens=8))
    rig.step()
    executor = rig.engine._executor
    assert rig.stages.under_way()[-1] == [0]
    executor.copy_page(3, 4)
    other, third = (Mock(transfer_id="t", page_ids=[one]) for one in (page, 5))
    assert executor.remove(other) and not executor.remove(third)
    own = rig.engine.roster.running[0]
    own.pages = [*own.pages, PageRef(page_id=page, generation=1)]
    assert executor.remove(own) and executor._begun[0].removed == {own.transfer_id}
    rig.engine.apply(waits=True)
    assert not executor.remove(other)


def test_every_attempt_of_a_storm_ends_once_and_every_page_is_free(model: Transformer) -> None:
    storm = Storm(model, 0, ThreeStages)
    assert len(survive(storm)) == 50
    assert isinstance(storm.rig, ThreeStages)
    assert max(map(len, storm.rig.stages.under_way())) == 3


def test_results_are_read_only_if_no_forward_can_begin(tmp_path: Path) -> None:
    rig = StagedRig(load_tiny(write_tiny_checkpoint(tmp_path, "sdar", seed=3)))
    executor: Executor = rig.make_executor()
    assert not executor.has_results() and not executor.is_running
    assert not executor.launch([]) and not executor.has_results(), "there is nothing to wait for"


def test_a_step_of_a_pipeline_takes_from_its_own_launch() -> None:
    """Another one ends meanwhile, but the step's own requests have waited for all of it."""
    for overlaps, seconds in ((False, 0.2), (True, 0.4)):
        room = Room(4096, overlaps=overlaps)
        room._launched += [Launch(0.0, 4, 0), Launch(0.1, 1, 0)]
        room.end(1, 0.3)
        room.end(2, 0.5)
        assert room.times.step_s(1) == pytest.approx(seconds)


def test_only_a_whole_model_has_slots_on_its_device() -> None:
    device = torch.device("cuda")
    assert denoises_on_device(DecodeConfig(), device)
    assert not denoises_on_device(DecodeConfig(pipeline_parallel_size=2), device)
    assert not denoises_on_device(DecodeConfig(enforce_eager=True), device)
