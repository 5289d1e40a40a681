"""The front's process: gRPC server, health, engine, lease, metrics; from start to drained exit.

It also has WorkerService, the service of every worker: Abort, GetLoad, Drain, Undrain, SetRole.

Only connects parts to each other. It imports no torch; each role's own `server.py` handles
requests.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from effuse.config import flags
from effuse.config.access import host_and_port
from effuse.models.config_keys import CheckpointError
from effuse.models.defaults import refuse_unserved
from effuse.placement import records
from effuse.placement.access import RedisAccess
from effuse.placement.leases import Announcer, FleetView, Superseded
from effuse.placement.store import Store
from effuse.protos import rpc
from effuse.protos.channels import FleetAccess, FleetOnly, ProofServicer, filled
from effuse.protos.errors import Draining, InvalidRequest, Refused, Unavailable
from effuse.telemetry import logs
from effuse.telemetry.traces import TracesUnavailable
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.v1.proof_pb2_grpc import add_ProofServiceServicer_to_server
from effuse.worker import node, wire
from effuse.worker.attempts import Attempts, Duty
from effuse.worker.config import END_S, STOP_S, DecodeConfig, WorkerConfig
from effuse.worker.gpus import check_device
from effuse.worker.shell import Shell
from effuse.worker.supervisor import Supervisor, new_incarnation
from effuse.worker.watchdog import EngineEnded, GaveUp

LOG = logging.getLogger(__name__)
Config = TypeVar("Config", bound=WorkerConfig)

_FATAL = CheckpointError, EngineEnded, GaveUp, node.NodeRefused, Superseded, TracesUnavailable
_WORKER_SERVICE = "effuse.v1.WorkerService"
_POLL_S = 1.0  # seconds between polls of the fleet
_MOST_ABORT_S = 60.0  # callers try again
_Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The differences between the kinds of workers for the front."""

    name: records.Role  # at its start
    may_change: bool = False
    engine_module: str  # run as `python -m`
    services: Mapping[records.Kind, str]  # full names of its gRPC services
    add: Callable[[Shell, grpc.aio.Server], None]  # adds the servicers
    # Runs as long as the front, with a view of the fleet and a function that announces immediately.
    beside: Callable[[Shell, FleetView, Callable[[], None]], Coroutine[None, None, None]] | None = (
        None
    )


def main(kind: type[Config], make_role: Callable[[Config], Role], prog: str, about: str) -> int:
    config = flags.parse(kind, sys.argv[1:], prog=prog, about=about)
    return run(config, make_role(config))


def run(config: WorkerConfig, role: Role) -> int:
    """Runs a worker until SIGTERM or SIGINT; returns its exit status.

    0 after a drain; 2 if it should use a GPU and none is here. 1 for a checkpoint that is not
    served, an engine that does not start or end, a taken port, unusable certificates or secret,
    another process with its worker id, or a host that the leader of its group refuses.
    """
    logs.set_up(role.name, config.log_level, config.log_format)
    try:
        check_device(config.device)
    except ValueError as error:
        LOG.error("%s", error)
        return 2
    status = 0
    try:
        algorithm = config.default_algorithm if isinstance(config, DecodeConfig) else None
        directory, adapted, limits = config.directory, config.adapter is not None, vars(config)
        refuse_unserved(directory, config.block_size, algorithm, adapted=adapted, limits=limits)
        asyncio.run(_run(config, role))
    except* (*_FATAL, OSError) as failed:
        LOG.error("%s", "; ".join(str(error) for error in failed.exceptions))
        status = 1
    return status


async def _run(config: WorkerConfig, role: Role) -> None:
    if config.node_rank:
        async with asyncio.TaskGroup() as tasks:  # whose errors come in groups, like those below
            access = _access(config)
            tasks.create_task(node.run(config, [*role.services.values(), _WORKER_SERVICE], access))
        return
    async with rpc.shutdown_signal() as stop, asyncio.TaskGroup() as tasks:
        await Front(config, role, tasks).run(stop)


def _access(config: WorkerConfig) -> FleetAccess:
    return FleetAccess.read(
        config.fleet_cert, config.fleet_key, config.fleet_ca, config.fleet_secret
    )


class Front:
    def __init__(self, config: WorkerConfig, role: Role, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._role = role
        self._tasks = tasks
        self._changed = asyncio.Event()  # the engine has started or ended, or a drain has begun
        attempts = Attempts()
        supervisor = Supervisor(role.engine_module, config, attempts, on_change=self._changed.set)
        access = _access(config)
        duty = Duty(role.name, role.may_change)
        self.shell = Shell(duty, config, attempts, supervisor, tasks, access)
        secret = access.secret
        doorkeeper = None if secret is None else FleetOnly(secret, self.shell.where)
        self.server = rpc.RpcServer(
            rpc.FLEET_LIMITS, tls=access.server_tls(), doorkeeper=doorkeeper
        )
        self._facts: dict[str, str] = {}  # for the process that waits for the ready file
        self._is_written = False  # it was written at least once
        self._announcer: Announcer | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None  # ends attempts after the drain's deadline
        self._handing_over: asyncio.Task[None] | None = None  # the same after a change of role
        self._is_ending = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains and leaves nothing."""
        async with contextlib.AsyncExitStack() as stack:
            await self._listen(stack)
            self._supervising = self._tasks.create_task(self.shell.supervisor.run())
            background = [
                self._supervising,
                self._tasks.create_task(self._follow_changes()),
                *await self._announce(stack),
            ]
            drain_s = self._config.drain_s + END_S + STOP_S
            await rpc.serve(self.server, stop, drain_s=drain_s, on_drain=self._end_all)
            if self._announcer is not None:
                await self._announcer.release()
            for task in background:
                task.cancel()
            self.shell.abandon()
            await asyncio.wait(background, timeout=END_S)
            await asyncio.to_thread(self.shell.traces.close)

    def drain(self, deadline_s: float) -> None:
        """Admits nothing more; ends attempts that still run after `deadline_s`."""
        self.shell.is_draining = True
        self._changed.set()
        self._stop_waiting()
        self._draining = self.shell.spawn(self._end_after(deadline_s))

    def undrain(self) -> None:
        """Admits again; running attempts go on. Raises `Draining` if the process is ending."""
        if self._is_ending:
            raise Draining("this worker is ending and accepts no more requests", retry_after_s=0.1)
        self._stop_waiting()
        self.shell.is_draining = False
        self._changed.set()

    def _stop_waiting(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None

    def set_role(self, role: str, hand_over_s: float | None, *, is_planned: bool = False) -> None:
        """Accepts only work of this role from now on; other attempts go on for `hand_over_s`
        seconds, or to their end. Raises `InvalidRequest` and `Refused`.
        """
        shell, before, now = self.shell, self.shell.duty, time.monotonic()
        shell.duty = before.changed(role, now, hand_over_s, is_planned=is_planned)
        if before.role != shell.duty.role:
            LOG.info("%s is now %s, and was %s", shell.worker_id, shell.duty.role, before.role)
        self._changed.set()
        if self._handing_over is not None:
            self._handing_over.cancel()
        self._handing_over = shell.spawn(self._hand_over(shell.duty))

    async def _hand_over(self, duty: Duty) -> None:
        if (wait_s := duty.wait_s(time.monotonic())) is None:
            return
        await asyncio.sleep(wait_s)
        for attempt in self.shell.attempts.leaving(duty):
            attempt.deliver(duty.refusal("this worker hands the request over"))

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        config, role = self._config, self._role
        if (secret := self.shell.access.secret) is not None:
            proof = ProofServicer(secret, self.shell.where)
            add_ProofServiceServicer_to_server(proof, self.server.server)
        role.add(self.shell, self.server.server)
        worker = WorkerServicer(self)
        pb_grpc.add_WorkerServiceServicer_to_server(worker, self.server.server)
        port = await self.server.start(
            host_and_port(config.host, config.port), [*role.services.values(), _WORKER_SERVICE]
        )
        stack.push_async_callback(self.server.stop, 0.0)
        host = config.reachable_host()
        self.shell.address = host_and_port(host, port)
        self.shell.worker_id = config.worker_id or f"{role.name}-{socket.gethostname()}-{port}"
        self.server.health.set("", serving=True)
        LOG.info("%s listens on %s:%d", self.shell.worker_id, config.host, port)
        if config.health_port is not None:
            port = await self.server.start_health(host_and_port(config.host, config.health_port))
            LOG.info("gRPC health checks are on %s:%d", config.host, port)
        if config.metrics:
            served = self.shell.metrics.served(config.metrics_host, config.metrics_port)
            self._facts["metrics"] = host_and_port(config.metrics_host, stack.enter_context(served))
            LOG.info("metrics are on %s", self._facts["metrics"])

    async def _announce(self, stack: contextlib.AsyncExitStack) -> list[asyncio.Task[None]]:
        config = self._config
        if not config.redis_url:
            return []
        access = RedisAccess.of(config)
        store = await stack.enter_async_context(
            Store(config.redis_url, config.fleet, access=access)
        )
        self._announcer = Announcer(
            store, self.shell.record, new_incarnation(), on_superseded=self._end_engine
        )
        beside: list[Coroutine[None, None, None]] = [self._announcer.run()]
        if self._role.beside is not None:
            view = FleetView(store, poll_s=_POLL_S, only_news=True)
            beside += [view.run(), self._role.beside(self.shell, view, self._announcer.wake.set)]
        return [self._tasks.create_task(one) for one in beside]

    async def _follow_changes(self) -> None:
        """Updates health, the lease and the ready file: whether the worker can work."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            is_ready = self.shell.supervisor.life is not None and not self.shell.is_draining
            self.server.health.set(_WORKER_SERVICE, serving=is_ready)
            for kind, service in self._role.services.items():
                serves = is_ready and self.shell.duty.does(kind)
                self.server.health.set(service, serving=serves)
            if self._announcer is not None:
                self._announcer.wake.set()
            if is_ready and self._config.ready_file is not None:
                self._write_ready_file(self._config.ready_file)

    def _write_ready_file(self, path: Path) -> None:
        """Raises OSError only for the first engine, for which the parent waits."""
        facts = {"incarnation": self.shell.incarnation, **self._facts}
        try:
            rpc.write_ready_file(path, self.shell.address, **facts)
        except OSError as error:
            if not self._is_written:
                raise
            LOG.warning("%s could not be written: %s", path, error)
        self._is_written = True

    async def _end_all(self) -> None:
        self.shell.is_draining = self._is_ending = True
        self._changed.set()
        await self._end_after(self._config.drain_s)
        if len(self.shell.attempts):
            await self._end_engine()

    async def _end_engine(self) -> None:
        """Ends an engine with its attempts. Its port stays open meanwhile, because a closed port
        means that the engine is dead (`peer.py`).
        """
        if self._announcer is not None:
            await self._announcer.release()
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising}, timeout=STOP_S)
        self.shell.attempts.lose_engine(Draining("this worker has ended", retry_after_s=0.1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.shell.attempts.idle.wait()

    async def _end_after(self, deadline_s: float) -> None:
        attempts = self.shell.attempts
        try:
            async with asyncio.timeout(deadline_s):
                await attempts.idle.wait()
        except TimeoutError:
            LOG.warning("ending %d requests that are still running", len(attempts))
            attempts.fail_all(
                Draining(
                    "this worker is draining, and the request did not end in time",
                    retry_after_s=0.1,
                )
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await attempts.idle.wait()


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._shell = front.shell

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Ends an attempt in any state; an unknown transfer id is refused from now on."""
        attempt_id = wire.attempt_id(request.attempt)
        attempts = self._shell.attempts
        attempt = attempts.running.get(attempt_id.transfer_id)
        ended = self._shell.supervisor.ended
        if attempt is None:
            attempts.bury(attempt_id.transfer_id)
            return pb.AbortResponse(
                incarnation=self._shell.incarnation,
                drained=True,
                life_is_over=request.incarnation in ended,
            )
        attempt.deliver(Refused(f"the attempt was aborted: {request.reason[:200]}"))
        try:
            async with asyncio.timeout(_MOST_ABORT_S):
                await attempt.ended.wait()
        except TimeoutError:
            raise Unavailable("the attempt is still ending", retry_after_s=1.0) from None
        return pb.AbortResponse(
            incarnation=attempt.incarnation,
            was_running=True,
            drained=not attempt.engine_ended,
            life_is_over=request.incarnation in ended,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: _Context) -> pb.GetLoadResponse:
        """Returns the engine's last load, and the front's own state."""
        shell = self._shell
        life = shell.supervisor.life
        load = records.Load() if life is None else life.load
        return filled(
            pb.GetLoadResponse,
            load,
            worker=pb.WorkerRef(
                worker_id=shell.worker_id,
                incarnation=shell.incarnation,
                address=shell.address,
                engine_port=0 if life is None else life.ready.engine_port,
                place=shell.place,
            ),
            role=shell.duty.role,
            leaving=len(shell.attempts.leaving(shell.duty)),
            running=max(load.running, len(shell.attempts) - load.waiting),
            draining=shell.is_draining,
            tasks=len(asyncio.all_tasks()),
        )

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        if not request.deadline_s >= 0:  # also NaN
            raise InvalidRequest.of(
                "deadline_s", f"expected 0 seconds or more, got {request.deadline_s}"
            )
        self._front.drain(request.deadline_s)
        return pb.DrainResponse(running=len(self._shell.attempts))

    async def Undrain(self, request: pb.UndrainRequest, context: _Context) -> pb.UndrainResponse:
        """Admits again, unless the process is ending."""
        self._front.undrain()
        return pb.UndrainResponse(running=len(self._shell.attempts))

    async def SetRole(self, request: pb.SetRoleRequest, context: _Context) -> pb.SetRoleResponse:
        hand_over_s = request.hand_over_s if request.HasField("hand_over_s") else None
        self._front.set_role(request.role, hand_over_s, is_planned=request.planned)
        leaving = self._shell.attempts.leaving(self._shell.duty)
        return pb.SetRoleResponse(role=self._shell.duty.role, leaving=len(leaving))
