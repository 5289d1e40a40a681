"""An answer and its cost, from the events of a stream or from a unary response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from effuse.v1 import generation_pb2 as pb

Event = pb.GenerateStreamResponse
FinishReason = Literal["stop", "length", "unknown"]
FINISH_REASONS: Final[dict[int, FinishReason]] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
"""The ends of an answer by the names that all other protocols have for them."""
_END: Final = frozenset(pb.Finished.DESCRIPTOR.fields_by_name)


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
    def of(cls, message: pb.TokenLogprobs) -> Logprob:
        """From a message of the wire."""
        pairs = zip(message.top_token_ids, message.top_logprobs, strict=False)
        return cls(message.logprob, tuple(pairs))


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
        first_block_s = _seconds(response.stats.time_to_first_block)
        others = tuple(cls.of(one, total_s) for one in response.others)
        return replace(_answer_of(response, total_s, first_block_s), others=others)


def _stopped_by(response: pb.GenerateResponse) -> str | int | None:
    match response.WhichOneof("matched_stop"):
        case "stop_string":
            return response.stop_string
        case "end_token_id":
            return response.end_token_id
        case _:
            return None


class StreamBroken(Exception):
    """The stream ended without an error, but also without the end of the answer."""


class WholeAnswer:
    """Gathers the events of an answer, or of several, into the response of a unary call."""

    def __init__(self) -> None:
        self._text: dict[int, list[str]] = {}
        self._responses: dict[int, pb.GenerateResponse] = {}
        self._ended: set[int] = set()

    def take(self, event: Event) -> None:
        """Keeps text, tokens, log-probabilities, the prompt and ends; nothing of drafts."""
        response = self._responses.setdefault(event.answer_index, pb.GenerateResponse())
        if event.HasField("echo"):
            response.echo.CopyFrom(event.echo)
        elif event.HasField("commit"):
            self._text.setdefault(event.answer_index, []).append(event.commit.text)
            response.token_ids.extend(event.commit.token_ids)
            response.logprobs.extend(event.commit.logprobs)
        elif event.HasField("finished"):
            self._ended.add(event.answer_index)
            response.request_id = event.request_id
            response.text = "".join(self._text.pop(event.answer_index, ()))
            copy_end(event.finished, response)

    async def send(self, event: Event) -> None:
        """The same for callers that may have to wait."""
        self.take(event)

    @property
    def is_complete(self) -> bool:
        """Whether every answer that began has ended, at least one."""
        return bool(self._responses) and len(self._ended) == len(self._responses)

    def answers(self) -> list[tuple[int, pb.GenerateResponse]]:
        """Each answer by its index, without others."""
        return sorted(self._responses.items())

    def one(self, index: int) -> pb.GenerateResponse:
        """An answer that has ended, without others."""
        return self._responses[index]

    def response(self, request_id: str) -> pb.GenerateResponse:
        """The whole of it, once every answer has ended."""
        first, *others = (response for _, response in self.answers())
        first.request_id = request_id
        first.others.extend(others)
        return first


def copy_end(
    source: pb.Finished | pb.GenerateResponse, target: pb.Finished | pb.GenerateResponse
) -> None:
    """Copies the fields of an answer's end, which have the same names in both messages."""
    for field, value in source.ListFields():
        if isinstance(value, Message) and field.name in _END:
            getattr(target, field.name).CopyFrom(value)
        elif field.name in _END:
            setattr(target, field.name, value)


def text_of(event: Event) -> str:
    """The text that an event adds to the first answer."""
    return "" if event.answer_index else event.commit.text


class Gathering:
    """One or several answers whose events are arriving; times count from its construction."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()
        self._whole = WholeAnswer()
        self._commits: dict[int, list[tuple[int, int]]] = {}
        self._first_block_s: dict[int, float] = {}
        self._request_id = ""

    def take(self, event: Event) -> None:
        """Takes the next event of any of them."""
        self._request_id = event.request_id or self._request_id
        self._whole.take(event)
        index, commit = event.answer_index, event.commit
        if event.HasField("commit"):
            self._first_block_s.setdefault(index, self._now() - self._began)
            tokens = commit.token_offset + commit.num_tokens
            self._commits.setdefault(index, []).append((tokens, commit.forward_passes))

    def answer(self) -> Answer:
        """The complete first answer, with the others in it. Raises StreamBroken."""
        total_s = self._now() - self._began
        if not self._whole.is_complete:
            raise StreamBroken(f"request {self._request_id!r}: the stream ended without Finished")
        first, *others = (
            _answer_of(
                one, total_s, self._first_block_s.get(index, total_s), self._commits.get(index, ())
            )
            for index, one in self._whole.answers()
        )
        return replace(first, others=tuple(others))


def _answer_of(
    response: pb.GenerateResponse,
    total_s: float,
    first_block_s: float,
    commits: Sequence[tuple[int, int]] = (),
) -> Answer:
    """One answer without the others, and its times on the client's clock."""
    return Answer(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(map(Logprob.of, response.logprobs)),
        prompt=response.echo.text if response.HasField("echo") else None,
        commits=tuple(commits),
        finish_reason=FINISH_REASONS.get(response.finish_reason, "unknown"),
        usage=response.usage,
        stats=Stats.of(response.stats),
        request_id=response.request_id,
        model=response.model,
        seed=response.seed,
        deterministic=response.deterministic,
        stopped_by=_stopped_by(response),
        first_block_s=first_block_s,
        total_s=total_s,
    )
