"""The engine ahead of a device: launches, ends and handed-on pages, in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from prefill_worker.rig import Rig, attempt_of

from effuse.kvtransfer import push
from effuse.kvtransfer.connector import Cause, PushFailed
from effuse.prefill_worker.executor import IsOver, mark_of
from effuse.worker.messages import AbortDone, Failed, PrefillDone, PromptPushed
from effuse.worker.watchdog import Limits, Progress, observe, verdict

PROMPT = [3 + (7 * i) % 200 for i in range(22)]
BLOCK = 4


class Device:
    """Forwards that end on command, or after a few polls."""

    def __init__(self) -> None:
        self.num_marked = 0
        self.num_ended = 0

    def mark(self) -> IsOver:
        number = self.num_marked
        self.num_marked += 1
        return lambda: number < self.num_ended

    def end(self, count: int = 1) -> None:
        self.num_ended += count


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def rig(tmp_path: Path, device: Device) -> Iterator[Rig]:
    path = write_tiny_checkpoint(tmp_path / "dream", "dream", seed=3, block_size=BLOCK)
    made = Rig(path, budget=24, mark=device.mark)
    yield made
    made.close()


def test_one_forward_is_launched_ahead_and_none_is_waited_for(rig: Rig, device: Device) -> None:
    for name in "abcd":
        rig.start(name, PROMPT)
    assert [rig.step() for _ in range(4)] == [True, True, False, False]
    assert len(rig.forward.ran) == 2 and rig.take(PrefillDone) == []
    for number, name in enumerate("abcd"):
        device.end()
        rig.settle()
        assert len(rig.forward.ran) == min(4, number + 3)
        assert [done.attempt for done in rig.take(PrefillDone)] == [attempt_of(name)]


def test_messages_are_heard_while_a_forward_runs(rig: Rig, device: Device) -> None:
    rig.start("a", PROMPT)
    rig.settle()
    rig.start("b", [5] * 200)
    rig.settle()
    assert [failed.attempt for failed in rig.take(Failed)] == [attempt_of("b")]
    assert rig.take(PrefillDone) == []


class Layers:
    """Replaces the marks of a device: groups of layers are stored when a test lets them."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_stored = 0
        monkeypatch.setattr(rig.forward, "progress", lambda: lambda: self.num_stored)


def test_layers_leave_while_later_ones_are_computed(
    rig: Rig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "LEAST_BYTES", 1)
    layers = Layers(rig, monkeypatch)
    reservation = rig.push_to(rig.start("a", PROMPT), 6)
    rig.settle()
    pages = [page.page_id for page in reservation.pages]
    assert not rig.target_memory.tensor.any()
    layers.num_stored = 1
    rig.settle()
    first = rig.target_memory.tensor[pages]
    assert first[:, 0].any() and not first[:, 1:].any()
    layers.num_stored = rig.layout.num_groups
    rig.settle()
    assert torch.equal(rig.target_memory.tensor[pages][:, 0], first[:, 0])
    assert rig.target_memory.tensor[pages][:, -1].any()
    assert rig.take(PromptPushed) == []  # the boundary is not there yet
    device.end()
    rig.settle()
    assert len(rig.take(PromptPushed)) == len(rig.take(PrefillDone)) == len(rig.arrived()) == 1
    rig.check_idle()


def test_a_forward_that_goes_on_is_not_taken_for_hung_however_long_it_takes(
    rig: Rig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(rig, monkeypatch)
    limits = Limits(startup_s=60.0, serving_s=1.0)
    progress = replace(Progress.begin(rig.time), is_ready=True, phase="serving")
    rig.start("a", PROMPT)
    for seconds in (0.0, 1.2, 1.2, 1.2, 1.2, 13.0):
        assert verdict(progress, rig.time, limits) is None
        rig.time += seconds
        rig.step()
        beat = rig.pulse.turn(rig.engine.load(), has_end=False)
        for told in (*rig.beats, *([beat] if beat else [])):
            progress = observe(progress, told, rig.time)
        rig.beats.clear()
        layers.num_stored += rig.time < 1004.0
    assert "made no step" in (verdict(progress, rig.time, limits) or "it goes on")


def test_few_bytes_leave_in_one_piece(
    rig: Rig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(rig, monkeypatch)
    rig.push_to(rig.start("a", PROMPT), 6)
    layers.num_stored = rig.layout.num_groups - 1
    rig.settle()
    assert not rig.target_memory.tensor.any()
    layers.num_stored += 1
    device.end()
    rig.settle()
    assert len(rig.arrived()) == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_hands_over_what_an_engine_that_waits_hands_over(
    tmp_path: Path, architecture: Architecture
) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", architecture, seed=3, block_size=BLOCK)
    seen = []
    for device in (None, Device()):
        rig = Rig(path, budget=24, page_size=16, mark=device.mark if device else None)
        count = 20 if architecture == "sdar" else 22
        for name in "abc":
            rig.push_to(rig.start(name, PROMPT[ord(name) - ord("a") :] + PROMPT[:2]), 2)
        for _ in "abc":
            rig.settle()
            if device:
                device.end()
        rig.settle()
        arrived = {report.manifest.attempt: report for report in rig.arrived()}
        seen.append(
            [(rig.handed(arrived[attempt_of(n)], count), arrived[attempt_of(n)]) for n in "abc"]
        )
        rig.take(PrefillDone), rig.take(PromptPushed)
        rig.check_idle()
        rig.close()
    for (one, before), (other, after) in zip(*seen, strict=True):
        assert torch.equal(one, other)
        assert before.manifest.boundary == after.manifest.boundary


def test_an_abort_is_answered_once_its_forward_has_landed(rig: Rig, device: Device) -> None:
    rig.start("a", PROMPT)
    rig.start("b", PROMPT)
    rig.settle()
    rig.abort(attempt_of("a"))
    rig.settle()
    assert rig.take(AbortDone) == []
    device.end(2)
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of("a"), was_running=True)]
    assert [done.attempt for done in rig.take(PrefillDone)] == [attempt_of("b")]


def test_no_page_is_free_while_a_forward_may_write_it(rig: Rig, device: Device) -> None:
    rig.start("a", PROMPT)
    rig.step()
    rig.abort(attempt_of("a"))
    rig.settle()
    assert rig.engine.load().free_pages == rig.pool.num_pages - 6
    device.end()
    rig.settle()
    assert rig.engine.load().free_pages == rig.pool.num_pages


def test_a_push_that_fails_beside_one_that_ends_costs_only_its_own_prompt(
    rig: Rig, device: Device
) -> None:
    """Both events arrive together, the end first, while one forward still writes for both."""
    for name in "ab":
        rig.push_to(rig.start(name, PROMPT[:11]), 3)
    rig.step()
    rig.abort(attempt_of("a"))
    rig.source.emit(PushFailed("transfer-b", Cause.PEER, "the decode worker died"))
    rig.settle()
    assert rig.take(AbortDone) == []
    device.end()
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of("a"), was_running=True)]
    (failed,) = rig.take(Failed)
    assert (failed.attempt, failed.code) == (attempt_of("b"), "UNAVAILABLE")
    assert rig.take(PrefillDone) == []
    rig.check_idle()


def test_the_cpu_needs_no_mark() -> None:
    assert mark_of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_device_ahead_of_its_host_hands_over_what_the_cpu_does(
    tmp_path: Path, architecture: Architecture
) -> None:
    sizes = TinySizes(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=sizes, block_size=BLOCK)
    names, count = "abcdef", 20 if architecture == "sdar" else 22
    handed: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        mark = mark_of(torch.device(device))
        rig = Rig(path, budget=24, page_size=16, mark=mark, device=device)
        for shift, name in enumerate(names):
            rig.push_to(rig.start(name, PROMPT[shift:] + PROMPT[:shift]), 2)
        rig.settle()
        assert len(rig.take(PromptPushed)) == len(names)
        arrived = {report.manifest.attempt: report for report in rig.arrived()}
        reports = [arrived[attempt_of(name)] for name in names]
        handed.append([rig.handed(report, count) for report in reports])
        rig.take(PrefillDone)
        rig.check_idle()
        rig.close()
    for one, other in zip(*handed, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


def test_pages_of_a_failed_forward_are_free_once_its_queued_layers_have_ended(
    tmp_path: Path, device: Device
) -> None:
    """Until then the layers might write what another request stores there; no request finds it."""
    path = write_tiny_checkpoint(tmp_path / "sdar", "sdar", seed=3, block_size=BLOCK)
    made = Rig(path, mark=device.mark)
    with contextlib.closing(made):
        made.forward.fails = 1
        made.start("a", PROMPT)
        made.settle()
        assert [failed.attempt for failed in made.take(Failed)] == [attempt_of("a")]
        made.time += 1.0
        assert made.pool.num_free == made.pool.num_pages - len(PROMPT) // BLOCK
        device.end()
        made.settle()
        assert made.pool.num_free == made.pool.num_pages
        assert not made.engine.num_tokens
        assert not made.engine.table.computing_rate.seconds(len(PROMPT)), "nothing was computed"
        made.start("b", PROMPT)
        device.end()
        made.settle()
        assert [done.cached_tokens for done in made.take(PrefillDone)] == [0]
