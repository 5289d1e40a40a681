"""A router's process: parses the flags, starts, follows the fleet, serves until SIGTERM, drains.

Everything that runs is a child of one task group here. Decisions are in the parts of `router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import grpc.aio
import uvloop

from effuse.compat import kserve_pb2_grpc, vllm_engine_pb2_grpc
from effuse.config.access import host_and_port
from effuse.placement.access import RedisAccess
from effuse.placement.leases import pause_s
from effuse.placement.records import WorkerRecord
from effuse.placement.store import Store
from effuse.protos import rpc
from effuse.protos.rpc import RpcServer
from effuse.protos.tls import ServerTls, TlsFiles
from effuse.router.config import END_S, RouterConfig, parse
from effuse.router.fleet import live_workers
from effuse.router.handler import Serving
from effuse.router.kserve import InferenceServicer
from effuse.router.policy import WorkerLife
from effuse.router.role_changes import RoleDriver
from effuse.router.router import Router
from effuse.router.services import GenerationServicer, ModelServicer, MonitorServicer
from effuse.router.steering import LOOK_S
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory
from effuse.router.vllm_engine import VllmEngineServicer
from effuse.telemetry import logs
from effuse.telemetry.traces import Traces, TracesUnavailable
from effuse.v1 import generation_pb2_grpc, model_pb2_grpc, monitor_pb2_grpc

if TYPE_CHECKING:
    from effuse.router.http_server import HttpServer

LOG: Final = logging.getLogger(__name__)
GENERATION: Final = "effuse.v1.GenerationService"
MODELS: Final = "effuse.v1.ModelService"
MONITOR: Final = "effuse.v1.MonitorService"
VLLM_ENGINE: Final = "vllm.grpc.engine.VllmEngine"
KSERVE: Final = "inference.GRPCInferenceService"
SERVICES: Final = (GENERATION, MODELS, MONITOR, VLLM_ENGINE, KSERVE)
ROLES: Final = ("router", "prefill", "decode")
LiveWorkers = tuple[Sequence[WorkerRecord], Sequence[WorkerRecord]]  # prefill, decode
FOLLOW_S: Final = 0.2
WARM_S: Final = 30.0  # longest that a start waits for the first warm link of a worker
FLUSH_S: Final = 1.0
SHARE_S: Final = 1.0
METRICS_S: Final = 1.0
KNOW_S: Final = 10.0
CATCH_UP_S: Final = 1.0


def main(argv: Sequence[str]) -> int:
    """Runs a router until a signal comes; its exit status, 1 after a line of the log if it cannot
    run."""
    config = parse(argv)
    logs.set_up("router", config.log_level, config.log_format)
    errors: list[str] = []
    try:
        tokenizer = Tokenizer.load(
            config.model or bundled_directory(), threads=config.tokenizer_threads
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, tokenizer))
    except* (TokenizerError, OSError, TracesUnavailable) as failed:
        errors = _texts(failed)
    if errors:
        LOG.error("%s", "; ".join(errors))
    return int(bool(errors))


async def _run(config: RouterConfig, tokenizer: Tokenizer) -> None:
    access = RedisAccess.of(config)
    store_of_fleet = Store(config.redis_url, config.fleet, access=access)
    traces = Traces.to(config.otlp_traces_endpoint, "router")
    async with rpc.shutdown_signal() as stop, store_of_fleet as store:
        await serve(Router(config, tokenizer, store, traces=traces), stop)
    await asyncio.to_thread(traces.close)


async def serve(router: Router, stop: asyncio.Event) -> None:
    """Serves until `stop` is set and all requests have ended or `drain_s` is over."""
    config = router.config

    async with asyncio.TaskGroup() as beside:
        loops = [
            beside.create_task(router.fleet.view.run()),
            beside.create_task(router.placements.run()),
            beside.create_task(_repeat(router.poison.share, lambda: SHARE_S)),
        ]
        await router.fleet.view.polled.wait()
        if config.share_port:  # another router may end as soon as this one listens
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KNOW_S):
                    while not router.fleet.view.is_current:  # noqa: ASYNC110  # it is polled anyway
                        await asyncio.sleep(FOLLOW_S)

        async def exchange_seats() -> None:
            await router.seats.exchange(router.id, router.ports.address)

        await exchange_seats()  # before the first claim
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await router.prefixes.catch_up()
        notes = _repeat(router.prefixes.exchange, lambda: router.prefixes.pause_s)
        loops.append(beside.create_task(notes))
        others = router.seats.others
        loops.append(beside.create_task(_repeat(exchange_seats, lambda: others.pause_s)))
        with contextlib.ExitStack() as stack:
            if not _serve_metrics(router, stack):
                loops.append(beside.create_task(_serve_metrics_later(router, stack)))
            async with router.cleanup.running():
                http = _listen_http(router)
                server = await _start(router)
                drain_s = config.drain_s + END_S
                if http is not None:
                    serving = beside.create_task(http.run_until(stop, drain_s))
                loops.append(beside.create_task(_follow_fleet(router, server)))
                # Beside the rest, because workers that are out may be slow to answer.
                asks = _repeat(router.fleet.ask_absent, lambda: FOLLOW_S)
                steers = _repeat(partial(_steer, RoleDriver(router)), lambda: LOOK_S)
                loops += [beside.create_task(asks), beside.create_task(steers)]
                await rpc.serve(
                    server, stop, drain_s=drain_s, on_drain=router.drain, closes_first=True
                )
                if http is not None:
                    await serving  # it has a deadline of its own
        await router.placements.flush(FLUSH_S)
        for loop in loops:
            loop.cancel()
        await others.release()  # not before: the lease would be taken again
    await router.fleet.peers.close()
    router.tokenizer.close()


async def _start(router: Router) -> RpcServer:
    """Listens, not ready yet as far as health goes. Raises OSError if it cannot."""
    config = router.config
    limits = replace(
        rpc.PUBLIC_LIMITS,
        max_message_bytes=config.max_message_bytes,
        max_age_s=config.connection_age_s,
    )
    files = _tls_files(config)
    tls = None if files is None else ServerTls(files)
    server = RpcServer(limits, shares_port=config.share_port, tls=tls, doorkeeper=router.keys)
    _add_services(router, server.server)
    router.ports.grpc = await server.start(host_and_port(config.host, config.port), SERVICES)
    router.ports.address = host_and_port(config.host, router.ports.grpc)
    server.health.set(MONITOR, serving=True)
    for role in ROLES:
        server.health.set(role, serving=False)
    try:
        if config.health_port is not None:
            health_at = host_and_port(config.host, config.health_port)
            LOG.info(
                "gRPC health checks are on %s:%d", config.host, await server.start_health(health_at)
            )
        if config.ready_file is not None:
            facts = _ready_facts(router, live_workers(router.fleet.candidates()))
            rpc.write_ready_file(config.ready_file, router.ports.address, **facts)
    except OSError:
        await server.stop(0.0)
        raise
    LOG.info("listening on %s", router.ports.address)
    router.ports.ready.set()
    return server


def _listen_http(router: Router) -> HttpServer | None:
    """Takes the port of HTTP; None if there is to be none. Raises OSError if it cannot."""
    config = router.config
    if config.http_port is None:
        return None
    from effuse.router.http_server import HttpServer  # 8 MB that only this port needs
    from effuse.router.openai_api import OpenAiApi

    server = HttpServer(OpenAiApi(Serving(router)).app, _tls_files(config))
    router.ports.http = server.listen(config.host, config.http_port, shares_port=config.share_port)
    scheme = "http" if config.tls_cert is None else "https"
    url = f"{scheme}://{host_and_port(config.host, router.ports.http)}/v1"
    router.ports.facts["http"] = url
    LOG.info("OpenAI's API is on %s", url)
    return server


def _tls_files(config: RouterConfig) -> TlsFiles | None:
    if config.tls_cert is None:
        return None
    return TlsFiles(cert=config.tls_cert, key=config.tls_key, ca=config.tls_client_ca)


def _ready_facts(
    router: Router, live: LiveWorkers, counts: tuple[int, int] = (0, 0)
) -> dict[str, str]:
    """The ready file's content beside the address: other addresses, how many prefill and decode
    workers are ready, and which workers take part."""
    workers = ",".join(one.worker_id for one in chain(*live))
    ready = {"prefill": str(counts[0]), "decode": str(counts[1]), "workers": workers}
    return ready | router.ports.facts


def _add_services(router: Router, server: grpc.aio.Server) -> None:
    serving = Serving(router)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(serving), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(serving), server)
    monitor_pb2_grpc.add_MonitorServiceServicer_to_server(MonitorServicer(router), server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(serving), server)
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(serving), server)


def _serve_metrics(router: Router, stack: contextlib.ExitStack) -> bool:
    """Serves metrics until the stack is left; False if another router on our port still has that of
    the metrics. Raises OSError if another process has it."""
    config = router.config
    if not config.metrics:
        return True
    try:
        served = router.metrics.served(config.metrics_host, config.metrics_port)
        router.ports.metrics = stack.enter_context(served)
    except OSError:
        if not config.share_port:
            raise
        return False
    at = router.ports.facts["metrics"] = host_and_port(config.metrics_host, router.ports.metrics)
    LOG.info("metrics are on %s", at)
    return True


async def _serve_metrics_later(router: Router, stack: contextlib.ExitStack) -> None:
    """The same, once the other router has ended."""
    LOG.info(
        "port %s still serves another router's metrics; waiting for it", router.config.metrics_port
    )
    while not _serve_metrics(router, stack):  # noqa: ASYNC110  # no port tells that it is free
        await asyncio.sleep(METRICS_S)


async def _follow_fleet(router: Router, server: RpcServer) -> None:
    """Keeps queue, waiting requests, health and channels in step with the fleet, until
    cancelled."""
    written = logged = dict[str, str]()
    ready = ReadyWorkers(time.monotonic)
    while True:
        began = time.thread_time()
        candidates = router.fleet.look()
        live = live_workers(candidates)
        router.seats.count(candidates)
        ready.look(live)
        router.seats.give_up_waiting()
        facts, path = _ready_facts(router, live, ready.counts), router.config.ready_file
        if path is not None and facts != written:
            try:
                rpc.update_ready_file(path, router.ports.address, **facts)
                written = facts
            except (OSError, ValueError) as error:  # a full disk, or no JSON any more
                if facts != logged:
                    LOG.warning("%s could not be written: %s", path, error)
                logged = facts
        router.metrics.show_workers(candidates)
        with _beside_requests("could not plan roles; trying again"):
            if router.steering.look(candidates, router.admission.waiting_by_model()):
                router.metrics.plans.show(router.steering.models)
        _set_health(router, server, live)
        await router.fleet.forget_ended()
        used_s = time.thread_time() - began
        await asyncio.sleep(pause_s(FOLLOW_S, used_s))


class ReadyWorkers:
    """The number of ready workers, for commands that wait for a fleet.

    A worker without a warm link counts only after WARM_S: its links may never get warm."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts = (0, 0)  # prefill and decode workers
        self._now = now
        self._cold_since: dict[WorkerLife, float] = {}

    def look(self, live: LiveWorkers) -> None:
        prefill, decode = live
        now = self._now()
        cold = cold_lives(prefill, decode)
        self._cold_since = {life: self._cold_since.get(life, now) for life in cold}
        unready = {life for life, since in self._cold_since.items() if now - since < WARM_S}
        self.counts = (
            sum(worker.life not in unready for worker in prefill),
            sum(worker.life not in unready for worker in decode),
        )


def cold_lives(prefill: Sequence[WorkerRecord], decode: Sequence[WorkerRecord]) -> set[WorkerLife]:
    """Of these workers, those that could have a warm link among each other and have none."""
    ready = {record.life for record in (*prefill, *decode)}
    warm: set[WorkerLife] = set()
    for writer in prefill:
        peers = ready.intersection((link.peer, link.peer_incarnation) for link in writer.links)
        warm |= {writer.life, *peers} if peers else set()
    writers = [one for one in prefill if one.warms_links]
    return {
        *(r.life for r in decode if r.life not in warm and any(w.is_cold_to(r) for w in writers)),
        *(w.life for w in writers if w.life not in warm and any(map(w.is_cold_to, decode))),
    }


@contextlib.contextmanager
def _beside_requests(failure: str) -> Iterator[None]:
    """Logs a fault of work that requests do not need, and goes on."""
    try:
        yield
    except Exception:
        LOG.exception("%s", failure)


async def _steer(driver: RoleDriver) -> None:
    with _beside_requests("could not carry out the plan of roles; trying again"):
        await driver.step()


async def _repeat(act: Callable[[], Awaitable[object]], pause_s: Callable[[], float]) -> None:
    while True:
        await act()
        await asyncio.sleep(pause_s())


def _set_health(router: Router, server: RpcServer, live: LiveWorkers) -> None:
    """Sets gRPC health, by service and by role, to whether the router can do its work now. Liveness
    is the empty name, and always serving."""
    prefill, decode = live
    can_serve = router.seats.can_serve()
    for name in (GENERATION, VLLM_ENGINE, KSERVE, "router"):
        server.health.set(name, serving=can_serve)
    server.health.set(MODELS, serving=bool(router.seats.catalogue.live()))
    server.health.set("prefill", serving=bool(prefill))
    server.health.set("decode", serving=bool(decode))


def _texts(group: BaseExceptionGroup[BaseException]) -> list[str]:
    texts: list[str] = []
    for error in group.exceptions:
        texts += _texts(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return texts
