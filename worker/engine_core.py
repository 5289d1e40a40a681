"""What the engines of both workers have in common: forwards that may fail, and what is said.

Used in the engine's process only; the front never imports it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from effuse.kvtransfer.messages import AttemptId
from effuse.models.part import Part, PartResult
from effuse.worker.messages import AbortDone, CoreEvent, Failed, FailureCode

LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")

KEEP_ABORTED_S = 600.0  # how long an engine refuses attempts that were aborted before they began
_MOST_FAILED_FORWARDS = 8  # in a row; then the device is taken for lost and the process ends


class Forward(Protocol):
    """The part of the model runner that every engine uses."""

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results in the order of the parts."""
        ...


class ForwardFailed(Exception):
    """A forward failed: only what was in it fails with it. The message is for callers."""


class ForwardGuard:
    """Keeps an engine alive where a forward fails, unless eight in a row do."""

    def __init__(self) -> None:
        self._num_failed = 0  # in a row

    def run(self, forward: Callable[[], _Result], num_requests: int) -> _Result:
        """What `forward`, over so many requests, returns. Raises ForwardFailed where it raises
        anything; the eighth time in a row raises what it raised."""
        try:
            result = forward()
        except Exception as error:
            LOG.exception("a forward over %d requests failed", num_requests)
            self._num_failed += 1
            if self._num_failed >= _MOST_FAILED_FORWARDS:
                raise
            raise ForwardFailed("the model failed in this step") from error
        self._num_failed = 0
        return result


class Outbox:
    """What an engine says to its front, in order, since the last drain."""

    def __init__(self) -> None:
        self._events: list[CoreEvent] = []

    def drain(self) -> Sequence[CoreEvent]:
        """Hands over what was said, and starts anew."""
        events, self._events = self._events, []
        return events

    def say(self, *events: CoreEvent) -> None:
        """Adds events in their order."""
        self._events += events

    def failed(
        self,
        attempt: AttemptId,
        code: FailureCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
    ) -> None:
        """Says that an attempt has ended without success."""
        self.say(
            Failed(attempt=attempt, code=code, message=message, retryable=retryable, field=field)
        )

    def abort_done(self, attempt: AttemptId, *, was_running: bool) -> None:
        """Says that nothing of an aborted attempt is left here."""
        self.say(AbortDone(attempt=attempt, was_running=was_running))
