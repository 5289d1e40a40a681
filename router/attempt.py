"""One attempt at a request: its calls opened, the prompt first, and relayed until one terminal.

Prefill computes from the first moment; decode answers with its reservation, which is passed on, and
only prefill's push waits for it. A patient attempt begins to prefill once pages are held. Whichever
way the attempt ends, its calls are ended here or handed to `cleanup.py`. Not here: what comes after
a failed attempt (`relay.py`).
"""

from __future__ import annotations

import asyncio

from effuse.router.cleanup import ReaderTask
from effuse.router.decode_leg import DecodeCall, DecodeLeg
from effuse.router.job import Job, Sink
from effuse.router.legs import LegFailed
from effuse.router.policy import Placement
from effuse.router.prefill_leg import PrefillLeg
from effuse.router.router import Router
from effuse.v1 import worker_pb2
from effuse.v1.generation_pb2 import FinishReason


class Attempt:
    """Run once. The job's life has been placed on `placement` already."""

    def __init__(
        self,
        router: Router,
        job: Job,
        placement: Placement,
        transfer_id: str,
        sink: Sink,
        is_patient: bool,
    ) -> None:
        self._router = router
        self._job = job
        self._placement = placement
        self._is_patient = is_patient
        self._id = worker_pb2.AttemptId(
            request_id=job.life.request_id, attempt=job.life.attempt, transfer_id=transfer_id
        )
        self._leg = DecodeLeg(router, job, placement, self._id, sink)
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeCall | None = None
        self._is_broken_off = False  # by us, since prefill failed

    async def run(self) -> FinishReason:
        """Relays to the end and says why it ended; raises `LegFailed` or `ClientGone`."""
        try:
            is_remote = self._placement.prefill is not None
            if is_remote and not self._is_patient:
                # Decode has time until the prompt is computed; the prompt has none to lose.
                await self._begin_prefill()
            decode = self._decode = self._open_decode()
            reason = await self._leg.run(decode, self._push_to if is_remote else None)
        except LegFailed as failure:
            self._leave()
            raise self._cause(failure) from failure.__cause__
        except BaseException:
            self._leave()
            raise
        if self._job.answer.is_stopped:  # its workers know nothing of that
            self._leave()
        else:
            self._router.cleanup.settle_calls([decode], self._tasks(), self._end)
        return reason

    # Opening.

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
            request.remote.engine_port = placement.prefill.engine_port
        stub = self._router.fleet.peer(placement.decode.address).decode
        return stub.Decode(request, timeout=self._time_left())

    async def _begin_prefill(self) -> PrefillLeg:
        worker = self._placement.prefill
        assert worker is not None, "a remote prefill without its worker"
        call = self._router.fleet.peer(worker.address).prefill.Prefill(timeout=self._time_left())
        leg = PrefillLeg(call, worker, self._job, on_failure=self._break_off, now=self._router.now)
        self._prefill = leg
        await leg.begin(self._id)
        return leg

    async def _push_to(self, reservation: worker_pb2.Reservation) -> None:
        prefill = self._prefill or await self._begin_prefill()
        await prefill.push_to(reservation)

    def _time_left(self) -> float:
        return max(0.001, self._job.deadline - asyncio.get_running_loop().time())

    # Ending.

    def _break_off(self) -> None:
        """Prefill has failed: nothing will come of decode's call."""
        self._is_broken_off = self._decode is not None and self._decode.cancel()

    def _cause(self, failure: LegFailed) -> LegFailed:
        """The failure to act on: decode's own, as it decides where to go next, before prefill's."""
        prefill = self._prefill
        if self._is_broken_off and prefill is not None and prefill.failure is not None:
            return prefill.failure
        return failure

    def _leave(self) -> None:
        """Ends what is open, at once."""
        self._end()
        if tasks := self._tasks():
            self._router.cleanup.settle_calls([], tasks)

    def _tasks(self) -> list[ReaderTask]:
        prefill = self._prefill
        return [] if prefill is None or prefill.task is None else [prefill.task]

    def _end(self) -> None:
        """Nothing here waits: a request that is cancelled ends at once, its workers soon after."""
        reason = f"the request is {self._job.life.state.value}"
        decode, prefill = self._decode, self._prefill
        if decode is not None and (not decode.done() or decode.cancelled()):
            decode.cancel()
            self._router.cleanup.send_abort(self._placement.decode, self._id, reason)
        if prefill is not None and (not prefill.call.done() or prefill.call.cancelled()):
            prefill.call.cancel()
            if not prefill.is_pushed:
                self._router.cleanup.send_abort(prefill.worker, self._id, reason)
