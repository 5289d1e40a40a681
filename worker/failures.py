"""From an engine's `Failed` to the error that callers get. A table and nothing else."""

from collections.abc import Mapping
from typing import Final

from effuse.protos.errors import (
    AlreadyRunning,
    Bug,
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    Overloaded,
    Refused,
    TransferFailed,
    Unavailable,
)
from effuse.worker.messages import Failed, FailureCode

_RETRY_AFTER_S: Final = 0.5  # where the engine names none: about the time of a short request

_KINDS: Final[Mapping[FailureCode, type[EffuseError]]] = {
    "ALREADY_EXISTS": AlreadyRunning,
    "FAILED_PRECONDITION": Refused,
    "RESOURCE_EXHAUSTED": Overloaded,
    "ABORTED": Refused,
    "DEADLINE_EXCEEDED": TransferFailed,
    "UNAVAILABLE": Unavailable,
    "DATA_LOSS": TransferFailed,
    "INTERNAL": Bug,
}


def to_error(failed: Failed) -> EffuseError:
    """Returns the error that tells a caller what the engine said."""
    if failed.code == "INVALID_ARGUMENT":
        return InvalidRequest.of(failed.field or "", failed.message)
    kind = _KINDS[failed.code]
    labels = {"field": failed.field} if failed.field else None
    retry_after_s = failed.retry_after_s
    if retry_after_s is None and kind in (Overloaded, Unavailable, TransferFailed):
        retry_after_s = _RETRY_AFTER_S
    # The class says what is usual; of our own mistakes only the engine knows.
    retryable = failed.retryable if kind is Bug else None
    return kind(failed.message, retryable=retryable, retry_after_s=retry_after_s, labels=labels)


def deadline_passed(what: str) -> DeadlineExceeded:
    """The error of a caller whose time is over."""
    return DeadlineExceeded(f"the deadline passed before {what}")
