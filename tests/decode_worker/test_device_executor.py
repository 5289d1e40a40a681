"""An engine with device slots emits the same events as the host's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, make_request, random_requests
from decoding.torch_step import TorchStep

from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker import device_stepper
from effuse.decode_worker.build import make_executor
from effuse.decode_worker.executor import Executor
from effuse.kernels.values import Candidates, RowSampling
from effuse.kvtransfer.messages import AttemptId
from effuse.models.transformer import Transformer
from effuse.worker import messages
from effuse.worker.messages import Failed, Finished, StartDecode

PROMPT = tuple(range(20, 33))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_tiny(write_tiny_checkpoint(tmp_path_factory.mktemp("x") / "m", "dream", seed=3))


def run(rig: Rig, requests: Sequence[StartDecode]) -> None:
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    assert rig.pool.num_free == rig.pool.num_pages


def asked(algorithm: str, **changes: object) -> list[StartDecode]:
    requests = random_requests(16, algorithm, block_size=4, sampled=True)
    return [msgspec.structs.replace(request, **changes) for request in requests]


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_says_what_the_hosts_engine_says(
    tmp_path: Path, architecture: Architecture, algorithm: str
) -> None:
    """Event by event: reservations, commits with their frontiers, drafts, ends and counts."""
    model = load_tiny(write_tiny_checkpoint(tmp_path / "model", architecture, seed=3))
    requests = asked(algorithm, drafts=True)
    host, device = Rig(model), DeviceRig(model)
    run(host, requests)
    run(device, requests)
    assert device.engine.counters.preemptions == 0
    for name, answer in host.answers.items():
        assert device.answers[name].said == answer.said


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
def test_pages_of_the_distinct_layout_change_no_token(model: Transformer, algorithm: str) -> None:
    requests = asked(algorithm)
    host, device = Rig(model), DeviceRig(model, page_size=16, kv_layout="distinct")
    run(host, requests)
    run(device, requests)
    assert device.layout.kind == "distinct"
    for name, answer in host.answers.items():
        assert device.answers[name].token_ids == answer.token_ids


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
def test_preemption_changes_no_token(model: Transformer, algorithm: str) -> None:
    requests = asked(algorithm, stopping=Stopping(max_tokens=24))
    host = Rig(model)
    device = DeviceRig(model, num_pages=20, page_size=3, budget=48)
    run(host, requests)
    run(device, requests)
    assert device.engine.counters.preemptions >= 3
    for name, answer in host.answers.items():
        assert device.answers[name].token_ids == answer.token_ids
        assert device.answers[name].finished.forward_passes == answer.finished.forward_passes


class Slow:
    """A device whose steps end when a test lets them."""

    def __init__(self, rig: DeviceRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stepper, self.num_ended, self.num_read = rig.stepper, 0, 0
        monkeypatch.setattr(self.stepper, "has_ended", lambda: self.num_read < self.num_ended)
        read = self.stepper.read

        def count() -> object:
            self.num_read += 1
            return read()

        monkeypatch.setattr(self.stepper, "read", count)


def test_while_a_step_runs_newcomers_are_heard_and_nothing_waits(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("a", PROMPT, max_tokens=24)
    alone, rig = Rig(model), DeviceRig(model)
    run(alone, [request])
    slow = Slow(rig, monkeypatch)
    rig.start(request)
    assert rig.step() and rig.step() and rig.step()  # the prompt, then two steps
    assert slow.stepper.num_ahead == 2 and rig.engine.is_working()
    assert not rig.step()  # one runs, one is ahead of it
    newcomer = rig.start(make_request("b", PROMPT[:7]))
    assert rig.step()
    assert [type(event) for event in newcomer.events] == [messages.Reserved]
    assert slow.num_read == 0 and rig.engine.load().running == 2
    while rig.engine.is_working():
        slow.num_ended += 1
        rig.step()
    assert rig.answers["transfer-a"].token_ids == alone.answers["transfer-a"].token_ids
    assert rig.pool.num_free == rig.pool.num_pages


@pytest.mark.parametrize("num_steps", range(1, 12, 2))
def test_an_abort_at_any_step_frees_pages_and_spares_others(
    model: Transformer, num_steps: int
) -> None:
    first, second = make_request("a", PROMPT, max_tokens=24), make_request("b", PROMPT[:7])
    alone, rig = Rig(model), DeviceRig(model)
    run(alone, [second])
    rig.start(first)
    rig.start(second)
    for _ in range(num_steps):
        rig.step()
    rig.engine.handle(messages.Abort(attempt=first.attempt))
    rig.run()
    assert isinstance(rig.answers["transfer-a"].events[-1], messages.AbortDone)
    assert rig.answers["transfer-b"].token_ids == alone.answers["transfer-b"].token_ids
    assert rig.pool.num_free == rig.pool.num_pages


def test_nan_fails_only_its_own_request(model: Transformer) -> None:
    def poison(candidates: Candidates, sampling: RowSampling) -> Candidates:
        bad = sampling.seed[: len(candidates.token)] == 77
        return replace(candidates, confidence=candidates.confidence.masked_fill(bad, torch.nan))

    rig = DeviceRig(model)
    rig.adjust = poison
    rig.connect(None)
    healthy = rig.start(make_request("a", PROMPT, stop_token_ids=()))
    sick = rig.start(make_request("b", PROMPT, sampling=Sampling(seed=77)))
    rig.run()
    assert (sick.failed.code, sick.failed.retryable) == ("INTERNAL", False)
    assert healthy.finished.num_tokens == 16
    assert rig.pool.num_free == rig.pool.num_pages


def test_a_failing_step_fails_its_requests_and_the_engine_lives_on(model: Transformer) -> None:
    broken = [False]

    def breaks(candidates: Candidates, sampling: RowSampling) -> Candidates:
        if broken[0]:
            raise RuntimeError("secret: address 0xdeadbeef")
        return candidates

    rig = DeviceRig(model)
    rig.adjust = breaks
    rig.connect(None)
    first = rig.start(make_request("a", PROMPT))
    rig.step()
    broken[0] = True
    rig.step()
    assert (first.failed.code, first.failed.retryable) == ("INTERNAL", True)
    assert "secret" not in first.failed.message
    assert not rig.engine.room._launched
    broken[0] = False
    again = rig.start(make_request("b", PROMPT, stop_token_ids=()))
    rig.run()
    assert again.finished.num_tokens == 16
    assert rig.pool.num_free == rig.pool.num_pages


def test_a_lost_device_ends_the_process_after_some_failures(model: Transformer) -> None:
    """Prompts between them are prefilled well, because each kind counts its failures separately."""

    def breaks(candidates: Candidates, sampling: RowSampling) -> Candidates:
        raise RuntimeError("lost")

    rig = DeviceRig(model)
    rig.adjust = breaks
    rig.connect(None)
    for index in range(7):
        failing = rig.start(make_request(str(index), PROMPT))
        rig.run()
        assert failing.failed.code == "INTERNAL"
    rig.start(make_request("last", PROMPT))
    with pytest.raises(RuntimeError, match="lost"):
        rig.run()


def test_slots_have_room_for_what_the_limits_allow(model: Transformer) -> None:
    """Limits above the default make the slots larger, on the device as on the host."""
    stops = tuple(range(200, 217))
    requests = [
        make_request("wide", PROMPT, max_tokens=60, stop_token_ids=(), window=9),
        make_request("narrow", PROMPT[:7], max_tokens=40, stop_token_ids=()),
        make_request("stops", PROMPT[:9], max_tokens=40, stop_token_ids=stops),
    ]
    host = Rig(model, max_window=9, max_stop_ids=17)
    device = DeviceRig(model, max_window=9, max_stop_ids=17)
    small = DeviceRig(model, max_window=9, max_stop_ids=17, num_pages=20, page_size=4)
    for rig in (host, device, small):
        run(rig, requests)
    for name, answer in host.answers.items():
        assert device.answers[name].token_ids == answer.token_ids
        assert small.answers[name].token_ids == answer.token_ids
    assert small.engine.counters.preemptions > 0


def test_a_resumed_answer_goes_on_with_the_same_tokens(model: Transformer) -> None:
    """From every commit of every request: its frontier is all that another device needs."""
    rig, resumed = DeviceRig(model), 0
    requests = asked("d2f", stopping=Stopping(max_tokens=24))
    run(rig, requests)
    for request in requests:
        answer = rig.answers[request.attempt.transfer_id]
        for number, commit in enumerate(answer.commits[:-1]):
            given = answer.token_ids[: commit.token_offset + len(commit.token_ids)]
            name = f"{request.attempt.transfer_id}-{number}"
            again = rig.start(
                msgspec.structs.replace(
                    request,
                    attempt=AttemptId(name, 2, name),
                    resume=messages.Resume(committed_token_ids=given, frontier=commit.frontier),
                )
            )
            rig.run()
            rest = [token for commit in again.commits for token in commit.token_ids]
            assert (*given, *rest) == answer.token_ids
            resumed += 1
    assert resumed > 20


def test_of_attempts_that_are_late_together_one_may_end_by_itself(model: Transformer) -> None:
    """Giving one up reads the step that is ahead, which may hold the end of the other."""
    ends = set()
    for steps in range(1, 12):
        rig = DeviceRig(model, max_request_s=50.0)
        rig.start(make_request("a", PROMPT, max_tokens=64, stop_token_ids=()))
        other = rig.start(make_request("b", PROMPT, max_tokens=8, stop_token_ids=()))
        for _ in range(steps):
            rig.step()
        rig.clock.now = 50.5
        rig.run()
        last = [event for event in other.events if isinstance(event, Failed | Finished)]
        ends.add((len(last), type(last[0]), rig.answers["transfer-a"].failed.code))
        assert rig.pool.num_free == rig.pool.num_pages
    assert ends == {(1, kind, "DEADLINE_EXCEEDED") for kind in (Failed, Finished)}


@pytest.mark.parametrize("on_device", [False, True])
def test_either_executor_runs_over_the_same_parts(
    model: Transformer, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_stepper, "DeviceStep", TorchStep)

    class MadeRig(Rig):
        def make_executor(self) -> Executor:
            parts = (self.memory, self.forward, self.limits)
            return make_executor(model, *parts, on_device=on_device)

    engine = MadeRig(model).engine
    engine.handle(make_request("a", PROMPT))
    assert engine.step() and engine.step()  # the prompt, then a denoise step
    assert engine.is_working() == on_device  # the host has waited for it
