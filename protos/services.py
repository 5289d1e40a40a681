"""The services of every server: reflection in both of its versions, and health.

For reflection, grpcio's package only has v1alpha, which newer tools try second or not at all.
Version 1 has the same messages under another package, so its bytes are the same. The library's
servicer answers both, and v1's descriptors are made from those of v1alpha. The stubs of other
services register their own descriptors.

grpcio's own health service keeps watches open while the server drains, which would delay its end as
long as a caller likes. This one ends them.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from effuse.protos.errors import NotFound

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
ALPHA: Final[str] = reflection.SERVICE_NAME
V1: Final = ALPHA.replace(".v1alpha.", ".v1.")
_V1_PACKAGE: Final = V1.rpartition(".")[0]
_V1_FILE: Final = f"{_V1_PACKAGE.replace('.', '/')}/reflection.proto"


def add_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Makes `server` describe `services`, given by their full names, and reflection itself."""
    names = [*services, V1, ALPHA]
    servicer = reflection.aio.ReflectionServicer(names, pool=SymbolPool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(V1, methods)])


class SymbolPool:
    """Finds descriptors for server reflection, including methods by their full name.

    The protocol needs methods (`package.Service.Method` is a symbol) and ghz asks for them; the
    default pool only knows files, messages, enums and services.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()
        self._v1 = _version_1()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Raises KeyError for an unknown name."""
        pool = self._v1 if symbol.startswith(f"{_V1_PACKAGE}.") else self._pool
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return pool.FindMethodByName(symbol).containing_service.file

    def FindFileByName(self, name: str) -> FileDescriptor:
        """Raises KeyError for a file that was never imported."""
        pool = self._v1 if name == _V1_FILE else self._pool
        return pool.FindFileByName(name)

    def __getattr__(self, name: str) -> Any:
        """Other searches are those of the default pool."""
        return getattr(self._pool, name)


def _version_1() -> descriptor_pool.DescriptorPool:
    """v1alpha's file under v1's names, in a separate pool, since other packages may add theirs."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.ClearField("options")
    file.name, file.package = _V1_FILE, _V1_PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
        method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio ships no types
    """One per server. Knows "" (the process answers) and the services given to `set`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Event()  # one for each change
        self._is_draining = False

    def set(self, service: str, *, serving: bool) -> None:
        """Sets whether `service` can work now; has no effect once the server drains."""
        status = _SERVING if serving else _NOT_SERVING
        if not self._is_draining and self._statuses.get(service) != status:
            self._statuses[service] = status
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
