"""The rig of `engines.py` around an engine that denoises on the device."""

from __future__ import annotations

from collections.abc import Callable

from decoding.engines import Rig
from effuse.decode_worker.build import make_stepper
from effuse.decode_worker.device_executor import DeviceExecutor
from effuse.decode_worker.device_step import Adjust
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.executor import Executor, HostExecutor
from effuse.kernels.marks import Place, QueuedLayers


class DeviceRig(Rig):
    """Takes the arguments of `Rig`. `adjust` may change candidates, from the next `connect` on;
    `place` and `queued` are those of a device that is behind.
    """

    adjust: Adjust | None = None
    place: Callable[[], Place] | None = None
    queued: QueuedLayers | None = None
    stepper: DeviceStepper

    def make_executor(self) -> Executor:
        kv = self.memory.layer_views()
        self.stepper = make_stepper(self.model, kv, self.limits, adjust=self.adjust)
        prompts = HostExecutor(self.forward, self.memory.copy_page, self.place, self.queued)
        return DeviceExecutor(prompts, self.stepper)
