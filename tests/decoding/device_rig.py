"""The rig of `engines.py` around the engine whose denoising lives on the device."""

from __future__ import annotations

from decoding.engines import INCARNATION, Rig
from effuse.decode_worker.boundary import Boundary
from effuse.decode_worker.device_build import make_stepper
from effuse.decode_worker.device_engine import DeviceDecodeEngine
from effuse.decode_worker.device_step import Adjust
from effuse.decode_worker.intake import Intake
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.receiver import HandoffReceiver, ReceiverIdentity


class DeviceRig(Rig):
    """Takes what `Rig` takes. `adjust` may change candidates, from the next `connect` on."""

    adjust: Adjust | None = None

    def connect(self, connector: Connector | None) -> None:
        limits, model = self.limits, self._model
        config = model.config
        stepper = make_stepper(model, self.memory.layer_views(), limits, adjust=self.adjust)
        identity = ReceiverIdentity(
            incarnation=INCARNATION,
            fingerprint=self.fingerprint,
            page_bytes=self.layout.page_bytes,
            lease_s=self._lease_s,
        )
        self.engine = DeviceDecodeEngine(
            self.forward,
            self.pool,
            Intake(config, limits),
            HandoffReceiver(self.pool, connector, identity),
            Boundary(
                config.hidden_size if config.shift_logits else None, model.dtype, model.device
            ),
            stepper,
            now=self.clock,
            max_request_s=self._max_request_s,
        )
