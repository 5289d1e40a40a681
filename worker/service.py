"""WorkerService, the service of every worker: Abort, GetLoad, Drain, Undrain."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc.aio
from google.protobuf.message import Message

from effuse.placement.records import Load
from effuse.protos.errors import InvalidRequest, Refused, Unavailable
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker import wire
from effuse.worker.shell import Shell

_Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"
_MOST_ABORT_S = 60.0  # callers try again


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Answers for one shell."""

    def __init__(
        self, shell: Shell, drain: Callable[[float], None], undrain: Callable[[], None]
    ) -> None:
        self._shell = shell
        self._drain = drain
        self._undrain = undrain

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Ends an attempt in any state; an unknown transfer id is refused from now on."""
        attempt_id = wire.attempt_id(request.attempt)
        attempts = self._shell.attempts
        attempt = attempts.find(attempt_id.transfer_id)
        ended = self._shell.supervisor.ended
        if attempt is None:
            attempts.bury(attempt_id.transfer_id)
            return pb.AbortResponse(
                incarnation=self._shell.incarnation,
                drained=True,
                life_is_over=request.incarnation in ended,
            )
        attempt.fail(Refused(f"the attempt was aborted: {request.reason[:200]}"))
        try:
            async with asyncio.timeout(_MOST_ABORT_S):
                await attempt.ended.wait()
        except TimeoutError:
            raise Unavailable("the attempt is still ending", retry_after_s=1.0) from None
        return pb.AbortResponse(
            incarnation=attempt.incarnation,
            was_running=True,
            drained=not attempt.engine_gone,
            life_is_over=request.incarnation in ended,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: _Context) -> pb.GetLoadResponse:
        """Returns the engine's last load, and the front's own state."""
        shell = self._shell
        life = shell.supervisor.life
        load = Load() if life is None else life.load
        return pb.GetLoadResponse(
            worker=pb.WorkerRef(
                worker_id=shell.identity.worker_id,
                incarnation=shell.incarnation,
                address=shell.identity.address,
                engine_port=0 if life is None else life.ready.engine_port,
                place=shell.place,
            ),
            role=shell.role,
            running=max(load.running, len(shell.attempts) - load.waiting),
            waiting=load.waiting,
            total_pages=load.total_pages,
            free_pages=load.free_pages,
            quarantined_pages=load.quarantined_pages,
            queued_tokens=load.queued_tokens,
            blocks_left=load.blocks_left,
            steps=load.steps,
            draining=shell.is_draining,
            tasks=len(asyncio.all_tasks()),
            preemptions=load.preemptions,
            kv_bytes=load.kv_bytes,
        )

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        """Begins to drain; attempts that still run after the deadline are ended."""
        if not request.deadline_s >= 0:  # also NaN
            raise InvalidRequest.of(
                "deadline_s", f"expected 0 seconds or more, got {request.deadline_s}"
            )
        self._drain(request.deadline_s)
        return pb.DrainResponse(running=len(self._shell.attempts))

    async def Undrain(self, request: pb.UndrainRequest, context: _Context) -> pb.UndrainResponse:
        """Admits again, unless the process is ending."""
        self._undrain()
        return pb.UndrainResponse(running=len(self._shell.attempts))
