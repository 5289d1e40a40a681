"""An answer and what it took; gathered from the events of a stream, or from a unary response."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from google.protobuf.duration_pb2 import Duration

from effuse.v1 import generation_pb2 as pb

Event = pb.GenerateStreamResponse
FinishReason = Literal["stop", "length", "unknown"]
_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What an answer cost, as the server saw it; GenerationStats with its times in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    first_block_s: float = 0.0
    total_s: float = 0.0
    forward_passes: int = 0
    tokens_per_forward: float = 0.0
    kv_bytes: int = 0
    kv_pages: int = 0
    cached_prompt_tokens: int = 0  # whose KV the prefill worker had from an earlier prompt
    connector: str = ""  # empty where decode prefilled for itself
    prefill_worker: str = ""  # empty where decode prefilled for itself
    decode_worker: str = ""
    preemptions: int = 0

    @classmethod
    def of(cls, stats: pb.GenerationStats) -> Stats:
        """What a response tells."""
        return cls(
            queue_s=_seconds(stats.queue_duration),
            prefill_s=_seconds(stats.prefill_duration),
            handoff_s=_seconds(stats.handoff_duration),
            first_block_s=_seconds(stats.time_to_first_block),
            total_s=_seconds(stats.total_duration),
            forward_passes=stats.forward_passes,
            tokens_per_forward=stats.tokens_per_forward,
            kv_bytes=stats.kv_bytes,
            kv_pages=stats.kv_pages,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            connector=stats.connector,
            prefill_worker=stats.prefill_worker,
            decode_worker=stats.decode_worker,
            preemptions=stats.preemptions,
        )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithms of the model's own probabilities, at the pass that wrote a token."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # (id, its own) of the likeliest ones, the best first

    @classmethod
    def of(cls, told: pb.TokenLogprobs) -> Logprob:
        """As the wire has it."""
        pairs = zip(told.top_token_ids, told.top_logprobs, strict=False)
        return cls(told.logprob, tuple(pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer, and what it took in seconds on the client's clock."""

    text: str
    token_ids: tuple[int, ...]  # empty where they were not asked for
    logprobs: tuple[Logprob, ...]  # one for each token, where asked for
    prompt: str | None  # as the model got it, where asked for
    # (tokens, forward passes) of the answer so far, at each commit; empty of a unary call.
    commits: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    usage: pb.Usage
    stats: Stats
    request_id: str
    model: str
    seed: int  # of the randomness: the request's, or what the server drew
    stopped_by: str | int | None  # the stop string or the id that ended it; None at its length
    first_block_s: float  # until the first final text arrived; of a unary call the server's figure
    total_s: float  # until all had arrived
    others: tuple[Answer, ...] = ()  # the answers behind this one, where several were asked for

    @property
    def answers(self) -> tuple[Answer, ...]:
        """This one and those behind it."""
        return (self, *self.others)

    @classmethod
    def of(cls, response: pb.GenerateResponse, total_s: float) -> Answer:
        """A unary response."""
        stats = Stats.of(response.stats)
        return cls(
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(map(Logprob.of, response.logprobs)),
            prompt=response.echo.text if response.HasField("echo") else None,
            commits=(),
            finish_reason=_REASONS.get(response.finish_reason, "unknown"),
            usage=response.usage,
            stats=stats,
            request_id=response.request_id,
            model=response.model,
            first_block_s=stats.first_block_s,
            seed=response.seed,
            stopped_by=_stopped_by(response),
            total_s=total_s,
            others=tuple(cls.of(one, total_s) for one in response.others),
        )


def _stopped_by(said: pb.GenerateResponse | pb.Finished) -> str | int | None:
    match said.WhichOneof("matched_stop"):
        case "stop_string":
            return said.stop_string
        case "end_token_id":
            return said.end_token_id
        case _:
            return None


class StreamBroken(Exception):
    """The stream ended well but without saying that the answer is complete."""


class Gathering:
    """An answer whose events are coming, or several; time runs from when it is made."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._parts: dict[int, _Part] = {}
        self._request_id = ""

    def take(self, event: Event) -> str:
        """Takes an event in; the text that it adds to the first answer."""
        self._request_id = event.request_id or self._request_id
        part = self._parts.setdefault(event.answer_index, _Part())
        part.take(event, self._now() - self._began)
        return "" if event.answer_index else event.commit.text

    def answer(self) -> Answer:
        """The answer, once the stream is over, with those beside it. Raises StreamBroken."""
        parts = [part for _, part in sorted(self._parts.items())]
        if not parts or any(part.finished is None for part in parts):
            raise StreamBroken(f"request {self._request_id!r}: the stream ended without Finished")
        first, *others = (part.answer(self._now() - self._began) for part in parts)
        return replace(first, others=tuple(others))


@dataclass(slots=True)
class _Part:
    """One answer of those that are coming."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)
    prompt: str | None = None
    first_block_s: float | None = None
    finished: Event | None = None

    def take(self, event: Event, now_s: float) -> None:
        """Takes an event in that came so late."""
        if event.HasField("finished"):
            self.finished = event
        if event.HasField("echo"):
            self.prompt = event.echo.text
        if not event.HasField("commit"):
            return
        if self.first_block_s is None:
            self.first_block_s = now_s
        self.texts.append(event.commit.text)
        self.token_ids += event.commit.token_ids
        self.logprobs += map(Logprob.of, event.commit.logprobs)
        tokens = event.commit.token_offset + event.commit.num_tokens
        self.commits.append((tokens, event.commit.forward_passes))

    def answer(self, total_s: float) -> Answer:
        """All of it, which took so long."""
        assert self.finished is not None, "it has ended"
        finished = self.finished.finished
        return Answer(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt=self.prompt,
            commits=tuple(self.commits),
            finish_reason=_REASONS.get(finished.finish_reason, "unknown"),
            usage=finished.usage,
            stats=Stats.of(finished.stats),
            request_id=self.finished.request_id,
            model=finished.model,
            seed=finished.seed,
            stopped_by=_stopped_by(finished),
            first_block_s=total_s if self.first_block_s is None else self.first_block_s,
            total_s=total_s,
        )
