"""The requests that have not ended, and their blocks, for people who watch.

Without watchers it costs a request nothing. With watchers, decode workers are asked for drafts of
new requests. Not here: the description of workers (`catalogue.py`)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from typing import Final, cast

from google.protobuf.duration_pb2 import Duration

from effuse.protos.errors import InvalidRequest, Overloaded, Unavailable
from effuse.protos.rpc import Context
from effuse.router.admission import Admission
from effuse.router.known_requests import KnownRequests
from effuse.router.request import Request
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import monitor_pb2 as pb
from effuse.v1 import monitor_pb2_grpc, worker_pb2

MOST_WATCHERS: Final = 16
MOST_SHOWN: Final = 100
MOST_CHARACTERS: Final = 2000
MOST_TOKENS: Final = 1000
DEFAULT_INTERVAL_S: Final = 0.25
STALLED_S: Final = 30.0
"""A watcher that takes nothing for so long is gone."""


class Monitor:
    """The number of watchers, and the drafts for them. One per router."""

    def __init__(self) -> None:
        self.num_watchers = 0
        self.num_tokens = 0
        """Tokens of answers that became final so far."""
        self.num_first_blocks = 0
        """Answers that got their first final block so far."""
        self.first_block_s = 0.0
        """Seconds from arrival to that block, added up over these answers."""
        self.is_over = asyncio.Event()
        """Set once the router drains."""
        self._drafts: dict[str, dict[int, worker_pb2.BlockState]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a watcher; raises `Overloaded` if there are enough."""
        if self.num_watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} watch already", retry_after_s=1.0)
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1

    def note_commit(self, request: Request, before: int) -> None:
        """A request has more final tokens than `before`, and 0 are before its first block."""
        tokens = len(request.answer.token_ids) - before
        self.num_tokens += tokens
        if tokens and not before:
            self.num_first_blocks += 1
            self.first_block_s += request.costs.commit_times[0] - request.arrived

    def note_draft(self, request: Request, draft: worker_pb2.DecodeDraft) -> None:
        """A block in flight is so now."""
        if self.num_watchers:
            self._drafts.setdefault(request.name, {})[draft.token_offset] = draft.block

    def keep_drafts_of(self, requests: list[Request]) -> None:
        """Forgets those of all others."""
        names = {request.name for request in requests}
        self._drafts = {name: drafts for name, drafts in self._drafts.items() if name in names}

    def blocks(self, request: Request) -> list[pb.RunningBlock]:
        """Its blocks in flight, as far as they are known: those of the last commit, and drafts."""
        size, first = request.asked.model.block_size, len(request.answer.token_ids)
        offsets = accumulate([size] * len(request.answer.frontier), initial=first)
        known = dict(zip(offsets, request.answer.frontier, strict=False))
        for offset, block in self._drafts.get(request.name, {}).items():
            earlier = known.get(offset)
            if offset + size > first and (
                earlier is None or block.denoise_count >= earlier.denoise_count
            ):
                known[offset] = block
        return [
            pb.RunningBlock(token_offset=at, num_tokens=len(one.token_ids), masks=one.masks)
            for at, one in sorted(known.items())
        ]


class MonitorServicer(monitor_pb2_grpc.MonitorServiceServicer):
    """MonitorService."""

    def __init__(
        self,
        monitor: Monitor,
        router_id: str,
        requests: KnownRequests,
        admission: Admission,
        shows_texts_by: Tokenizer | None,
    ) -> None:
        """shows_texts_by: the tokenizer, if watchers may see ids, prompts and texts of requests."""
        self._monitor = monitor
        self._router_id = router_id
        self._requests = requests
        self._admission = admission
        self._tokenizer = shows_texts_by

    async def WatchRequests(  # type: ignore[override]  # the stub knows only generators
        self, request: pb.WatchRequestsRequest, context: Context
    ) -> None:
        """The running requests, at an interval; ends with the router or by its caller."""
        interval_s = _interval(request.interval)
        monitor = self._monitor
        over = monitor.is_over
        with monitor.watching():
            while not over.is_set():
                try:
                    async with asyncio.timeout(STALLED_S):
                        await cast(Awaitable[None], context.write(self._snapshot()))
                except TimeoutError:
                    raise Unavailable("the caller read nothing for too long") from None
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await over.wait()

    def _snapshot(self) -> pb.WatchRequestsResponse:
        requests = [one for request in self._requests.running_now() for one in request.parts]
        self._monitor.keep_drafts_of(requests)
        return pb.WatchRequestsResponse(
            router=self._router_id,
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            requests=[self._describe(request) for request in requests[:MOST_SHOWN]],
            num_tokens=self._monitor.num_tokens,
            num_first_blocks=self._monitor.num_first_blocks,
            first_block_seconds=self._monitor.first_block_s,
        )

    def _describe(self, request: Request) -> pb.RunningRequest:
        asked, answer, which = request.asked, request.answer, request.name[len(request.id) :]
        found = pb.RunningRequest(
            name=hashlib.sha256(request.id.encode()).hexdigest()[:12] + which,
            model=asked.model.name,
            state=answer.state.value,
            prefill_worker=request.attempts.prefill_worker,
            decode_worker=request.attempts.decode_worker,
            attempt=request.attempts.count,
            age=timedelta(seconds=self._requests.age_s(request)),
            prompt_tokens=len(request.prompt.token_ids),
            max_tokens=request.prompt.max_tokens,
            num_tokens=len(answer.token_ids),
            block_size=asked.model.block_size,
            blocks=self._monitor.blocks(request),
        )
        if (tokenizer := self._tokenizer) is not None:
            found.name = request.name
            found.prompt = (asked.prompt or "")[:MOST_CHARACTERS]
            tail = [one for one in answer.token_ids[-MOST_TOKENS:] if tokenizer.is_text(one)]
            found.text = tokenizer.decode(tail)[-MOST_CHARACTERS:]
        return found


def _interval(asked: Duration) -> float:
    """Seconds; by hand, as protobuf's own conversion overflows, and takes parts of two signs."""
    interval_s = asked.seconds + asked.nanos / 1e9
    if interval_s == 0:
        return DEFAULT_INTERVAL_S
    if not (0.05 <= interval_s <= 60 and 0 <= asked.nanos < 1_000_000_000):
        found = f"{asked.seconds} s and {asked.nanos} ns"
        raise InvalidRequest.of("interval", f"expected 0.05 s to 60 s, got {found}")
    return interval_s
