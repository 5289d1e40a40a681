"""One attempt at a request: two calls opened at once, relayed until one terminal.

Decode answers with its reservation, which is passed on to prefill; only prefill's push waits for
it. Whichever way the attempt ends, no call and no task of it is left. Not here: what comes after a
failed attempt (`relay.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import grpc.aio

from effuse.protos.errors import EffuseError, PeerLost
from effuse.router.aborts import Aborts
from effuse.router.decode_leg import SETTLE_S, DecodeCall, DecodeLeg
from effuse.router.detokenizer import Decoder
from effuse.router.fleet import Fleet
from effuse.router.job import ClientGone, Job, Sink
from effuse.router.legs import LegFailed, read, tell
from effuse.router.policy import Placement
from effuse.router.request import State
from effuse.v1 import worker_pb2
from effuse.v1.generation_pb2 import FinishReason

LOG: Final = logging.getLogger(__name__)
PrefillCall = grpc.aio.StreamStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]

LegTask: TypeAlias = "asyncio.Task[None]"


class Attempt:
    """Run once. The job's life has been placed on `placement` already."""

    def __init__(
        self,
        job: Job,
        placement: Placement,
        transfer_id: str,
        *,
        fleet: Fleet,
        aborts: Aborts,
        decoder: Decoder,
        sink: Sink,
        now: Callable[[], float],
    ) -> None:
        self._job = job
        self._placement = placement
        self._fleet = fleet
        self._aborts = aborts
        self._now = now
        self._id = worker_pb2.AttemptId(
            request_id=job.life.request_id, attempt=job.life.attempt, transfer_id=transfer_id
        )
        self._leg = DecodeLeg(job, placement, self._id, decoder=decoder, sink=sink, now=now)
        self._is_pushed = False

    async def run(self) -> FinishReason:
        """Relays to the end and says why it ended; raises `LegFailed` or `ClientGone`."""
        decode = self._open_decode()
        prefill = self._open_prefill()
        failed: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                legs = [] if prefill is None else self._start_prefill(group, prefill)
                reason = await self._leg.run(decode)
                if legs:
                    await asyncio.wait(legs, timeout=SETTLE_S)
                for leg in legs:
                    leg.cancel()
        except* (LegFailed, ClientGone) as failures:
            failed = _first(failures)
        finally:
            self._end(decode, prefill)
        if failed is not None:
            raise failed
        return reason

    # Opening and ending.

    def _open_decode(self) -> DecodeCall:
        job, placement = self._job, self._placement
        request = worker_pb2.DecodeRequest(
            attempt=self._id,
            incarnation=placement.decode.incarnation,
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            stop_token_ids=job.asked.stop_token_ids,
            sampling=job.asked.sampling,
            settings=job.asked.settings,
            drafts=job.asked.wants_drafts,
            resume=job.delivery.resume(),
        )
        if placement.prefill is None:
            request.local.SetInParent()
        else:
            request.remote.worker_id = placement.prefill.worker_id
            request.remote.incarnation = placement.prefill.incarnation
            request.remote.address = placement.prefill.address
        stub = self._fleet.peer(placement.decode.address).decode
        return stub.Decode(request, timeout=self._time_left())

    def _open_prefill(self) -> PrefillCall | None:
        worker = self._placement.prefill
        if worker is None:
            return None
        return self._fleet.peer(worker.address).prefill.Prefill(timeout=self._time_left())

    def _time_left(self) -> float:
        return max(0.001, self._job.deadline - asyncio.get_running_loop().time())

    def _end(self, decode: DecodeCall, prefill: PrefillCall | None) -> None:
        """Nothing here waits: a request that is cancelled ends at once, its workers soon after."""
        reason = f"the request is {self._job.life.state.value}"
        if not decode.done() or decode.cancelled():
            decode.cancel()
            self._aborts.send(self._placement.decode, self._id, reason)
        if prefill is not None and (not prefill.done() or prefill.cancelled()):
            prefill.cancel()
            if self._placement.prefill is not None and not self._is_pushed:
                self._aborts.send(self._placement.prefill, self._id, reason)

    # Prefill.

    def _start_prefill(self, group: asyncio.TaskGroup, call: PrefillCall) -> list[LegTask]:
        return [
            group.create_task(self._write_prefill(call)),
            group.create_task(self._read_prefill(call)),
        ]

    async def _write_prefill(self, call: PrefillCall) -> None:
        worker = self._placement.prefill
        assert worker is not None, "a prefill call without its worker"
        start = worker_pb2.PrefillStart(
            attempt=self._id,
            prompt_token_ids=self._job.prompt_token_ids,
            incarnation=worker.incarnation,
        )
        if not await tell(call, worker_pb2.PrefillRequest(start=start)):
            return
        reservation = await self._leg.reserved
        if await tell(call, worker_pb2.PrefillRequest(reservation=reservation)):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.done_writing()

    async def _read_prefill(self, call: PrefillCall) -> None:
        assert self._placement.prefill is not None, "a prefill call without its worker"
        peer = f"prefill worker {self._placement.prefill.worker_id}"
        try:
            while True:
                response = await read(call, peer)
                if not isinstance(response, worker_pb2.PrefillResponse):
                    break
                if response.HasField("computed"):
                    self._job.costs.prefilled = self._now()
                self._is_pushed = self._is_pushed or response.HasField("pushed")
            if not self._is_pushed:
                raise PeerLost(f"{peer} ended its call before the pages were pushed")
        except EffuseError as error:
            if self._job.life.state is State.DECODING:
                LOG.info("after its pages were verified, %s failed: %s", peer, error.message)
                return
            raise LegFailed(error, on_prefill=True) from error


def _first(failures: BaseExceptionGroup[LegFailed | ClientGone]) -> Exception:
    """The failure to act on: decode's where both legs failed, as it decides where to go next."""

    def rank(failure: BaseException) -> int:
        return 2 if isinstance(failure, LegFailed) and failure.on_prefill else 1

    found = [error for error in failures.exceptions if isinstance(error, LegFailed | ClientGone)]
    return min(found, key=rank)
