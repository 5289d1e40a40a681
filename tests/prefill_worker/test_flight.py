"""The engine a forward ahead: what is launched, waited for and handed on, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from prefill_worker.rig import Rig, attempt_of

from effuse.kvtransfer.connector import Cause, PushFailed
from effuse.prefill_worker.flight import Wait, mark_of
from effuse.worker.messages import AbortDone, Failed, PrefillDone, Pushed

PROMPT = [3 + (7 * i) % 200 for i in range(22)]
BLOCK = 4


class Device:
    """Marks that are waited for one by one; says what was launched and what has landed."""

    def __init__(self) -> None:
        self.num_marked = 0
        self.landed: list[int] = []

    def mark(self) -> Wait:
        number = self.num_marked
        self.num_marked += 1
        return lambda: self.landed.append(number)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def rig(tmp_path: Path, device: Device) -> Iterator[Rig]:
    path = write_tiny_checkpoint(tmp_path / "dream", "dream", seed=3, block_size=BLOCK)
    made = Rig(path, budget=24, mark=device.mark)
    yield made
    made.close()


def test_a_forward_is_waited_for_once_the_next_is_launched(rig: Rig, device: Device) -> None:
    for name in "abc":
        rig.start(name, PROMPT)
    for step in (1, 2, 3):
        assert rig.step()
        assert len(rig.forward.ran) == step
        assert device.landed == list(range(step - 1))
        assert len(rig.take(PrefillDone)) == (step > 1)
    assert rig.step()
    assert device.landed == [0, 1, 2]
    assert [done.attempt for done in rig.take(PrefillDone)] == [attempt_of("c")]
    assert not rig.step()


def test_pages_leave_only_after_their_forward_has_landed(rig: Rig, device: Device) -> None:
    for name in "ab":
        rig.push_to(rig.start(name, PROMPT), 6)
    rig.step()
    assert not rig.target_memory.tensor.any()
    rig.settle()
    assert len(rig.take(Pushed)) == len(rig.arrived()) == 2
    rig.take(PrefillDone)
    rig.check_idle()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_hands_over_what_an_engine_that_waits_hands_over(
    tmp_path: Path, architecture: Architecture
) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", architecture, seed=3, block_size=BLOCK)
    seen = []
    for mark in (None, Device().mark):
        rig = Rig(path, budget=24, page_size=16, mark=mark)
        count = 20 if architecture == "sdar" else 22
        for name in "abc":
            rig.push_to(rig.start(name, PROMPT[ord(name) - ord("a") :] + PROMPT[:2]), 2)
        rig.settle()
        arrived = {report.attempt: report for report in rig.arrived()}
        seen.append(
            [
                (
                    rig.kv([p.page_id for p in arrived[attempt_of(n)].pages], count),
                    arrived[attempt_of(n)],
                )
                for n in "abc"
            ]
        )
        rig.take(PrefillDone), rig.take(Pushed)
        rig.check_idle()
        rig.close()
    for (one, before), (other, after) in zip(*seen, strict=True):
        assert torch.equal(one, other)
        assert before.manifest.boundary == after.manifest.boundary


def test_an_abort_is_answered_once_its_forward_has_landed(rig: Rig, device: Device) -> None:
    rig.start("a", PROMPT)
    rig.start("b", PROMPT)
    rig.step()
    rig.abort(attempt_of("a"))
    rig.settle()
    assert rig.take(AbortDone) == [AbortDone(attempt=attempt_of("a"), was_running=True)]
    assert [done.attempt for done in rig.take(PrefillDone)] == [attempt_of("b")]
    assert device.landed == [0, 1]


def test_no_page_is_free_while_a_forward_may_write_it(rig: Rig, device: Device) -> None:
    rig.start("a", PROMPT)
    rig.step()
    rig.abort(attempt_of("a"))
    assert (device.landed, rig.pool.num_free) == ([], rig.pool.num_pages - 6)
    rig.step()
    assert (device.landed, rig.pool.num_free) == ([0], rig.pool.num_pages)


def test_a_push_that_fails_beside_one_that_ends_costs_only_its_own_prompt(rig: Rig) -> None:
    """Both are told of at once, the end first, while one forward still writes for both."""
    for name in "ab":
        rig.push_to(rig.start(name, PROMPT[:11]), 3)
    rig.step()
    rig.abort(attempt_of("a"))
    rig.source._emit(PushFailed("transfer-b", Cause.PEER, "the decode worker died"))
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
        assert len(rig.take(Pushed)) == len(names)
        arrived = {report.attempt: report for report in rig.arrived()}
        reports = [arrived[attempt_of(name)] for name in names]
        handed.append([rig.kv([page.page_id for page in r.pages], count) for r in reports])
        rig.take(PrefillDone)
        rig.check_idle()
        rig.close()
    for one, other in zip(*handed, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)
