"""Makes sure that a prefill worker no longer writes into our pages: the other side of an abort.

A writer elsewhere reaches our memory through our end of a connection, and closing that keeps it
out, alive or not. A writer on the same machine may have mapped our memory, or let the kernel copy
into it. Nothing that we close keeps that one out, so only its own report or its end will. The
engine then handles the pages.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from effuse.kvtransfer.messages import AttemptId
from effuse.protos.channels import OPEN, FleetAccess, FleetChannel, filled, worker_stub
from effuse.protos.errors import PeerLost
from effuse.v1 import worker_pb2 as pb

LOG = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# processes that share one of them may be able to map our memory
_NAMESPACES = ("net", "ipc", "pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long and how often a silent writer is called, in seconds."""

    call_s: float = 5.0
    first_pause_s: float = 0.1
    most_pause_s: float = 2.0
    elsewhere_s: float = 10.0  # then a writer elsewhere is kept out without its report


async def until_ended(
    writer: pb.WorkerRef,
    attempt: AttemptId,
    reason: str,
    *,
    access: FleetAccess = OPEN,
    patience: Patience | None = None,
    now: Callable[[], float] = time.monotonic,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Returns True once `writer` reports that all its writes for the attempt have ended. Returns
    False once fencing the pages on our side is enough: it has ended, or it is elsewhere and does
    not answer.

    `goes_on` is checked before each call, because the pages may be gone themselves. Time alone
    frees no page of a writer on this machine: it is called for as long as it takes.
    """
    patience = patience or Patience()
    may_map = await is_beside_us(writer, patience.call_s)
    asked_since, pause_s = now(), patience.first_pause_s
    request = pb.AbortRequest(
        attempt=filled(pb.AttemptId, attempt), reason=reason, incarnation=writer.incarnation
    )
    async with access.connect(writer.address, keepalive=None) as channel:
        while goes_on():
            answer = await _ask(channel, request, patience.call_s)
            if answer and answer.drained and answer.incarnation == writer.incarnation:
                return True
            if answer and answer.life_is_over:
                return False
            if may_map:
                engine = f"{writer.address.rpartition(':')[0]}:{writer.engine_port}"
                if await is_free(engine, patience.call_s):
                    return False
            elif answer or now() - asked_since >= patience.elsewhere_s:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, patience.most_pause_s)
    return False


async def _ask(
    channel: FleetChannel, request: pb.AbortRequest, timeout_s: float
) -> pb.AbortResponse | None:
    try:
        await channel.prove()  # it may be gone, and another process may have its port
        return await worker_stub(channel).Abort(request, timeout=timeout_s)
    except PeerLost as error:
        LOG.info("%s has not ended yet: %s", request.attempt.transfer_id, error)
    except grpc.aio.AioRpcError as error:
        LOG.info("%s has not ended yet: %s", request.attempt.transfer_id, error.code().name)
    return None


def here() -> str:
    """The kernel and the namespaces of this process, in the form of `WorkerRef.place`."""
    if not _BOOT_ID.exists():
        return ""
    spaces = [Path(f"/proc/self/ns/{name}").readlink() for name in _NAMESPACES]
    return ",".join([_BOOT_ID.read_text().strip(), *map(str, spaces)])


async def is_beside_us(writer: pb.WorkerRef, timeout_s: float) -> bool:
    """Whether it may be able to write into our memory by itself: it shares the kernel and a
    namespace with us or, if its place is not known, has one of our addresses.
    """
    own = here()
    if not (own and writer.place):
        host = writer.address.rpartition(":")[0]
        binds = await _bind_all(f"{host}:0", timeout_s)
        return any(error != errno.EADDRNOTAVAIL for error in binds)
    (kernel, *spaces), (its_kernel, *its_spaces) = own.split(","), writer.place.split(",")
    return kernel == its_kernel and not set(spaces).isdisjoint(its_spaces)


async def is_free(address: str, timeout_s: float) -> bool:
    """Whether no process listens there, at any of this host's addresses for the name.

    Our own kernel decides, because a refused connection may be a firewall's. An address that is not
    ours, or an impossible name, is not known to be free.
    """
    binds = await _bind_all(address, timeout_s)
    return bool(binds) and not any(binds)


async def _bind_all(address: str, timeout_s: float) -> list[int]:
    """Our kernel's error, or 0, for binding each address of a name; empty without any."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, ValueError):
        return []
    binds = [_bind(family, where) for family, *_, where in found]
    # If our kernel has no addresses of a kind, for example without IPv6, nothing listens on one.
    return [error for error in binds if error != errno.EAFNOSUPPORT]


def _bind(family: int, where: tuple[object, ...]) -> int:
    try:
        with socket.socket(family) as probe:
            # Without it, ended connections would look like a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0
