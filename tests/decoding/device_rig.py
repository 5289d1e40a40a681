"""The rig of `engines.py` around an engine that denoises on the device."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from decoding.engines import Rig
from decoding.torch_step import TorchStep
from effuse.decode_worker import device_stepper
from effuse.decode_worker.device_slots import DeviceSlots
from effuse.decode_worker.device_step import Adjust
from effuse.decode_worker.device_stepper import DeviceStepper, make_stepper
from effuse.decode_worker.executor import Executor
from effuse.kernels.pages import Place, QueuedLayers
from effuse.worker.ranks import Ranks

# For all rigs of the process, because those of a group's ranks are made by threads.
patch.object(device_stepper, "DeviceStep", TorchStep).start()


class DeviceRig(Rig):
    """Takes the arguments of `Rig`. `adjust` may change candidates, from the next `connect` on;
    `place` and `queued` are those of a device that is behind.
    """

    adjust: Adjust | None = None
    place: Callable[[], Place] | None = None
    queued: QueuedLayers | None = None
    ranks: Ranks | None = None
    stepper: DeviceStepper

    def make_executor(self) -> Executor:
        kv = self.memory.layer_views()
        self.stepper = make_stepper(self.model, kv, self.limits, ranks=self.ranks)
        self.stepper.step.adjust = self.adjust
        slots = DeviceSlots(self.stepper)
        return Executor(self.forward, self.memory.copy_page, self.place, self.queued, slots)
