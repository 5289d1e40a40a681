"""Errors that cross a process border, and the one mapping between them and gRPC statuses.

This file has the exception types that servicers raise, `to_status` and `from_rpc_error`.
`gate.py` catches them, and the router decides which calls to retry.

    EffuseError
    ├── CallerError            the same call fails again, wherever it goes
    │   ├── InvalidRequest     INVALID_ARGUMENT     a field is wrong; BadRequest names it
    │   ├── NotFound           NOT_FOUND            no model or request of that name
    │   ├── AlreadyRunning     ALREADY_EXISTS       a request of that id is running
    │   ├── NotSupported       UNIMPLEMENTED        the model or the server cannot do it
    │   ├── Unauthenticated    UNAUTHENTICATED      the caller has not proved its identity
    │   ├── EndedById          ABORTED              a client has ended the request by its id
    │   └── Poisonous          FAILED_PRECONDITION  engines died of this very request
    ├── Refused                FAILED_PRECONDITION  meant for another attempt, layout or role
    │   └── Replaced           FAILED_PRECONDITION  meant for a life of the worker that is over
    ├── Aborted                ABORTED              the attempt was ended before
    ├── Overloaded             RESOURCE_EXHAUSTED   full: try later, or elsewhere; RetryInfo
    ├── Unavailable            UNAVAILABLE          no worker can do it now; RetryInfo
    │   ├── Starting           UNAVAILABLE          the worker has no engine yet
    │   ├── Draining           UNAVAILABLE          the process admits nothing more
    │   ├── OtherRole          UNAVAILABLE          accepts only the other kind of work now
    │   ├── EngineLost         UNAVAILABLE          the worker's engine ended while the request ran
    │   ├── PeerLost           UNAVAILABLE          the other side went away, or never was there
    │   └── TransferFailed     UNAVAILABLE          KV did not arrive, or arrived wrong
    │       └── Unreserved     UNAVAILABLE          no pages were reserved in time
    ├── DeadlineExceeded       DEADLINE_EXCEEDED    the caller's time is over
    ├── Cancelled              CANCELLED            the caller went away
    └── Bug                    INTERNAL             ours; the caller sees a fixed text and an id
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, ClassVar, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "effuse"
DETAILS_KEY: Final = "grpc-status-details-bin"
REQUEST_ID_KEY: Final = "x-request-id"
"""Trailing metadata of every error and every answer: the id that the logs have."""

MAX_MESSAGE_CHARS: Final = 1000
"""Statuses travel in HTTP/2 trailers, whose size peers limit (8 KiB by default). gRPC reports a
larger one as exhausted resources. So all text is ASCII with one byte for each character, except for
those in the message that gRPC sends as three bytes.
"""
_MOST_VIOLATIONS: Final = 8
_FIELD_CHARS: Final = 100
_DESCRIPTION_CHARS: Final = 250
_TOO_LARGE: Final = "message larger than max"  # the library's text, at either end


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An error of one field: its path in the request, and a sentence.

    The sentence names the accepted form and what was found.
    """

    field: str
    description: str


_BY_REASON: Final[dict[str, type[EffuseError]]] = {}


class EffuseError(Exception):
    """An outcome that is sent to the other side of a call; `message` is written for it.

    `retryable`: another worker, or the same one later, may succeed; the class has the usual value.
    `retry_after_s`: when to try again. `labels`: short facts for programs (ErrorInfo.metadata).
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"  # of a subclass: its name, as NOT_FOUND for NotFound
    retryable: bool = False

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"\B[A-Z]", r"_\g<0>", cls.__name__).upper()
        _BY_REASON[cls.reason] = cls

    def __init__(
        self,
        message: str,
        *,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if retryable is not None:
            self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.labels: dict[str, str] = dict(labels or {})


class CallerError(EffuseError):
    """The same call fails again, wherever it goes."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidRequest(CallerError):
    """One or more fields are wrong; the error names them, and has the number of further ones."""

    def __init__(
        self,
        violations: Sequence[FieldViolation],
        num_more: int = 0,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        texts = [f"{v.field}: {v.description}" if v.field else v.description for v in violations]
        if num_more:
            texts.append(f"and {num_more} more")
        super().__init__("; ".join(texts), labels=labels)
        self.violations: tuple[FieldViolation, ...] = tuple(violations)
        self.num_more = num_more

    def __reduce__(self) -> tuple[Any, ...]:
        """A process pool pickles an exception by its text, and cannot restore this one from it."""
        return type(self), (self.violations, self.num_more), vars(self)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """The error for a single field."""
        return cls([FieldViolation(field, description)])


class NotFound(CallerError):
    """No model or request of that name."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyRunning(CallerError):
    """A request of that id is running."""

    code = grpc.StatusCode.ALREADY_EXISTS


class NotSupported(CallerError):
    """The model or the server cannot do it."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(CallerError):
    """The caller has not proved that it may call; the error gives no other detail."""

    code = grpc.StatusCode.UNAUTHENTICATED


class EndedById(CallerError):
    """A client has asked for the request's end by its id."""

    code = grpc.StatusCode.ABORTED


class Poisonous(CallerError):
    """Engines died of this request; it is refused for a while."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Refused(EffuseError):
    """The message is for another attempt, another layout, or another role."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    retryable = True


class Replaced(Refused):
    """The message is for a life of the worker that is over."""


class Aborted(EffuseError):
    """The attempt has already ended."""

    code = grpc.StatusCode.ABORTED
    retryable = True


class Overloaded(EffuseError):
    """There is no room now: try later, or another worker."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class Unavailable(EffuseError):
    """No worker can do it now."""

    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class Starting(Unavailable):
    """The worker has no engine yet, or is replacing one."""


class Draining(Unavailable):
    """The process is ending and accepts nothing more."""


class OtherRole(Unavailable):
    """The worker's role has changed; the label `role` has the new one."""


class EngineLost(Unavailable):
    """The worker's engine ended while the request ran in it; the label `ending` has the kind."""

    @property
    def may_be_outside(self) -> bool:
        """Whether it was killed or hung, which may have causes outside of the engine."""
        return self.labels.get("ending") in ("killed", "hung", "stopped")

    @property
    def is_outside(self) -> bool:
        """Whether a signal from outside stopped it, so that no request in it is the cause."""
        return self.labels.get("ending") == "stopped"


class PeerLost(Unavailable):
    """The peer ended the connection, or could not be reached."""


class TransferFailed(Unavailable):
    """KV pages did not arrive, or arrived altered."""


class Unreserved(TransferFailed):
    """No pages were reserved in time for a computed prompt: the receiver is late."""


class DeadlineExceeded(EffuseError):
    """The caller's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(EffuseError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED


class Bug(EffuseError):
    """An invariant of effuse does not hold. The caller sees only `Bug.logged(id)`."""

    reason = "INTERNAL"

    @classmethod
    def logged(cls, correlation_id: str, *, retryable: bool = False) -> Bug:
        """The message to the caller after an unexpected exception: the id of the log's entry."""
        return cls(
            f"internal error; find it in the server's log under id {correlation_id}",
            retryable=retryable,
            labels={"correlation_id": correlation_id},
        )


def to_status(error: EffuseError) -> status_pb2.Status:
    """Maps an error to the status of the call: code, message, ErrorInfo, and RetryInfo or
    BadRequest if they apply.
    """
    code: int = error.code.value[0]
    status = status_pb2.Status(code=code, message=_cut_message(error.message))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.labels)
    info.metadata["retryable"] = "true" if error.retryable else "false"
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if isinstance(error, InvalidRequest):
        status.details.add().Pack(_bad_request(error))
    return status


def _bad_request(error: InvalidRequest) -> error_details_pb2.BadRequest:
    """As many violations as fit, and the number of further ones."""
    bad = error_details_pb2.BadRequest()
    for one in error.violations[:_MOST_VIOLATIONS]:
        description = _cut(one.description, _DESCRIPTION_CHARS)
        bad.field_violations.add(field=_cut(one.field, _FIELD_CHARS), description=description)
    if more := len(error.violations[_MOST_VIOLATIONS:]) + error.num_more:
        bad.field_violations.add(description=f"and {more} more")
    return bad


def _cut_message(text: str) -> str:
    plain = _ascii(text)
    sizes = accumulate(1 if " " <= each <= "~" and each != "%" else 3 for each in plain)
    return _cut(plain, sum(1 for _ in takewhile(MAX_MESSAGE_CHARS.__ge__, sizes)))


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _cut(text: str, most: int) -> str:
    plain = _ascii(text)
    return plain if len(plain) <= most else f"{plain[: most - 4]} ..."


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> EffuseError:
    """Maps the error of a call back to an exception of the tree.

    A status without our ErrorInfo comes from the library at either end: the connection broke, or
    the answer was not one of our messages. These become `PeerLost` with `peer` in the text.
    Exceptions are the deadline and the cancellation, which this process caused, and a message that
    is too large, which would fail again. The library's text names hosts and ports, so it goes to
    the log and not to the caller.
    """
    code = error.code()
    status = _status_of(error)
    info = error_details_pb2.ErrorInfo()
    if status is not None and any(d.Unpack(info) for d in status.details) and info.domain == DOMAIN:
        return _from_details(status, info)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not finish before the deadline")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"the call to {peer} was cancelled")
    details = error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return InvalidRequest.of("", f"a message of the call to {peer} is too large: {details}")
    return PeerLost(f"{peer}{lost(code)}")


def lost(code: grpc.StatusCode) -> str:
    """The end of the text about a call for which the library reports the loss of its peer."""
    return f" closed the call with {code.name}"


def _from_details(status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> EffuseError:
    labels = dict(info.metadata)
    retryable = labels.pop("retryable", "false") == "true"
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    if info.reason == InvalidRequest.reason:
        for detail in status.details:
            if detail.Unpack(bad):
                found = [FieldViolation(v.field, v.description) for v in bad.field_violations]
                return InvalidRequest(found, labels=labels)
        return InvalidRequest([FieldViolation("", status.message)], labels=labels)
    retry_after_s = None
    for detail in status.details:
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    kind = _BY_REASON.get(info.reason, Bug)
    return kind(status.message, retryable=retryable, retry_after_s=retry_after_s, labels=labels)


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
