"""A device that is far behind its host: the engine shows that forwards go on, for as long as they
take, and gives away no page that they may still write.

The device here ends a layer every 2.9 s of the test's clock: each forward outlasts the 3 s that an
engine may be silent for. Then it ends none any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from checkpoints import TinySizes, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Clock, Rig, load_tiny, make_request

from effuse.kernels.pages import QueuedLayers
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.worker.messages import Abort, Heartbeat
from effuse.worker.watchdog import Limits, Progress, Pulse, observe, verdict

PROMPT = tuple(range(20, 33))
LAYERS, LAYER_S = 8, 2.9
LIMITS = Limits(startup_s=60.0, serving_s=3.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = tmp_path_factory.mktemp("tiny") / "llada"
    sizes = TinySizes(num_layers=LAYERS)
    return load_tiny(write_tiny_checkpoint(path, "llada", seed=3, sizes=sizes, is_tuned=False))


class Device:
    """Ends queued work, one layer after another, when the host waits or a test lets it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.num_queued = self.num_ended = 0
        self.beats: list[Heartbeat] = []
        self.progress = replace(Progress.begin(0.0), is_ready=True, phase="serving")
        self.pulse = Pulse(self.hear, now=self.clock)
        self.layers = QueuedLayers(self.place, self.pulse.mark)

    def place(self) -> Place:
        self.num_queued += 1
        return Place(self, self.num_queued)

    def here(self) -> Place:
        return Place(self, self.num_queued)

    def end_layer(self) -> None:
        """A layer ends; the front has looked right before."""
        self.clock.now += LAYER_S
        self.num_ended += 1
        assert self.verdict() is None

    def hear(self, beat: Heartbeat) -> None:
        self.progress = observe(self.progress, beat, self.clock.now)

    def verdict(self) -> str | None:
        return verdict(self.progress, self.clock.now, LIMITS)


@dataclass(frozen=True)
class Place:
    """Behind this many layers."""

    device: Device
    number: int

    def query(self) -> bool:
        return self.device.num_ended >= self.number

    def synchronize(self) -> None:
        while not self.query():
            self.device.end_layer()


def runner(rig: Rig, device: Device) -> ModelRunner:
    """Queues on the device the work that it computes immediately."""
    return ModelRunner(
        rig.model,
        rig.memory.layer_views(),
        page_size=rig.layout.page_size,
        block_size=rig.model.config.block_size,
        on_layer=device.layers.add,
        wait=device.layers.wait,
    )


def turn(rig: Rig, device: Device) -> None:
    """A turn of the engine's loop."""
    rig.step()
    if beat := device.pulse.turn(rig.engine.load(), has_end=False):
        device.hear(beat)


@pytest.fixture
def idle(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceRig, Device]:
    """An engine whose device also copies pages late."""
    rig, device = DeviceRig(model), Device()
    rig.forward, rig.queued, rig.place = runner(rig, device), device.layers, device.here
    monkeypatch.setattr(rig.memory, "copy_page", lambda source, target: device.place())
    rig.connect(None)
    has_ended: Callable[[], bool] = lambda: device.num_ended == device.num_queued  # noqa: E731
    monkeypatch.setattr(rig.stepper, "has_ended", has_ended)
    return rig, device


@pytest.fixture
def prefilling(idle: tuple[DeviceRig, Device]) -> tuple[DeviceRig, Device]:
    """It has launched a prompt's forward and two steps behind it."""
    rig, device = idle
    rig.start(make_request("a", PROMPT))
    for _ in range(4):
        device.clock.now += 0.5  # so that each turn is reported
        turn(rig, device)
    assert rig.stepper.num_ahead == 2 and device.num_queued == LAYERS
    return rig, device


def test_a_prompt_that_is_computed_for_long_is_no_hang(
    prefilling: tuple[DeviceRig, Device],
) -> None:
    rig, device = prefilling
    for _ in range(LAYERS - 1):
        device.end_layer()
        turn(rig, device)
    device.clock.now += LIMITS.silence_s(device.progress) - 0.1
    turn(rig, device)
    assert device.verdict() is None
    device.clock.now += 0.2
    turn(rig, device)
    assert "made no step" in (device.verdict() or "it goes on")


def test_an_end_that_waits_for_a_prompt_is_no_hang(prefilling: tuple[DeviceRig, Device]) -> None:
    """Launched work must end before pages are released."""
    rig, device = prefilling
    rig.engine.handle(Abort(attempt=make_request("a", PROMPT).attempt))
    assert device.num_ended == LAYERS
    turn(rig, device)
    assert device.verdict() is None
    assert rig.pool.num_free == rig.pool.num_pages


def test_pages_that_a_prompts_forward_may_still_write_are_nobodys(
    idle: tuple[DeviceRig, Device],
) -> None:
    """A prefill worker's bytes do not come after it: they would be overwritten after their
    verification, and nothing would notice.
    """
    rig, device = idle
    request = make_request("a", PROMPT)
    rig.start(request)
    turn(rig, device)
    assert device.num_queued == LAYERS and device.num_ended == 0
    rig.engine.handle(Abort(attempt=request.attempt))
    assert rig.pool.num_free == rig.pool.num_pages
    assert device.num_ended == LAYERS


def test_a_page_that_is_yet_to_be_copied_is_nobodys(idle: tuple[DeviceRig, Device]) -> None:
    rig, device = idle
    requests = [make_request(name, PROMPT, group="g") for name in "ab"]
    for request in requests:
        rig.start(request)
    turn(rig, device)
    device.num_ended = LAYERS
    turn(rig, device)
    assert rig.engine.counters.prompts_shared == 1 and device.num_queued == LAYERS + 1
    rig.engine.handle(Abort(attempt=requests[0].attempt))
    assert device.num_ended == LAYERS + 1


def test_steps_of_a_canvas_that_take_long_are_no_hang(model: Transformer) -> None:
    rig, device = Rig(model), Device()
    rig.forward = runner(rig, device)
    rig.connect(None)
    answer = rig.start(make_request("a", PROMPT, max_tokens=8, algorithm="llada", steps=8))
    for step in range(1, 9):
        turn(rig, device)
        assert device.num_ended >= step * LAYERS  # and the drawn one, as it is on a CPU
        assert device.verdict() is None
    assert answer.finished.num_tokens == 8
