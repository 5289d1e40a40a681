"""Makes sure that a prefill worker no longer writes into our pages: the abort contract's far side.

Asks until that worker answers or its life is proven over. What then happens to the pages is the
engine's.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from effuse.kvtransfer.messages import AttemptId
from effuse.protos import rpc
from effuse.protos.stubs import worker_stub
from effuse.v1 import worker_pb2 as pb
from effuse.worker import wire

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long and how often a silent writer is asked, in seconds."""

    call_s: float = 5.0
    first_pause_s: float = 0.1
    most_pause_s: float = 10.0
    # The connectors' keepalive has closed a silent peer's connection long before this.
    lost_after_s: float = 600.0


async def until_gone(
    writer: wire.Writer,
    attempt: AttemptId,
    reason: str,
    *,
    patience: Patience | None = None,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Returns once `writer` writes nothing more of the attempt; True if it said so itself.

    An answer is enough, whichever life gives it: that life has let go of the attempt, or it is
    another one and the writer's is over. So are refused connections, to the front and to the
    engine, which may outlive a front that was killed. In both of the latter cases something that
    was written may still be under way.
    """
    patience = patience or Patience()
    give_up_at, pause_s = now() + patience.lost_after_s, patience.first_pause_s
    request = pb.AbortRequest(attempt=wire.attempt_to_proto(attempt), reason=reason)
    async with rpc.connect(writer.address, keepalive=None) as channel:
        stub = worker_stub(channel)
        while now() < give_up_at:
            try:
                answer = await stub.Abort(request, timeout=patience.call_s)
            except grpc.aio.AioRpcError as error:
                if await _is_dead(writer, patience.call_s):
                    return False
                LOG.info("%s has not ended %s yet: %s", writer.address, attempt, error.code().name)
            else:
                return answer.drained and answer.incarnation == writer.incarnation
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, patience.most_pause_s)
    LOG.warning("gave up on %s, silent for %g s", writer.address, patience.lost_after_s)
    return False


async def _is_dead(writer: wire.Writer, timeout_s: float) -> bool:
    """Whether neither its front nor its engine is there any more."""
    return await _is_refused(writer.address, timeout_s) and await _is_refused(
        writer.engine_address, timeout_s
    )


async def _is_refused(address: str, timeout_s: float) -> bool:
    """Whether the host answers that nobody listens there, at each address that it has."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            return await _refuse_all(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):  # the last of a name that no host can have
        return False


async def _refuse_all(host: str, port: int) -> bool:
    """One by one: a single connection to all of them hides who refused and who was silent."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in found:
        try:
            _, writer = await asyncio.open_connection(str(address[0]), port)
        except ConnectionRefusedError:
            continue
        writer.close()
        return False
    return bool(found)
