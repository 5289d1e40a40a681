"""The requests of tests of the public services to a fleet of fakes."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc.aio
import pytest
from router.fakes import FakeFleet

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb


def request(**fields: object) -> pb.GenerateRequest:
    """A request with a prompt, unless `fields` bring another input."""
    return pb.GenerateRequest(**{"prompt": "how many?", **fields})  # type: ignore[arg-type]


async def ask(fleet: FakeFleet, **fields: object) -> pb.GenerateResponse:
    return await fleet.generation.Generate(request(**fields), timeout=30)


async def failure(call: Awaitable[object]) -> errors.EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value, "router")
