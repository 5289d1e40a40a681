"""One request: what was asked, where it is, what was tried and delivered, what it cost, its story.

Pure: no I/O, no clock of its own. What workers say moves it on, by the table of its states
(`request_states.py`), and by the only-writer rule: what was delivered is never changed, repeated or
lost, whichever worker says it. One that asks for several answers is these, each a request of its
own here. Not here: what is done on each event (`answer.py`, `attempt.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Final, NamedTuple

from google.protobuf.duration_pb2 import Duration

from effuse.placement.records import Role
from effuse.protos.errors import EffuseError
from effuse.router.detokenizer import AnswerText
from effuse.router.failures import Setbacks
from effuse.router.poison import digest_of
from effuse.router.policy import Fingerprint, Holder, WorkerLife
from effuse.router.request_states import (
    ENDED,
    TRANSITIONS,
    Event,
    IllegalRequestEvent,
    State,
)
from effuse.router.tenants import NOBODY, Tenant
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

STORY_LENGTH: Final = 64
"""Events kept of each request; the first ones are dropped, the end is what one looks for."""

_PUBLIC_STATES: Final = {
    State.QUEUED: pb.REQUEST_STATE_QUEUED,
    State.FINISHED: pb.REQUEST_STATE_FINISHED,
    State.FAILED: pb.REQUEST_STATE_FAILED,
    State.CANCELLED: pb.REQUEST_STATE_CANCELLED,
}


class BrokenStream(Exception):
    """A worker's commits do not continue what was delivered; its attempt must end."""


class Moment(NamedTuple):
    """One line of a story."""

    at_s: float  # on the router's clock
    event: Event
    state: State  # after the event
    note: str


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, from its check to its end. Moments are on the router's clock, and 0 where they
    are not reached."""

    id: str
    asked: Asked
    text: AnswerText
    arrived: float
    limit_s: float  # longest that it may take
    deadline: float  # on the event loop's clock
    tenant: Tenant = NOBODY  # whose it is
    asked_digest: str = ""  # of the client's message, where the client chose the id
    is_repeated: bool = False  # the client has asked for it before, by an id of its own
    is_anothers: bool = False  # another router runs it, or may have run it
    is_ended_by_id: bool = False  # somebody has asked for its end
    was_kept: bool = False  # it was answered with what was kept from before
    kept_prompt_tokens: int = 0  # of that, whose prompt is not encoded again

    # Where several answers are asked for.
    answers: Sequence[Request] = ()  # each a request of its own; none before it is admitted
    group: str = ""  # of one of them: by which decode workers know that they share their prompt
    beside: WorkerLife | None = None  # of one: the decode worker that has the prompt's KV, or will
    attempt_numbers: Iterator[int] = field(default_factory=lambda: count(1))  # common to all

    # Known once it is admitted.
    prompt_token_ids: Sequence[int] = ()
    max_tokens: int = 0
    prefix_keys: tuple[bytes, ...] = ()  # of its prompt's beginnings; none where they say nothing
    _digest: str = ""

    # Where it is, and how it came there. Workers are ids for people to read.
    state: State = State.QUEUED
    num_attempts: int = 0
    attempt: int = 0  # number of the last one, among those of all answers
    prefill_worker: str = ""
    decode_worker: str = ""
    status: str = ""  # name of the gRPC status it ended with
    story: deque[Moment] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    # What was tried.
    setbacks: Setbacks = field(default_factory=Setbacks)
    last_error: EffuseError | None = None
    is_patient: bool = False  # prefill waits for decode from now on
    alone: Collection[Role] = ()  # roles in which nothing else runs beside this attempt
    alone_since: float | None = None  # when it began to wait for such workers

    # What is final of the answer, and blocks after it.
    token_ids: list[int] = field(default_factory=list)
    fingerprint: Fingerprint | None = None  # of the workers that wrote it
    frontier: list[worker_pb2.BlockState] = field(default_factory=list)
    end_token_id: int | None = None  # the stop id that ended it

    # What it cost so far.
    queue_s: float = 0.0
    begun: float = 0.0  # its first attempt, which is when it had a seat
    prefilled: float = 0.0
    commit_times: list[float] = field(default_factory=list)  # of those that brought tokens
    handoff_s: float = 0.0
    kv_bytes: int = 0
    kv_pages: int = 0
    cached_tokens: int = 0  # of the prompt, whose KV a prefill worker had
    connector: str = ""
    earlier_forwards: int = 0  # of attempts that are over
    forwards: int = 0  # of the attempt that runs
    preemptions: int = 0

    @property
    def digest(self) -> str:
        """Of what it asks of an engine, whatever its id. Few requests are ever asked for it."""
        if not self._digest:
            self._digest = digest_of(self.asked, self.prompt_token_ids, self.max_tokens)
        return self._digest

    @property
    def index(self) -> int:
        """Which of the answers it is."""
        return self.asked.sampling.answer_index

    @property
    def name(self) -> str:
        """Its id, and for all but the first answer which one it is."""
        return f"{self.id}/{self.index}" if self.index else self.id

    @property
    def holder(self) -> Holder:
        """Who it is to whoever keeps workers for it alone."""
        return Holder(self.digest, self.name)

    @property
    def parts(self) -> Sequence[Request]:
        """Its answers where there are several; else itself."""
        return self.answers or (self,)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers, those behind their ends left out."""
        return sum(one.text.num_tokens for one in self.parts)

    @property
    def num_written(self) -> int:
        """Tokens of all answers that workers wrote."""
        return sum(len(one.token_ids) for one in self.parts)

    # Where it is.

    @property
    def is_ended(self) -> bool:
        """No event can follow."""
        return self.state in ENDED

    def apply_event(self, event: Event, now: float, note: str = "") -> State:
        """Moves on `event`; raises `IllegalRequestEvent` naming state and event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise IllegalRequestEvent(self.state, event)
        self.state = state
        self.story.append(Moment(now, event, state, note))
        return state

    def begin_attempt(self, prefill_worker: str, decode_worker: str, now: float) -> int:
        """Begins the next attempt on these workers ("" where decode prefills); returns its number.

        The number rises before anything is sent, so nothing of an earlier attempt is taken."""
        self.apply_event(Event.PLACED, now, f"{prefill_worker or 'local'} -> {decode_worker}")
        self.num_attempts += 1
        self.begun = self.begun or now
        self.attempt = next(self.attempt_numbers)
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self.connector = ""
        return self.attempt

    def end_attempt(self, error: EffuseError) -> None:
        """The attempt failed; whether another one follows is decided elsewhere."""
        self.last_error = error
        self.earlier_forwards += self.forwards
        self.forwards = 0

    # What the decode worker says.

    def add_verified(self, verified: worker_pb2.PrefillVerified, now: float) -> None:
        """The prompt's KV is complete; raises `IllegalRequestEvent`."""
        self.apply_event(Event.VERIFIED, now)
        self.prefilled = self.prefilled or now
        self.handoff_s += verified.handoff_s
        self.kv_bytes += verified.bytes
        self.kv_pages += verified.pages

    def add_commit(
        self, commit: worker_pb2.DecodeCommit, now: float
    ) -> pb.GenerateStreamResponse | None:
        """Takes final tokens; returns what the client has not had yet, if there is anything. A stop
        string may have ended the answer (`text`). Raises `IllegalRequestEvent`, `BrokenStream`."""
        self.apply_event(Event.COMMITTED, now, f"{commit.token_offset}+{len(commit.token_ids)}")
        # Before anything is taken: what is, counts as delivered, and is not sent again.
        wanted = 0 if self.asked.num_logprobs is None else len(commit.token_ids)
        if len(commit.logprobs) != wanted:
            raise BrokenStream(f"{len(commit.logprobs)} log-probabilities instead of {wanted}")
        new = self.accept_tokens(commit.token_offset, commit.token_ids, commit.frontier)
        if new:
            self.setbacks.add_progress()
            self.commit_times.append(now)
        if commit.HasField("end_token_id"):
            self.end_token_id = commit.end_token_id
        self.forwards = commit.forward_passes
        offset = self.text.num_tokens
        text = self.text.push(new)
        told = commit.logprobs[len(commit.token_ids) - len(new) :]
        count = self.text.num_tokens - offset
        return self._for_client(offset, new[:count], text, told[:count])

    def accept_tokens(
        self, offset: int, token_ids: Sequence[int], frontier: Iterable[worker_pb2.BlockState] = ()
    ) -> list[int]:
        """Appends a commit, with the blocks in flight after it, and returns the ids that are new.

        Raises `BrokenStream` where it leaves a gap, or where it repeats positions with other ids.
        """
        delivered = len(self.token_ids)
        if offset > delivered:
            raise BrokenStream(
                f"a commit begins at {offset}, but only {delivered} tokens were delivered"
            )
        overlap = delivered - offset
        if list(token_ids[:overlap]) != self.token_ids[offset : offset + len(token_ids)]:
            raise BrokenStream(f"a commit at {offset} changes tokens that were already delivered")
        new = list(token_ids[overlap:])
        self.token_ids += new
        if offset + len(token_ids) == len(self.token_ids):
            self.frontier = list(frontier)
        return new

    def add_finished(self, finished: worker_pb2.DecodeFinished) -> pb.GenerateStreamResponse | None:
        """Takes the worker's last word; returns the text that was held back, if there is any.
        Raises `IllegalRequestEvent`, `BrokenStream`."""
        delivered = len(self.token_ids)
        if finished.num_tokens != delivered:
            raise BrokenStream(
                f"{finished.num_tokens} tokens at the end, but {delivered} were delivered"
            )
        if self.state is not State.DECODING:
            raise IllegalRequestEvent(self.state, Event.FINISHED)
        self.forwards = finished.forward_passes
        self.preemptions += finished.preemptions
        return self.flush_text()

    def flush_text(self) -> pb.GenerateStreamResponse | None:
        """No token follows: returns the text that was held back, if there is any."""
        return self._for_client(self.text.num_tokens, [], self.text.flush())

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow those that are final: there are as many as were asked for, or
        a stop id stands behind them."""
        if self.state is not State.DECODING:
            return False
        return self.end_token_id is not None or len(self.token_ids) >= self.max_tokens

    def resumption(self) -> worker_pb2.Resume | None:
        """What another attempt needs to go on from here; None where it begins anew."""
        if not self.token_ids:
            return None
        return worker_pb2.Resume(committed_token_ids=self.token_ids, frontier=self.frontier)

    def _for_client(
        self,
        offset: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[pb.TokenLogprobs] = (),
    ) -> pb.GenerateStreamResponse | None:
        if not token_ids and not text:
            return None
        commit = pb.BlockCommit(
            token_offset=offset,
            num_tokens=len(token_ids),
            text=text,
            token_ids=token_ids if self.asked.wants_token_ids else (),
            forward_passes=self.earlier_forwards + self.forwards,
            logprobs=logprobs,
        )
        return pb.GenerateStreamResponse(request_id=self.id, answer_index=self.index, commit=commit)

    # What is told of it.

    def echo(self, text: str) -> pb.GenerateStreamResponse:
        """The prompt, whose text this is, for a client that wants it back."""
        ids = self.prompt_token_ids if self.asked.wants_token_ids else ()
        echo = pb.PromptEcho(text=text, token_ids=ids)
        return pb.GenerateStreamResponse(request_id=self.id, echo=echo)

    def finished(self, reason: pb.FinishReason, now: float) -> pb.GenerateStreamResponse:
        """What its client is told at a good end."""
        told = pb.Finished(
            finish_reason=reason,
            usage=self.usage(),
            stats=self.stats(now),
            model=self.asked.model.name,
            seed=self.asked.sampling.seed,
        )
        if self.text.matched_stop is not None:
            told.stop_string = self.text.matched_stop
        elif self.end_token_id is not None:
            told.end_token_id = self.end_token_id
        return pb.GenerateStreamResponse(request_id=self.id, answer_index=self.index, finished=told)

    def usage(self) -> pb.Usage:
        """Token counts so far; the prompt's are the first answer's."""
        prompt_tokens = 0 if self.index else len(self.prompt_token_ids)
        return pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=self.num_tokens)

    def stats(self, now: float) -> pb.GenerationStats:
        """What it cost, at its end."""
        forwards = self.earlier_forwards + self.forwards
        first_block = self.commit_times[0] if self.commit_times else self.arrived
        return pb.GenerationStats(
            queue_duration=_duration(self.queue_s),
            prefill_duration=_duration(max(0.0, self.prefilled - self.arrived)),
            handoff_duration=_duration(self.handoff_s),
            time_to_first_block=_duration(max(0.0, first_block - self.arrived)),
            total_duration=_duration(now - self.arrived),
            forward_passes=forwards,
            tokens_per_forward=self.num_tokens / forwards if forwards else 0.0,
            kv_bytes=self.kv_bytes,
            kv_pages=self.kv_pages,
            connector=self.connector,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            preemptions=self.preemptions,
            cached_prompt_tokens=self.cached_tokens,
        )

    def block_gaps(self) -> list[float]:
        """Seconds between its commits, those of lost attempts included."""
        return [later - earlier for earlier, later in pairwise(self.commit_times)]

    def describe(self) -> pb.GetRequestResponse:
        """Where it is, or how it ended, for who looks it up."""
        state = _PUBLIC_STATES.get(self.state, pb.REQUEST_STATE_RUNNING)
        if self.answers and not self.is_ended:
            state = pb.REQUEST_STATE_RUNNING
        first = self.parts[0]
        return pb.GetRequestResponse(
            request_id=self.id,
            state=state,
            attempt=first.num_attempts,
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
            status=self.status,
        )

    def tell_state(self) -> str:
        """Where it is, for the text of an error."""
        return "being answered" if self.answers else self.state.value

    def tell_progress(self) -> str:
        """How far it got and what it met with, for an error; empty before it was tried."""
        if self.answers:
            complete = sum(one.state is State.FINISHED for one in self.answers)
            return f"{complete} of {len(self.answers)} answers were complete"
        if not self.num_attempts:
            return ""
        far = f"{len(self.token_ids)} of {self.max_tokens} tokens were written"
        met = self.setbacks.tell()
        return f"{far}; {met}" if met else far

    def labels(self) -> dict[str, str]:
        """The same for programs."""
        return {"tokens": str(self.num_written), **self.setbacks.labels()}

    def tell_story(self) -> str:
        """The story in one line, times relative to its first event."""
        if not self.story:
            return "nothing happened"
        start = self.story[0].at_s
        return ", ".join(
            f"{m.event.value}{f' ({m.note})' if m.note else ''} +{m.at_s - start:.3f}s"
            for m in self.story
        )


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)
