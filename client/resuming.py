"""The part of a stream that its caller has, so that another attempt goes on from there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from effuse.client.answer import Event
from effuse.protos.errors import Unavailable
from effuse.v1 import generation_pb2 as pb

_CHANGED: Final = (
    "the stream broke off, and when it was asked for again another answer came; its beginning was "
    "delivered already, so ask for a whole new one"
)


class Resumption:
    """Lets through each text and each token of a stream once, whichever attempt brings it."""

    def __init__(self) -> None:
        self._parts: dict[int, _Answer] = {}  # by answer
        self._has_echo = False
        self._seed: int | None = None

    def begin(self, asked: pb.GenerateRequest) -> pb.GenerateRequest:
        """Returns the request of the next attempt, which brings everything from the start. If the
        caller gave neither an id nor a seed, it has the seed that an earlier attempt brought. A
        router knows the seed of an id."""
        for part in self._parts.values():
            part.text_at = part.tokens_at = 0
        if self._seed is None or asked.request_id or asked.sampling.HasField("seed"):
            return asked
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        again.sampling.seed = self._seed
        return again

    def take(self, event: Event) -> Event | None:
        """Returns what the caller does not have of an event; None if that is nothing. Raises
        Unavailable, which is not retryable, if the answer is not the one that was begun."""
        if event.HasField("echo"):
            had, self._has_echo = self._has_echo, True
            return None if had else event
        if event.HasField("seed"):
            self._seed = event.seed
        part = self._parts.setdefault(event.answer_index, _Answer())
        if event.HasField("commit"):
            return part.take_commit(event)
        if part.is_behind and event.HasField("finished"):
            raise Unavailable(_CHANGED, retryable=False)
        if part.is_behind or part.is_finished:
            return None
        part.is_finished = event.HasField("finished")
        return event


@dataclass(slots=True)
class _Answer:
    """The part of one answer that the caller has, and how far the present attempt has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    text_at: int = 0  # characters
    tokens_at: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether the present attempt has not brought all that the caller has."""
        return self.text_at < len(self.text) or self.tokens_at < len(self.token_ids)

    def take_commit(self, event: Event) -> Event | None:
        """As `Resumption.take`."""
        commit = event.commit
        text = self.text[self.text_at : self.text_at + len(commit.text)]
        ids = self.token_ids[self.tokens_at : self.tokens_at + len(commit.token_ids)]
        if not commit.text.startswith(text) or commit.token_ids[: len(ids)] != ids:
            raise Unavailable(_CHANGED, retryable=False)
        was_behind = self.is_behind
        self.text += commit.text[len(text) :]
        self.token_ids += commit.token_ids[len(ids) :]
        self.text_at += len(commit.text)
        self.tokens_at += len(commit.token_ids)
        if not was_behind:
            return event
        is_new = len(text) < len(commit.text) or len(ids) < len(commit.token_ids)
        return _without(event, len(text), len(ids)) if is_new else None


def _without(event: Event, characters: int, tokens: int) -> Event:
    """The event without the beginning of its text and its tokens."""
    rest = Event()
    rest.CopyFrom(event)
    commit = rest.commit
    commit.text = commit.text[characters:]
    commit.token_offset += tokens
    commit.num_tokens -= tokens
    del commit.token_ids[:tokens], commit.logprobs[:tokens]
    return rest
