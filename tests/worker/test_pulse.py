"""What an engine tells of itself while it works: from long forwards, and before what takes long."""

from __future__ import annotations

import threading

import pytest
import torch

from effuse.placement.records import Load
from effuse.worker.assembly import _announce_compiling
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import Heartbeat, Phase
from effuse.worker.pulse import Pulse


class Watched:
    """A pulse, what it told, and time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[Heartbeat] = []
        self.pulse = Pulse(self.told.append, now=lambda: self.now)

    @property
    def phases(self) -> list[Phase]:
        return [beat.phase for beat in self.told]


def test_a_long_forward_is_told_of_while_it_lasts() -> None:
    one = Watched()
    load = Load(running=1, runnable=1)
    assert one.pulse.turn(load, has_end=False) is not None
    for layer in range(31):
        one.now += 0.125
        one.pulse.mark(layer)
    assert [beat.marks for beat in one.told] == [4, 8, 12, 16, 20, 24, 28]
    assert {(beat.loops, beat.load) for beat in one.told} == {(1, load)}


def test_layers_of_a_short_forward_cost_no_message() -> None:
    one = Watched()
    one.pulse.turn(Load(), has_end=False)
    for layer in range(100):
        one.pulse.mark(layer)
    assert one.told == []


def test_a_phase_is_told_before_it_begins_and_after_it() -> None:
    one = Watched()
    with one.pulse.during("loading"), one.pulse.during("compiling"):
        assert one.phases == ["loading", "compiling"]
    assert one.phases == ["loading", "compiling", "loading", "serving"]


def test_a_phase_that_an_error_left_open_ends_with_the_turn() -> None:
    one = Watched()
    one.pulse.begin("compiling")  # and what was compiled has failed
    one.now = 1.0
    beat = one.pulse.turn(Load(), has_end=False)
    assert beat is not None
    assert beat.phase == "serving"


def test_what_another_thread_compiles_keeps_nobody_waiting() -> None:
    one = Watched()

    def compile_something() -> None:
        with one.pulse.during("compiling"):
            pass

    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert one.told == []


def test_torch_s_compiler_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.callback import callback_handler
    from triton import knobs

    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    one = Watched()
    _announce_compiling(WorkerConfig(attention="flex"), torch.device("cuda"), one.pulse)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert one.told == []
    compiled(torch.zeros(2))
    assert one.phases == ["compiling", "serving"]
    compiled(torch.zeros(2))
    assert len(one.told) == 2, "what is compiled already is not announced"
