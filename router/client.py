"""Messages for clients about a request, and the two ways in which an answer reaches a client: at
once at its end, or as it grows."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from effuse.client.answer import copy_end
from effuse.protos.channels import filled, numbers_of
from effuse.protos.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EffuseError,
    EndedById,
)
from effuse.router.policy import Placement
from effuse.router.request import AnyRequest, EarlyRequest, Piece, Request
from effuse.router.request_states import State
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

MASK_GLYPH: Final = "\N{LIGHT SHADE}"
STALLED_S: Final = 60.0
"""A client that takes nothing for so long is gone, as far as its slot and its pages go."""

ON_THE_WAY_S: Final = 0.02
"""How long a cancellation may take from a client's deadline to here, and still count as that."""
RETRY_AFTER_S: Final = 1.0
"""When clients should ask again after no worker could answer: about as long as a lease takes to
show."""
CANNOT_SERVE: Final = "no live worker can accept a request"
Failed = TypeVar("Failed", bound=EffuseError)
T = TypeVar("T")
Translate = Callable[[pb.GenerateStreamResponse], Message | None]
Send = Callable[[pb.GenerateStreamResponse], Awaitable[None]]
"""Sends a client one event of its answer as that grows; raises `ClientGone`."""
STATES: Final[Mapping[str, Any]] = numbers_of("REQUEST_STATE_", pb.RequestState.items())
"""States of requests for clients; the other states of a request count as running."""


def echo_of(request: Request, text: str) -> pb.GenerateStreamResponse:
    """The prompt, with this text, for a client that wants it back."""
    ids = request.prompt.token_ids if request.asked.sent.output.token_ids else ()
    echo = pb.PromptEcho(text=text, token_ids=ids)
    return pb.GenerateStreamResponse(request_id=request.id, echo=echo)


def commit_of(request: Request, piece: Piece) -> pb.GenerateStreamResponse | None:
    """New final tokens and text; None if there are none."""
    if not piece.token_ids and not piece.text:
        return None
    commit = pb.BlockCommit(
        token_offset=piece.offset,
        num_tokens=len(piece.token_ids),
        text=piece.text,
        token_ids=piece.token_ids if request.asked.sent.output.token_ids else (),
        forward_passes=request.costs.all_forwards,
        logprobs=piece.logprobs,
    )
    # By its seed a client that loses its router asks for the same answer again.
    seed = None if piece.offset else request.asked.sampling.seed
    return pb.GenerateStreamResponse(
        request_id=request.id, answer_index=request.index, commit=commit, seed=seed
    )


def draft_of(
    request: Request, draft: worker_pb2.DecodeDraft, tokenizer: Tokenizer
) -> pb.GenerateStreamResponse:
    block = draft.block
    skipped = max(0, -draft.token_offset)  # the prompt's ragged tail
    masked = [bool(block.masks[at // 8] >> at % 8 & 1) for at in range(len(block.token_ids))]
    shown = pb.BlockDraft(
        token_offset=draft.token_offset,
        text=draft_text(tokenizer, block.token_ids[skipped:], masked[skipped:]),
        num_masks=sum(masked),
    )
    return pb.GenerateStreamResponse(request_id=request.id, answer_index=request.index, draft=shown)


def progress_of(request: Request, computed_tokens: int) -> pb.GenerateStreamResponse:
    """The client's event of a part of its prompt that is computed."""
    num_tokens = len(request.prompt.token_ids)
    progress = pb.PromptProgress(
        computed_tokens=min(computed_tokens, num_tokens), prompt_tokens=num_tokens
    )
    return pb.GenerateStreamResponse(
        request_id=request.id, answer_index=request.index, progress=progress
    )


def draft_text(decoder: Tokenizer, token_ids: Sequence[int], masked: Sequence[bool]) -> str:
    """The text of a block in flight: each run between masks by itself, each mask as U+2591."""
    parts: list[str] = []
    run: list[int] = []
    for token_id, is_mask in zip(token_ids, masked, strict=True):
        if is_mask:
            parts += [decoder.decode(run) if run else "", MASK_GLYPH]
            run = []
        elif decoder.is_text(token_id):
            run.append(token_id)
    parts.append(decoder.decode(run) if run else "")
    return "".join(parts)


def finished_of(request: Request, reason: pb.FinishReason, now: float) -> pb.GenerateStreamResponse:
    finished = pb.Finished(
        finish_reason=reason,
        usage=usage_of(request),
        stats=stats_of(request, now),
        model=request.asked.model.name,
        seed=request.asked.sampling.seed,
        deterministic=request.answer.is_deterministic,
    )
    if request.answer.text.matched_stop is not None:
        finished.stop_string = request.answer.text.matched_stop
    elif request.answer.end_token_id is not None:
        finished.end_token_id = request.answer.end_token_id
    index = request.index
    return pb.GenerateStreamResponse(request_id=request.id, answer_index=index, finished=finished)


def usage_of(request: Request) -> pb.Usage:
    """Token counts so far; only the first answer counts the prompt's."""
    prompt_tokens = 0 if request.index else len(request.prompt.token_ids)
    return pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=request.num_tokens)


def prompt_tokens_of(request: Request) -> int:
    """Tokens of its prompt, also if the answer was kept; 0 before the prompt is encoded."""
    return len(request.prompt.token_ids) or request.kept_prompt_tokens or 0


def stats_of(request: Request, now: float) -> pb.GenerationStats:
    costs, attempts, arrived = request.costs, request.attempts, request.arrived
    forwards = costs.all_forwards
    first_block = costs.commit_times[0] if costs.commit_times else arrived
    return filled(
        pb.GenerationStats,
        costs,
        attempts,
        queue_duration=timedelta(seconds=costs.queue_s),
        prefill_duration=timedelta(seconds=max(0.0, costs.prefilled - arrived)),
        handoff_duration=timedelta(seconds=costs.handoff_s),
        time_to_first_block=timedelta(seconds=max(0.0, first_block - arrived)),
        total_duration=timedelta(seconds=now - arrived),
        forward_passes=forwards,
        tokens_per_forward=request.num_tokens / forwards if forwards else 0.0,
        cached_prompt_tokens=costs.cached_tokens,
    )


def describe(request: AnyRequest) -> pb.GetRequestResponse:
    if isinstance(request, EarlyRequest):
        return pb.GetRequestResponse(request_id=request.id, state=pb.REQUEST_STATE_QUEUED)
    state = STATES.get(request.answer.state.value, pb.REQUEST_STATE_RUNNING)
    if request.answers and not request.answer.is_ended:
        state = pb.REQUEST_STATE_RUNNING
    first = request.parts[0].attempts
    return pb.GetRequestResponse(
        request_id=request.id,
        state=state,
        attempt=first.count,
        prefill_worker=first.prefill_worker,
        decode_worker=first.decode_worker,
        status=request.status,
    )


def failed(
    kind: type[Failed],
    why: str,
    request: AnyRequest,
    labels: Mapping[str, str] = MappingProxyType({}),
    **facts: Any,
) -> Failed:
    """The error of a request, with its progress and setbacks so far, and such `facts` of errors as
    `retry_after_s`."""
    text = "; ".join(filter(None, (why, progress_text(request))))
    return kind(text, labels={**progress_labels(request), **labels}, **facts)


def time_is_over(request: AnyRequest, *, is_cut_off: bool) -> EffuseError:
    """The error of a request whose own time has run out, or that of its router (`is_cut_off`)."""
    if request.is_ended_by_id:
        return EndedById("the request was cancelled by its id", labels=progress_labels(request))
    if is_cut_off:
        why = "this router ended before the answer was complete; send the request again"
        return failed(Draining, why, request, retry_after_s=RETRY_AFTER_S)
    state = State.QUEUED.value
    if isinstance(request, Request):
        state = "being answered" if request.answers else request.answer.state.value
    why = f"not answered within {request.limit_s:.3g} s; the request was {state}"
    return failed(DeadlineExceeded, why, request)


def why_gone(elapsed_s: float, limit_s: float) -> EffuseError:
    """The error of a request whose client broke off. A client does so at its deadline too, and
    before ours: gRPC rounds the deadline up by as much as 1 %, and the way here takes time."""
    if elapsed_s >= 0.99 * limit_s - ON_THE_WAY_S:
        return DeadlineExceeded(f"the client's deadline of {limit_s:.3g} s passed")
    return Cancelled("the client cancelled")


def progress_labels(request: AnyRequest) -> dict[str, str]:
    """How far a request got, for programs."""
    if isinstance(request, EarlyRequest):
        return {}
    setbacks = request.attempts.setbacks
    return {
        "tokens": str(request.num_written),
        "losses": str(setbacks.num_losses),
        "refusals": str(setbacks.num_refusals),
    }


def progress_text(request: AnyRequest) -> str:
    """How far a request got and which setbacks it had, for an error; empty before it was tried."""
    if isinstance(request, EarlyRequest):
        return "no worker has announced a model"
    if request.answers:
        complete = sum(one.answer.state is State.FINISHED for one in request.answers)
        return f"{complete} of {len(request.answers)} answers were complete"
    if not request.attempts.count:
        return ""
    written, most = len(request.answer.token_ids), request.prompt.max_tokens
    setbacks = request.attempts.setbacks.summary()
    return "; ".join(filter(None, (f"{written} of {most} tokens were written", setbacks)))


def events_of(answer: pb.GenerateResponse) -> list[pb.GenerateStreamResponse]:
    """The events of a stream for a whole answer and those beside it, the last event included."""
    events = []
    if answer.HasField("echo"):
        events.append(pb.GenerateStreamResponse(request_id=answer.request_id, echo=answer.echo))
    for index, one in enumerate((answer, *answer.others)):
        commit = pb.BlockCommit(
            num_tokens=one.usage.completion_tokens,
            text=one.text,
            token_ids=one.token_ids,
            forward_passes=one.stats.forward_passes,
            logprobs=one.logprobs,
        )
        about = pb.GenerateStreamResponse(request_id=answer.request_id, answer_index=index)
        if commit.num_tokens or commit.text:
            events.append(pb.GenerateStreamResponse(commit=commit, seed=answer.seed))
            events[-1].MergeFrom(about)
        finished = pb.Finished()
        copy_end(one, finished)
        events.append(pb.GenerateStreamResponse(finished=finished))
        events[-1].MergeFrom(about)
    return events


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. Once one of them fails the others are cancelled, and its error
    is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in calls]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several.exceptions[0].__cause__
    return [task.result() for task in tasks]


class ClientGone(Exception):
    """No client takes the answer any more."""


class CallContext(Protocol):
    """The facts of a call that do not depend on its protocol. gRPC's contexts have them."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""

    def invocation_metadata(self) -> Any:
        """Names and values that came beside the request, or None."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Takes names and values that go beside the answer."""


class Listener:
    """Receives the events of an answer, or of several, and news of the attempts at the first one,
    which it may ignore."""

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        """Sends one event; raises `ClientGone`."""
        raise NotImplementedError

    def begin_attempt(self, placement: Placement, transfer_id: str) -> None:
        """Another attempt begins on these workers."""

    def note_reserved(self, placement: Placement) -> None:
        """The decode worker of the attempt holds pages for the prompt."""


class AnswerStream:
    """Writes each event to a streaming call, which takes one at a time, from any sender; a slow
    client slows its own request only."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], *, stalled_s: float = STALLED_S
    ) -> None:
        self._context = context
        self._stalled_s = stalled_s
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        self.translate: Translate | None = None
        """Makes another protocol's message of an event, or None to leave it out."""

    async def send(self, event: Any) -> None:
        """Writes one event; raises `ClientGone` if it is not taken in `stalled_s` seconds."""
        if self.translate is not None and (event := self.translate(event)) is None:
            return
        async with self._turn:
            if self._writing is not None:  # it may have outlived its sender
                await self._taken(self._writing)
            write = cast(Awaitable[None], self._context.write(event))
            writing = self._writing = asyncio.ensure_future(write)
            writing.add_done_callback(_retrieve_error)
            await self._taken(writing)
            self._writing = None  # a stream may last long after its last event
        try:
            writing.result()
        except (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise ClientGone("the client's call ended") from error

    async def _taken(self, writing: asyncio.Future[None]) -> None:
        """Waits for a write. Unlike a timeout this does not end it: see `settle`."""
        if not writing.done():
            await asyncio.wait({writing}, timeout=self._stalled_s)
        if not writing.done():
            raise ClientGone(f"the client has read nothing for {self._stalled_s:g} s")

    async def settle(self) -> None:
        """Returns once a status can be sent: grpcio takes none while a message waits to be read.

        Without a deadline by intent: nothing but the call itself is held any more, and a client
        that comes back reads how it ended; one that goes away ends this too.
        """
        if self._writing is not None:
            await asyncio.wait({self._writing})


def _retrieve_error(writing: asyncio.Future[None]) -> None:
    """Ignores a write that fails after its request has ended."""
    if not writing.cancelled():
        writing.exception()
