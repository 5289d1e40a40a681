"""A router put together: its parts, the loops beside them, and its start and end.

Everything that runs is a child of one task group here. Decisions are in the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from effuse.placement.fleet import FleetView
from effuse.placement.store import Store
from effuse.placement.writer import PlacementWriter
from effuse.protos.rpc import PUBLIC_LIMITS, RpcServer, serve, write_ready_file
from effuse.router.admission import Admission
from effuse.router.catalogue import Catalogue, ModelServicer
from effuse.router.cleanup import Cleanup
from effuse.router.config import RouterConfig
from effuse.router.fleet import Fleet
from effuse.router.ledger import Ledger
from effuse.router.metrics import Metrics
from effuse.router.readiness import GENERATION, MODELS, ROLES, Readiness
from effuse.router.relay import Relay
from effuse.router.seats import Seats
from effuse.router.server import GenerationServicer, Parts
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2_grpc, model_pb2_grpc

LOG: Final = logging.getLogger(__name__)
FLUSH_S: Final = 1.0


class Router:
    """One router process. `port`, `metrics_port` and `readiness` are there once `ready` is set."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        store: Store,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._store = store
        self._now = now
        self.view = FleetView(store)
        self._writer = PlacementWriter(store)
        self.fleet = Fleet(self.view, config.prefill, now)
        self.admission = Admission(config.max_concurrent_requests, config.max_queue)
        self.seats = Seats(self.fleet, self.admission, config.max_concurrent_requests)
        self.ledger = Ledger(now)
        self.metrics = Metrics()
        self.cleanup = Cleanup(self.fleet)
        self.port = 0
        self.metrics_port = 0
        self.ready = asyncio.Event()

    async def flush(self) -> bool:
        """Waits until Redis holds every placement; False if that took too long."""
        return await self._writer.flush(FLUSH_S)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set and what runs has ended or `drain_s` is over."""
        config = self._config
        rpc = RpcServer(replace(PUBLIC_LIMITS, max_message_bytes=config.max_message_bytes))
        catalogue = self._add_services(rpc)
        self.readiness = Readiness(rpc, self.fleet, catalogue)
        async with asyncio.TaskGroup() as beside:
            loops = [
                beside.create_task(self.view.run()),
                beside.create_task(self._writer.run()),
            ]
            await self.view.first_poll()
            with self._metrics_served() as self.metrics_port:
                if self.metrics_port:
                    LOG.info("metrics are on %s:%d", config.host, self.metrics_port)
                async with self.cleanup.running():
                    await self._start(rpc)
                    loops += [
                        beside.create_task(self.readiness.run()),
                        beside.create_task(self.seats.run()),
                    ]
                    await serve(rpc, stop, drain_s=config.drain_s, on_drain=self._drain)
            await self.flush()
            for loop in loops:
                loop.cancel()
        await self.fleet.close()
        self._tokenizer.close()

    def _add_services(self, rpc: RpcServer) -> Catalogue:
        catalogue = Catalogue(self.fleet)
        relay = Relay(
            self.fleet,
            self.cleanup,
            self._writer,
            self._tokenizer,
            router_id=f"router-{secrets.token_hex(6)}",
            max_retries=self._config.max_retries,
            now=self._now,
        )
        parts = Parts(
            tokenizer=self._tokenizer,
            catalogue=catalogue,
            admission=self.admission,
            seats=self.seats,
            ledger=self.ledger,
            relay=relay,
            lookup=self._store,
            metrics=self.metrics,
            max_request_s=self._config.max_request_s,
            now=self._now,
        )
        self._add_gauges(relay)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(parts), rpc.server
        )
        models = ModelServicer(self.fleet, catalogue)
        model_pb2_grpc.add_ModelServiceServicer_to_server(models, rpc.server)
        return catalogue

    def _add_gauges(self, relay: Relay) -> None:
        gauge = self.metrics.gauge
        gauge("num_requests_running", "Requests on workers", lambda: self.admission.num_running)
        gauge("num_requests_waiting", "Requests in the queue", lambda: self.admission.num_waiting)
        gauge("retries", "Attempts after the first, so far", lambda: relay.num_retries)
        gauge("aborts", "Attempts ended on workers, so far", lambda: self.cleanup.num_aborts)
        gauge(
            "calls_ended_late", "Calls cut off at their end, so far", lambda: self.cleanup.num_late
        )
        gauge("placements_dropped", "Placements never written", lambda: self._writer.dropped)

    async def _start(self, rpc: RpcServer) -> None:
        host = self._config.host
        self.port = await rpc.start(f"{host}:{self._config.port}", (GENERATION, MODELS))
        for role in ROLES:
            await rpc.set_serving(role, False)
        address = f"{host}:{self.port}"
        if self._config.ready_file is not None:
            write_ready_file(self._config.ready_file, address)
        LOG.info("listening on %s", address)
        self.ready.set()

    def _metrics_served(self) -> contextlib.AbstractContextManager[int]:
        port = self._config.metrics_port
        if port is None:
            return contextlib.nullcontext(0)
        return self.metrics.served(self._config.host, port)

    async def _drain(self) -> None:
        """Until the last request has ended the server still answers, if only to refuse."""
        self.admission.drain()
        await self.ledger.idle.wait()
