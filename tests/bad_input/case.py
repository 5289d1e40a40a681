"""One class of bad input: the message and its destination, and the status, reason and field that
must result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from effuse.compat import kserve_pb2 as kserve
from effuse.protos.errors import DETAILS_KEY

Target: TypeAlias = Literal["router", "prefill-0", "decode-0"]
Sent: TypeAlias = "Message | bytes"
DEADLINE_S: Final = 60.0

INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND: Final = grpc.StatusCode.NOT_FOUND
BY_LIBRARY: Final = "by the library"
"""In place of a reason: gRPC itself refused, with only a status."""

BY_ANYONE: Final = "by the library or by us"
"""In place of a reason: timing decides which side refuses."""

_REASONS: Final = {INVALID: "INVALID_REQUEST", NOT_FOUND: "NOT_FOUND"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    reason: str = BY_LIBRARY
    fields: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One class. `field`: the first violation's; empty if no field is wrong."""

    method: str
    sent: Sequence[Sent]
    code: grpc.StatusCode = INVALID
    reason: str = ""  # of ErrorInfo; empty takes the usual one of the code
    field: str = ""
    said: str = ""  # a part of the message
    to: Target = "router"
    metadata: tuple[tuple[str, str], ...] | None = None  # None shows a good token
    timeout_s: float = DEADLINE_S
    compression: grpc.Compression | None = None

    def check(self, found: Outcome) -> None:
        """Fails where the outcome is another one."""
        reason = self.reason or _REASONS[self.code]
        if reason == BY_ANYONE:
            reason = BY_LIBRARY if found.reason == BY_LIBRARY else self.code.name
        first = found.fields[0] if found.fields else ""
        assert (found.code, found.reason, first) == (self.code, reason, self.field), found
        assert self.said in found.text, found
        for leaked in ("Traceback", "Error parsing", ".py", "0x7f"):
            assert leaked not in found.text, found


def send(channel: grpc.Channel, case: Case, metadata: tuple[tuple[str, str], ...]) -> Outcome:
    """Calls, and reads to the end; on the wire methods of all four kinds are the same."""
    shown = metadata if case.metadata is None else case.metadata
    sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in case.sent]
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(case.method)
    answers: list[bytes] = []
    try:
        answers.extend(
            call(iter(sent), timeout=case.timeout_s, metadata=shown, compression=case.compression)
        )
    except grpc.RpcError as error:
        return outcome_of(error)
    if case.method.endswith("/ModelStreamInfer"):
        return _told_in_stream(answers)
    return Outcome(grpc.StatusCode.OK)


def outcome_of(error: grpc.RpcError) -> Outcome:
    """The status and the details of an error."""
    assert isinstance(error, grpc.Call)
    reason, fields = BY_LIBRARY, tuple[str, ...]()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
                if detail.Unpack(info):
                    reason = info.reason
                elif detail.Unpack(bad):
                    fields = tuple(one.field for one in bad.field_violations)
    return Outcome(error.code(), reason, fields, error.details() or "")


def _told_in_stream(answers: Sequence[bytes]) -> Outcome:
    """KServe's stream reports an error as `CODE: field: text` and goes on."""
    told = kserve.ModelStreamInferResponse.FromString(answers[-1]).error_message
    if not told:
        return Outcome(grpc.StatusCode.OK)
    name, _, text = told.partition(": ")
    code = grpc.StatusCode[name]
    fields = (text.partition(": ")[0],) if code is INVALID else ()
    return Outcome(code, _REASONS[code], fields, text)
