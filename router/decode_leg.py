"""The decode leg of an attempt: its events become text for the client, in order, once.

Takes each event by the tables of `request.py` and the rule of `delivery.py`; a worker that breaks
either is as good as lost. Not here: opening and ending calls (`attempt.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

import grpc.aio

from effuse.protos.errors import DeadlineExceeded, EffuseError, PeerLost, Refused, TransferFailed
from effuse.router.delivery import BrokenStream
from effuse.router.detokenizer import draft_text
from effuse.router.job import Job, Sink
from effuse.router.legs import LegFailed, read
from effuse.router.policy import Placement
from effuse.router.request import Event, IllegalTransition, State
from effuse.router.router import Router
from effuse.v1 import generation_pb2, worker_pb2
from effuse.v1.generation_pb2 import FinishReason

DecodeCall = grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse]


class DecodeLeg:
    """Follows one Decode call."""

    def __init__(
        self,
        router: Router,
        job: Job,
        placement: Placement,
        attempt: worker_pb2.AttemptId,
        sink: Sink,
    ) -> None:
        self._decoder = router.tokenizer
        self._now = router.now
        self._job = job
        self._placement = placement
        self._id = attempt
        self._sink = sink
        self._peer = f"decode worker {placement.decode.worker_id}"

    async def run(
        self,
        call: DecodeCall,
        on_reserved: Callable[[worker_pb2.Reservation], Awaitable[None]] | None,
    ) -> FinishReason:
        """Relays to the last event that counts and says why it ended; raises `LegFailed` or
        `ClientGone`."""
        peer = self._peer
        try:
            while True:
                response = await read(call, peer)
                if not isinstance(response, worker_pb2.DecodeResponse):
                    raise PeerLost(f"{peer} ended its call before the answer ended")
                for event in (response, *response.then):
                    reason = await self._take(event)
                    if reason is not None:
                        return reason
                if on_reserved is not None and response.HasField("reservation"):
                    await on_reserved(response.reservation)
        except (BrokenStream, IllegalTransition) as error:
            broken = PeerLost(f"{peer} broke the protocol: {error}")
            raise LegFailed(broken, on_prefill=False) from error
        except EffuseError as error:
            self._blame(error)

    async def _take(self, response: worker_pb2.DecodeResponse) -> FinishReason | None:
        """Handles one event; a reason to end where it is the last one that counts."""
        match response.WhichOneof("event"):
            case "reservation":
                self._take_reservation(response.reservation)
            case "verified":
                self._take_verified(response.verified)
            case "commit":
                if await self._take_commit(response.commit):
                    return generation_pb2.FINISH_REASON_STOP
            case "draft":
                await self._take_draft(response.draft)
            case "finished":
                return await self._take_finished(response.finished)
        return None

    def _take_reservation(self, reservation: worker_pb2.Reservation) -> None:
        decode = self._placement.decode
        self._job.life.handle(Event.RESERVED, self._now())
        if reservation.incarnation != decode.incarnation or reservation.attempt != self._id:
            raise Refused(f"{decode.worker_id} answered for another life or attempt")
        if self._placement.prefill is not None:
            self._job.costs.connector = reservation.connector

    def _take_verified(self, verified: worker_pb2.PrefillVerified) -> None:
        self._job.life.handle(Event.VERIFIED, self._now())
        costs = self._job.costs
        costs.prefilled = costs.prefilled or self._now()
        costs.handoff_s += verified.handoff_s
        costs.kv_bytes += verified.bytes
        costs.kv_pages += verified.pages

    async def _take_commit(self, commit: worker_pb2.DecodeCommit) -> bool:
        """Delivers what is new; True where a stop string ends the answer."""
        job, now = self._job, self._now()
        job.life.handle(Event.COMMITTED, now, f"{commit.token_offset}+{len(commit.token_ids)}")
        new = job.delivery.accept(commit.token_offset, commit.token_ids, commit.frontier)
        job.costs.forwards = commit.forward_passes
        job.costs.first_block = job.costs.first_block or now
        offset = job.answer.num_tokens
        text = job.answer.push(new)
        await self._deliver(offset, new[: job.answer.num_tokens - offset], text)
        return job.answer.is_stopped

    async def _deliver(self, offset: int, token_ids: list[int], text: str) -> None:
        if not token_ids and not text:
            return
        costs = self._job.costs
        await self._sink.commit(
            generation_pb2.BlockCommit(
                token_offset=offset,
                num_tokens=len(token_ids),
                text=text,
                token_ids=token_ids if self._job.asked.wants_token_ids else (),
                forward_passes=costs.earlier_forwards + costs.forwards,
            )
        )

    async def _take_draft(self, draft: worker_pb2.DecodeDraft) -> None:
        block = draft.block
        skipped = max(0, -draft.token_offset)  # the prompt's ragged tail
        masked = [bool(block.masks[at // 8] >> at % 8 & 1) for at in range(len(block.token_ids))]
        await self._sink.draft(
            generation_pb2.BlockDraft(
                token_offset=draft.token_offset,
                text=draft_text(self._decoder, block.token_ids[skipped:], masked[skipped:]),
                num_masks=sum(masked),
            )
        )

    async def _take_finished(self, finished: worker_pb2.DecodeFinished) -> FinishReason:
        job = self._job
        delivered = len(job.delivery.token_ids)
        if finished.num_tokens != delivered:
            raise BrokenStream(f"{finished.num_tokens} tokens at the end, {delivered} delivered")
        if job.life.state is not State.DECODING:
            raise IllegalTransition(job.life.state, Event.FINISHED)
        job.costs.forwards = finished.forward_passes
        job.costs.preemptions += finished.preemptions
        await self._deliver(job.answer.num_tokens, [], job.answer.flush())
        if finished.stopped or job.answer.is_stopped:
            return generation_pb2.FINISH_REASON_STOP
        return generation_pb2.FINISH_REASON_LENGTH

    def _blame(self, error: EffuseError) -> NoReturn:
        """Decode tells of a handoff that failed: it is the writer that may be replaced."""
        is_remote = self._placement.prefill is not None
        at_handoff = self._job.life.state is State.PREFILLING
        on_prefill = (
            is_remote and at_handoff and isinstance(error, TransferFailed | DeadlineExceeded)
        )
        raise LegFailed(error, on_prefill=on_prefill) from error
