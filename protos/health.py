"""gRPC's health service: whether a process can work now, for single checks and for watches.

grpcio's own service keeps watches open while the server drains, which would delay its end as long
as a caller likes. This one ends them.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.protos.errors import NotFound

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio ships no types
    """One per server. Knows "" (the process answers) and the services given to `set`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Event()  # one for each change
        self._is_draining = False

    def set(self, service: str, *, serving: bool) -> None:
        """Sets whether `service` can work now; has no effect once the server drains."""
        if not self._is_draining:
            self._statuses[service] = _SERVING if serving else _NOT_SERVING
            self._announce()

    def drain(self) -> None:
        """Sets NOT_SERVING for every service from now on, and ends every watch with that."""
        self._is_draining = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._announce()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service now; raises `NotFound` if there is no service of that name."""
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(f"this server has no service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        """The status of every service now. Called if grpcio-health-checking has it (since 1.82)."""
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status)
            for service, status in self._statuses.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """The status of a service, now and after each change, until this server drains. It waits
        for changes without a deadline on purpose: the caller ends it.
        """
        told: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if self._is_draining:
                return
            await changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
