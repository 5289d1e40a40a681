"""PrefillService and DecodeService of one worker, which accepts the calls of its present role."""

import grpc.aio

from effuse.decode_worker import server as decode_server
from effuse.prefill_worker import server as prefill_server
from effuse.worker.config import BothConfig
from effuse.worker.front import Role
from effuse.worker.shell import Shell


def make_role(config: BothConfig) -> Role:
    """The parts of a front that belong to a worker of both kinds."""
    prefill, decode = prefill_server.make_role(config), decode_server.make_role()

    def add(shell: Shell, server: grpc.aio.Server) -> None:
        prefill.add(shell, server)
        decode.add(shell, server)

    return Role(
        name=config.role,
        may_change=True,
        engine_module="effuse.both_worker.build",
        services={**prefill.services, **decode.services},
        add=add,
        beside=prefill.beside,
    )
