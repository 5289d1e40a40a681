"""Calls to workers whose outcomes are told apart: their error, their silence, our own cancellation.

grpcio raises CancelledError both where our task is cancelled and where the call is; only the first
may pass. Not here: what is said on a call (`attempt.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol, TypeVar

import grpc.aio

from effuse.protos.errors import EffuseError, PeerLost, from_rpc_error

LOG: Final = logging.getLogger(__name__)

Read = TypeVar("Read", covariant=True)
Message = TypeVar("Message")


class Readable(Protocol[Read]):
    """A call that answers with a stream."""

    async def read(self) -> Read:
        """The next message, or grpc.aio.EOF."""


async def read(call: Readable[Message], peer: str) -> Message:
    """The next message of a stream, or grpc.aio.EOF at its good end; raises `EffuseError`."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        LOG.info("%s ended its call with %s: %s", peer, error.code().name, error.details())
        raise from_rpc_error(error, peer) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise PeerLost(f"{peer} broke off the call") from None


async def tell(call: grpc.aio.StreamStreamCall[Message, Read], message: Message) -> bool:
    """Writes to a call; False where it is over, which its reader learns with the reason."""
    try:
        await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return False
    return True


def is_cancelled() -> bool:
    """Whether it is the current task that somebody cancels."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class LegFailed(Exception):
    """One of an attempt's two calls failed. `on_prefill` says which worker is to blame."""

    def __init__(self, error: EffuseError, *, on_prefill: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.on_prefill = on_prefill
