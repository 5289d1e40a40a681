"""An answer and its cost, from the events of a stream or from a unary response."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
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
    """The cost of an answer, as the server saw it: GenerationStats with times in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    first_block_s: float = 0.0
    total_s: float = 0.0
    forward_passes: int = 0
    tokens_per_forward: float = 0.0
    kv_bytes: int = 0
    kv_pages: int = 0
    cached_prompt_tokens: int = 0  # tokens whose KV a worker had from an earlier request
    connector: str = ""  # empty if the decode worker prefilled
    prefill_worker: str = ""  # empty if the decode worker prefilled
    decode_worker: str = ""
    preemptions: int = 0

    @classmethod
    def of(cls, stats: pb.GenerationStats) -> Stats:
        """The stats of a response."""
        return cls(
            queue_s=_seconds(stats.queue_duration),
            prefill_s=_seconds(stats.prefill_duration),
            handoff_s=_seconds(stats.handoff_duration),
            first_block_s=_seconds(stats.time_to_first_block),
            total_s=_seconds(stats.total_duration),
            **{name: getattr(stats, name) for name in _SAME},
        )


_SAME = tuple(one.name for one in fields(Stats) if not one.name.endswith("_s"))
"""Fields that have the same name and value on the wire."""


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithms of the model's own probabilities, in the pass that wrote a token."""

    logprob: float  # the token's own
    top: tuple[tuple[int, float], ...]  # (id, log-probability) of the likeliest tokens, best first

    @classmethod
    def of(cls, told: pb.TokenLogprobs) -> Logprob:
        """From a message of the wire."""
        pairs = zip(told.top_token_ids, told.top_logprobs, strict=False)
        return cls(told.logprob, tuple(pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer, and its times in seconds on the client's clock."""

    text: str
    token_ids: tuple[int, ...]  # empty unless the request asked for them
    logprobs: tuple[Logprob, ...]  # one for each token, if the request asked for them
    prompt: str | None  # as the model got it, if the request asked for it
    # (tokens, forward passes) of the answer so far, at each commit; empty for a unary call.
    commits: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    usage: pb.Usage
    stats: Stats
    request_id: str
    model: str
    seed: int  # of the randomness: from the request, or drawn by the server
    # Whether the same request with this seed gets the same answer from the same fleet.
    deterministic: bool = False
    stopped_by: str | int | None  # the stop string or id that ended it; None if its length did
    first_block_s: float  # until the first final text arrived; the server's figure for a unary call
    total_s: float  # until everything had arrived
    others: tuple[Answer, ...] = ()  # the other answers, if the request asked for several

    @property
    def answers(self) -> tuple[Answer, ...]:
        """This answer and the others."""
        return (self, *self.others)

    @classmethod
    def of(cls, response: pb.GenerateResponse, total_s: float) -> Answer:
        """From a unary response."""
        part = _Part(
            texts=[response.text],
            token_ids=list(response.token_ids),
            logprobs=list(map(Logprob.of, response.logprobs)),
            prompt=response.echo.text if response.HasField("echo") else None,
            first_block_s=_seconds(response.stats.time_to_first_block),
        )
        others = tuple(cls.of(one, total_s) for one in response.others)
        return replace(part.answer(response, response.request_id, total_s), others=others)


def _stopped_by(said: pb.GenerateResponse | pb.Finished) -> str | int | None:
    match said.WhichOneof("matched_stop"):
        case "stop_string":
            return said.stop_string
        case "end_token_id":
            return said.end_token_id
        case _:
            return None


class StreamBroken(Exception):
    """The stream ended without an error, but also without the end of the answer."""


class Gathering:
    """One or several answers whose events are arriving; times count from its construction."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._parts: dict[int, _Part] = {}
        self._request_id = ""

    def take(self, event: Event) -> str:
        """Takes an event, and returns the text that it adds to the first answer."""
        self._request_id = event.request_id or self._request_id
        part = self._parts.setdefault(event.answer_index, _Part())
        part.take(event, self._now() - self._began)
        return "" if event.answer_index else event.commit.text

    def answer(self) -> Answer:
        """The complete first answer, with the others in it. Raises StreamBroken."""
        total_s, parts = self._now() - self._began, sorted(self._parts.items())
        answers = [
            part.answer(part.end.finished, part.end.request_id, total_s)
            for _, part in parts
            if part.end is not None
        ]
        if not answers or len(answers) < len(parts):
            raise StreamBroken(f"request {self._request_id!r}: the stream ended without Finished")
        return replace(answers[0], others=tuple(answers[1:]))


@dataclass(slots=True)
class _Part:
    """One of the answers that are arriving."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)
    prompt: str | None = None
    first_block_s: float | None = None
    end: Event | None = None

    def take(self, event: Event, now_s: float) -> None:
        """Takes an event that arrived after this time."""
        if event.HasField("finished"):
            self.end = event
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

    def answer(
        self, end: pb.Finished | pb.GenerateResponse, request_id: str, total_s: float
    ) -> Answer:
        """The complete answer, which took this time; `end` has the facts about all of it."""
        return Answer(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt=self.prompt,
            commits=tuple(self.commits),
            finish_reason=_REASONS.get(end.finish_reason, "unknown"),
            usage=end.usage,
            stats=Stats.of(end.stats),
            request_id=request_id,
            model=end.model,
            seed=end.seed,
            deterministic=end.deterministic,
            stopped_by=_stopped_by(end),
            first_block_s=total_s if self.first_block_s is None else self.first_block_s,
            total_s=total_s,
        )
