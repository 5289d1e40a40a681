"""Whether the router can do its work now, told to gRPC health by service and by role.

Serving while a decode worker is live that some request could be placed on, with a prefill worker
where those are required. Not here: liveness, which is the empty name and always serving.
"""

from __future__ import annotations

import asyncio
from typing import Final

from effuse.protos.rpc import RpcServer
from effuse.router.catalogue import Catalogue
from effuse.router.fleet import Fleet
from effuse.router.policy import live_workers
from effuse.v1 import generation_pb2, model_pb2

GENERATION: Final[str] = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODELS: Final[str] = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
ROLES: Final = ("router", "prefill", "decode")
CHECK_S: Final = 0.2


class Readiness:
    """Compares the view with what health says, again and again."""

    def __init__(self, rpc: RpcServer, fleet: Fleet, catalogue: Catalogue) -> None:
        self._rpc = rpc
        self._fleet = fleet
        self._catalogue = catalogue

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await self.check()
            await self._fleet.forget_gone()
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Brings health up to date once."""
        prefill, decode = live_workers(self._fleet.candidates())
        models = self._catalogue.live()
        can_serve = any(self._fleet.place(name, ()) is not None for name in models)
        for name, serving in (
            (GENERATION, can_serve),
            (MODELS, bool(models)),
            ("router", can_serve),
            ("prefill", bool(prefill)),
            ("decode", bool(decode)),
        ):
            await self._rpc.set_serving(name, serving)
