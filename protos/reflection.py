"""Server reflection in both of its versions, from one servicer.

grpcio's package only has v1alpha, which newer tools try second or not at all. Version 1 has the
same messages under another package, so its bytes are the same. The library's servicer answers both,
and v1's descriptors are made from those of v1alpha. The stubs of other services register their own
descriptors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

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
