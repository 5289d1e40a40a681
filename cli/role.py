"""`effuse role WORKER ROLE`: changes the kinds of requests that a worker accepts, or leaves that to
the plans of routers (`auto`).

The router has the worker's address, and the worker itself takes the order. It only accepts a
process that proves that it belongs to the fleet, as for all calls among the fleet's processes.
"""

import argparse
import asyncio
from collections.abc import Sequence

from effuse.cli.addresses import secret_of
from effuse.cli.arguments import (
    add_router,
    calling,
    client_of,
    command,
    credentials_of,
    file,
    number,
)
from effuse.config import checks
from effuse.config.flags import CommandError
from effuse.protos.channels import FleetAccess, worker_stub
from effuse.protos.errors import NotFound
from effuse.v1 import worker_pb2
from effuse.worker.attempts import AUTO, ROLES


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 once the worker has the role. Raises CommandError if it refuses."""
    parser = make_parser()
    asked = parser.parse_args(argv)
    shown = credentials_of(parser, asked)
    try:
        checks.together(asked, "fleet_cert", "fleet_key", "fleet_ca")
    except ValueError as error:
        parser.error(str(error))
    secret = asked.fleet_secret or secret_of(asked.target)
    access = FleetAccess.read(asked.fleet_cert, asked.fleet_key, asked.fleet_ca, secret)
    with calling(asked.target), client_of(asked.target, shown, asked.timeout) as client:
        found = {one.worker_id: one for one in client.workers()}
        if asked.worker not in found:
            there = f"it has {', '.join(found)}" if found else "it has none"
            raise NotFound(f"the fleet has no worker {asked.worker!a}: {there}")
    with calling(place := found[asked.worker].address, "--fleet-secret or --fleet-cert"):
        reply = asyncio.run(_change(access, place, asked))
    rest = f", and finishes {reply.leaving} requests of its former role" if reply.leaving else ""
    by = ", and routers may change that" if asked.role == AUTO else ""
    print(f"{asked.worker} is now {reply.role}{by}{rest}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("role", "Change the role of a worker that was started as effuse-worker.")
    add = parser.add_argument
    add("worker", metavar="WORKER", help="its name, as `effuse status` shows it")
    add("role", choices=(*ROLES, AUTO), metavar="ROLE",
        help="prefill, decode or both, which it keeps; auto: routers may change it")  # fmt: skip
    add("--hand-over-s", type=number(0), metavar="S",
        help="hand requests of its former role over to other workers after this many seconds "
        "(default: let them end)")  # fmt: skip
    add("--fleet-secret", type=file, metavar="FILE",
        help="the fleet's secret (default: that of a fleet on this machine)")  # fmt: skip
    for name, what in (("cert", "certificate"), ("key", "key"), ("ca", "authorities")):
        add(f"--fleet-{name}", type=file, metavar="FILE", help=f"PEM {what} for the fleet")
    add_router(parser, has_timeout=True)
    return parser


async def _change(
    access: FleetAccess, address: str, asked: argparse.Namespace
) -> worker_pb2.SetRoleResponse:
    request = worker_pb2.SetRoleRequest(role=asked.role, hand_over_s=asked.hand_over_s)
    limit_s = 2 * asked.timeout
    try:
        async with asyncio.timeout(limit_s), access.connect(address) as channel:
            await channel.prove()
            return await worker_stub(channel).SetRole(request, timeout=asked.timeout)
    except TimeoutError as error:
        raise CommandError(f"{address} did not answer within {limit_s:g} s") from error
