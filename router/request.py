"""One request: the question, the answer so far, the attempts at it, and its costs.

Pure: no I/O and no clock of its own. Events of workers move the answer on by the table of states
(`request_states.py`). Tokens that were delivered are never changed, repeated or lost. A request for
several answers has one `Request` for each of them. Not here: the messages for clients
(`client.py`), the reaction to each event (`answer.py`, `attempt.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, pairwise
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from effuse.placement.records import Kind
from effuse.router.failures import Setbacks
from effuse.router.policy import Fingerprint, Holder, WorkerLife
from effuse.router.prefixes import NOTHING_KNOWN, KnownPrefix
from effuse.router.request_states import (
    ENDED,
    TRANSITIONS,
    Event,
    IllegalRequestEvent,
    State,
)
from effuse.router.sizes import NO_SIZES, Sizes
from effuse.router.tenants import NOBODY, Tenant
from effuse.router.tokenizer import AnswerText
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

HISTORY_LENGTH: Final = 64
"""Events that are kept of each answer. The first ones are dropped, because readers want the end.
Of commits in a row only the first and the last are kept, because an answer may have hundreds."""


SHOWN: Final = 2000
"""Characters of a prompt and of an answer that a page of running requests shows."""


class BrokenStream(Exception):
    """A worker's commits do not continue the delivered tokens; its attempt must end."""


class Moment(NamedTuple):
    """One line of a history."""

    at_s: float  # on the router's clock
    event: Event
    note: str


class EncodedPrompt(NamedTuple):
    """The prompt as ids, known once its request is admitted."""

    token_ids: Sequence[int] = ()  # an array, which takes a ninth of a list's bytes
    max_tokens: int = 0  # of the answer
    prefix_keys: tuple[bytes, ...] = ()  # of its prefixes; empty if no worker can reuse them
    sizes: Sizes = NO_SIZES  # for which its workers need room


NO_PROMPT: Final = EncodedPrompt()


class Piece(NamedTuple):
    """New final tokens of an answer, and their text."""

    offset: int  # tokens before these
    token_ids: list[int]
    text: str
    logprobs: Sequence[pb.TokenLogprobs] = ()


@dataclass(slots=True, kw_only=True)
class AnswerState:
    """One answer: its state, its final tokens, and the blocks behind them."""

    text: AnswerText
    state: State = State.QUEUED
    moments: list[Moment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    fingerprint: Fingerprint | None = None  # of the workers that wrote it
    frontier: Sequence[worker_pb2.BlockState] = ()
    end_token_id: int | None = None  # the stop id that ended it

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_deterministic(self) -> bool:
        """Whether its workers compute it the same whatever else they do. Older workers do not
        announce it."""
        return ("deterministic", "true") in (self.fingerprint or ())

    def apply_event(self, event: Event, now: float, note: str = "") -> State:
        """Moves on `event`; raises `IllegalRequestEvent` naming state and event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise IllegalRequestEvent(self.state, event)
        self.state = state
        if [one.event for one in self.moments[-2:]] == [event, event]:  # only commits repeat
            self.moments.pop()
        self.moments.append(Moment(now, event, note))
        del self.moments[:-HISTORY_LENGTH]
        return state

    def accept_tokens(
        self, offset: int, token_ids: Sequence[int], frontier: Iterable[worker_pb2.BlockState] = ()
    ) -> list[int]:
        """Appends a commit, with the blocks in flight after it, and returns the ids that are new.

        Raises `BrokenStream` if it leaves a gap, or repeats positions with other ids.
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
            self.frontier = tuple(frontier)
        return new

    def flush(self) -> Piece:
        """No token follows: returns the text that was held back."""
        return Piece(self.text.num_tokens, [], self.text.flush())

    def resumption(self) -> worker_pb2.Resume | None:
        """The state from which another attempt goes on; None if it begins anew."""
        if not self.token_ids:
            return None
        return worker_pb2.Resume(committed_token_ids=self.token_ids, frontier=self.frontier)

    def history(self) -> str:
        """The history in one line, times relative to its first event."""
        if not self.moments:
            return "nothing happened"
        start = self.moments[0].at_s
        return ", ".join(
            f"{m.event.value}{f' ({m.note})' if m.note else ''} +{m.at_s - start:.3f}s"
            for m in self.moments
        )


@dataclass(slots=True, kw_only=True)
class AnswerAttempts:
    """The attempts at one answer. Workers are the ids that people read."""

    numbers: Iterator[int] = field(default_factory=lambda: count(1))  # common to all answers
    group: str = ""  # by which decode workers know which answers share their prompt
    beside: WorkerLife | None = None  # the decode worker that has the prompt's KV, or will have it
    count: int = 0
    number: int = 0  # of the last attempt, among those at all answers
    prefill_worker: str = ""
    decode_worker: str = ""
    setbacks: Setbacks = field(default_factory=Setbacks)
    is_patient: bool = False  # prefill waits for decode from now on
    in_pool: bool = False  # a pool has the prompt's KV, so that no other worker computes it
    pool_from: float = 0.0  # when a pool may get its prompt, of which one has not taken it
    alone: Collection[Kind] = ()  # kinds of work beside which nothing else runs in a worker
    alone_since: float | None = None  # when it began to wait for such workers


_ADDED: Final = ("handoff_s", "kv_bytes", "kv_pages", "cached_tokens", "preemptions")
"""Costs of several answers that add up."""


@dataclass(slots=True, kw_only=True)
class Costs:
    """The costs of an answer so far. Moments are on the router's clock, and 0 until they come."""

    queue_s: float = 0.0
    begun: float = 0.0  # its first attempt, which is when it had a seat
    prefilled: float = 0.0
    compute_s: float = 0.0  # of the prompt, as its worker measured it
    commit_times: list[float] = field(default_factory=list)  # of commits that brought tokens
    handoff_s: float = 0.0
    kv_bytes: int = 0
    kv_pages: int = 0
    known: KnownPrefix = NOTHING_KNOWN  # of the prompt, on the worker that computes it now
    cached_tokens: int = 0  # tokens of the prompt that a worker had in its cache
    connector: str = ""
    earlier_forwards: int = 0  # of attempts that are over
    forwards: int = 0  # of the attempt that runs
    preemptions: int = 0

    @property
    def all_forwards(self) -> int:
        return self.earlier_forwards + self.forwards

    def block_gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.commit_times)]

    @classmethod
    def sum_of(cls, answers: Sequence[Costs], queue_s: float) -> Costs:
        """The costs of a request with these answers; the prompt's are those of the first one."""
        first = answers[0]
        return cls(
            queue_s=queue_s,
            begun=first.begun,
            prefilled=first.prefilled,
            connector=first.connector,
            commit_times=sorted(chain(*(one.commit_times[:1] for one in answers))),
            forwards=sum(one.all_forwards for one in answers),
            **{name: sum(getattr(one, name) for one in answers) for name in _ADDED},
        )


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, from its check to its end, or one of several answers to it."""

    id: str
    asked: Asked
    arrived: float  # on the router's clock
    limit_s: float  # longest that it may take
    deadline: float  # on the event loop's clock
    answer: AnswerState
    tenant: Tenant = NOBODY  # its owner
    asked_digest: str = ""  # of the client's message, if the client chose the id
    is_repeated: bool = False  # the client has asked for it before, by an id of its own
    is_anothers: bool = False  # another router runs it, or may have run it
    is_ended_by_id: bool = False  # a call has asked for its end
    kept_prompt_tokens: int | None = None  # of the kept answer that its client got
    answers: Sequence[Request] = ()  # if there are several, and once it is admitted
    prompt: EncodedPrompt = NO_PROMPT
    attempts: AnswerAttempts = field(default_factory=AnswerAttempts)
    costs: Costs = field(default_factory=Costs)
    status: str = ""  # name of the gRPC status it ended with
    _digest: str = ""

    @property
    def digest(self) -> str:
        """A digest of everything that it asks of an engine, whatever its id. Computed on demand,
        because few requests need it."""
        if not self._digest:
            self._digest = digest_of(self.asked, self.prompt.token_ids, self.prompt.max_tokens)
        return self._digest

    @property
    def index(self) -> int:
        """The number of the answer, from 0."""
        return self.asked.sampling.answer_index

    @property
    def name(self) -> str:
        """Its id, and behind it the answer's number for all but the first answer."""
        return f"{self.id}/{self.index}" if self.index else self.id

    @property
    def holder(self) -> Holder:
        """Its name for the account of workers that run it without others."""
        return Holder(self.digest, self.name)

    @property
    def parts(self) -> Sequence[Request]:
        """Its answers if there are several, else itself."""
        return self.answers or (self,)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers, without those behind their ends."""
        return sum(one.answer.text.num_tokens for one in self.parts)

    @property
    def num_written(self) -> int:
        return sum(len(one.answer.token_ids) for one in self.parts)

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow the final ones: there are as many as were asked for, or a
        stop id stands behind them."""
        answer = self.answer
        if answer.state is not State.DECODING:
            return False
        return answer.end_token_id is not None or len(answer.token_ids) >= self.prompt.max_tokens

    def split(self, texts: Iterable[AnswerText], group: str) -> Sequence[Request]:
        """Makes its answers, one for each of `texts`, which have its numbers of attempts in common.
        `group`: by which decode workers know that they share their prompt."""
        numbers, asked = self.attempts.numbers, self.asked
        self.answers = tuple(
            replace(
                self,
                asked=structs.replace(
                    asked, sampling=structs.replace(asked.sampling, answer_index=index)
                ),
                answer=AnswerState(text=text),
                attempts=AnswerAttempts(numbers=numbers, group=group),
                costs=Costs(queue_s=self.costs.queue_s),
            )
            for index, text in enumerate(texts)
        )
        return self.answers

    def add_up(self) -> None:
        if not self.answers:
            return
        first, attempts = self.answers[0].attempts, self.attempts
        attempts.prefill_worker, attempts.decode_worker = first.prefill_worker, first.decode_worker
        attempts.count = sum(one.attempts.count for one in self.answers)
        self.costs = Costs.sum_of([one.costs for one in self.answers], self.costs.queue_s)

    def begin_attempt(self, prefill_worker: str, decode_worker: str, now: float) -> int:
        """Begins the next attempt on these workers ("" if decode prefills); returns its number.

        The number rises before anything is sent, so nothing of an earlier attempt is taken."""
        note = f"{prefill_worker or 'local'} -> {decode_worker}"
        self.answer.apply_event(Event.PLACED, now, note)
        self.costs.begun = self.costs.begun or now
        self.costs.connector, self.costs.compute_s = "", 0.0
        attempts = self.attempts
        attempts.count += 1
        attempts.number = next(attempts.numbers)
        attempts.prefill_worker, attempts.decode_worker = prefill_worker, decode_worker
        return attempts.number

    def add_verified(self, verified: worker_pb2.PrefillVerified, now: float) -> None:
        """The prompt's KV is complete; raises `IllegalRequestEvent`."""
        self.answer.apply_event(Event.VERIFIED, now)
        costs = self.costs
        costs.prefilled = costs.prefilled or now
        costs.handoff_s += verified.handoff_s
        costs.kv_bytes += verified.bytes
        costs.kv_pages += verified.pages
        costs.cached_tokens = max(costs.cached_tokens, verified.cached_tokens)

    def add_commit(self, commit: worker_pb2.DecodeCommit, now: float) -> Piece:
        """Takes final tokens; returns the part that the client has not had yet. A stop string may
        have ended the answer (`text`). Raises `IllegalRequestEvent`, `BrokenStream`."""
        answer, text = self.answer, self.answer.text
        note = f"{commit.token_offset}+{len(commit.token_ids)}"
        answer.apply_event(Event.COMMITTED, now, note)
        # Checked before anything is taken: tokens that are taken count as delivered, and are not
        # sent again.
        wanted = 0 if self.asked.num_logprobs is None else len(commit.token_ids)
        if len(commit.logprobs) != wanted:
            raise BrokenStream(f"{len(commit.logprobs)} log-probabilities instead of {wanted}")
        new = answer.accept_tokens(commit.token_offset, commit.token_ids, commit.frontier)
        if new:
            self.attempts.setbacks.add_progress()
            self.costs.commit_times.append(now)
        if commit.HasField("end_token_id"):
            answer.end_token_id = commit.end_token_id
        self.costs.forwards = commit.forward_passes
        offset = text.num_tokens
        shown = text.push(new)
        logprobs = commit.logprobs[len(commit.token_ids) - len(new) :]
        num_shown = text.num_tokens - offset
        return Piece(offset, new[:num_shown], shown, logprobs[:num_shown])

    def add_finished(self, finished: worker_pb2.DecodeFinished) -> Piece:
        """Takes the worker's last event; returns the text that was held back.
        Raises `IllegalRequestEvent`, `BrokenStream`."""
        answer = self.answer
        delivered = len(answer.token_ids)
        if finished.num_tokens != delivered:
            raise BrokenStream(
                f"{finished.num_tokens} tokens at the end, but {delivered} were delivered"
            )
        if answer.state is not State.DECODING:
            raise IllegalRequestEvent(answer.state, Event.FINISHED)
        self.costs.forwards = finished.forward_passes
        self.costs.preemptions += finished.preemptions
        return answer.flush()


def digest_of(asked: Asked, prompt_token_ids: Sequence[int], max_tokens: int) -> str:
    """A digest of everything that a request asks of an engine, as 32 hexadecimal digits: equal for
    equal requests."""
    model, stops = asked.model.name, asked.stop_token_ids
    # A seed that was drawn and the number of the answer are no part of the question.
    sampling = structs.replace(asked.seeded(0).sampling, answer_index=0)
    extent = (asked.sent.stopping.min_tokens, max_tokens, asked.num_logprobs)
    parts = (model, list(prompt_token_ids), extent, stops, sampling, asked.settings)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()


@dataclass(slots=True, kw_only=True)
class EarlyRequest:
    """A request that came before any worker had announced a model, so that it cannot be checked."""

    id: str
    tenant: Tenant
    limit_s: float  # longest that it may take
    is_ended_by_id: bool = False


AnyRequest = Request | EarlyRequest
