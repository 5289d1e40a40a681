"""The error tree: every class goes over the wire and comes back as itself."""

from __future__ import annotations

import copy
import string
from base64 import b64encode
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from effuse.protos import errors
from effuse.protos.errors import (
    DETAILS_KEY,
    EffuseError,
    FieldViolation,
    InvalidRequest,
    to_status,
)

_SENT_AS_THEY_ARE = string.punctuation.replace("%", " ")  # by gRPC, for the encoding of quote
KINDS = [
    (errors.NotFound, grpc.StatusCode.NOT_FOUND, False),
    (errors.AlreadyRunning, grpc.StatusCode.ALREADY_EXISTS, False),
    (errors.NotSupported, grpc.StatusCode.UNIMPLEMENTED, False),
    (errors.Poisonous, grpc.StatusCode.FAILED_PRECONDITION, False),
    (errors.Refused, grpc.StatusCode.FAILED_PRECONDITION, True),
    (errors.Replaced, grpc.StatusCode.FAILED_PRECONDITION, True),
    (errors.Aborted, grpc.StatusCode.ABORTED, True),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE, True),
    (errors.Starting, grpc.StatusCode.UNAVAILABLE, True),
    (errors.Draining, grpc.StatusCode.UNAVAILABLE, True),
    (errors.EngineLost, grpc.StatusCode.UNAVAILABLE, True),
    (errors.PeerLost, grpc.StatusCode.UNAVAILABLE, True),
    (errors.TransferFailed, grpc.StatusCode.UNAVAILABLE, True),
    (errors.Unreserved, grpc.StatusCode.UNAVAILABLE, True),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, False),
    (errors.Cancelled, grpc.StatusCode.CANCELLED, False),
    (errors.Bug, grpc.StatusCode.INTERNAL, False),
]


def over_the_wire(error: EffuseError) -> EffuseError:
    status = to_status(error)
    metadata = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    received = grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), metadata, status.message)
    return errors.from_rpc_error(received, "decode worker d0")


@pytest.mark.parametrize(
    ("kind", "code", "retryable"), KINDS, ids=lambda v: getattr(v, "__name__", "")
)
def test_every_kind_comes_back_as_itself(
    kind: type[EffuseError], code: grpc.StatusCode, retryable: bool
) -> None:
    sent = kind("page 7 is gone", retry_after_s=1.5, labels={"worker": "d0"})
    assert to_status(sent).code == code.value[0]
    back = over_the_wire(sent)
    assert type(back) is kind
    assert (back.message, back.labels, back.retry_after_s) == (
        "page 7 is gone",
        {"worker": "d0"},
        1.5,
    )
    assert back.retryable is retryable


@pytest.mark.parametrize("kind", [kind for kind, _, _ in KINDS])
def test_it_comes_back_from_a_pool_of_processes(kind: type[EffuseError]) -> None:
    sent = kind("page 7 is gone", retry_after_s=1.5, labels={"worker": "d0"}, retryable=True)
    back = copy.copy(sent)  # by the calls by which it is sent from one process to another
    assert type(back) is kind and vars(back) == vars(sent) and str(back) == str(sent)


def test_what_is_wrong_with_a_request_comes_back_from_a_pool_of_processes() -> None:
    wrong = [FieldViolation("a", "no"), FieldViolation("", "neither")]
    sent = InvalidRequest(wrong, 7, labels={"x": "y"})
    back = copy.copy(sent)
    assert type(back) is InvalidRequest and vars(back) == vars(sent) and str(back) == str(sent)


def test_every_reason_is_used_once() -> None:
    reasons = [kind.reason for kind, _, _ in KINDS] + [InvalidRequest.reason]
    assert len(set(reasons)) == len(reasons)


def test_one_error_may_differ_from_its_class_in_retryable() -> None:
    assert (
        over_the_wire(errors.Overloaded("too big for this pool", retryable=False)).retryable
        is False
    )


def test_bad_request_names_every_field() -> None:
    error = InvalidRequest(
        [
            errors.FieldViolation("sampling.top_p", "must be in (0, 1], got nan"),
            errors.FieldViolation("prompt", "must not be empty"),
        ]
    )
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in to_status(error).details)
    assert [v.field for v in details.field_violations] == ["sampling.top_p", "prompt"]
    back = over_the_wire(error)
    assert isinstance(back, InvalidRequest)
    assert back.violations == error.violations


@pytest.mark.parametrize("character", ["x", "%", "\n", "\u00e9", "\N{PILE OF POO}"])
def test_a_long_message_fits_the_trailers(character: str) -> None:
    violations = [errors.FieldViolation(character * 500, character * 5000) for _ in range(100)]
    status = to_status(InvalidRequest(violations))
    sent = quote(status.message, safe=_SENT_AS_THEY_ARE)
    assert len(sent) + len(b64encode(status.SerializeToString())) < 7500  # of 8 KiB
    assert status.message.endswith(" ...")


def test_what_does_not_fit_is_said_to_be_there() -> None:
    violations = [errors.FieldViolation(f"stop[{at}]", "is empty") for at in range(11)]
    back = over_the_wire(InvalidRequest(violations))
    assert isinstance(back, InvalidRequest)
    assert [one.field for one in back.violations] == [*(f"stop[{at}]" for at in range(8)), ""]
    assert back.message.endswith("stop[7]: is empty; and 3 more")
    counted = over_the_wire(InvalidRequest(violations, 5))
    assert counted.message.endswith("stop[7]: is empty; and 8 more")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerLost),
        (grpc.StatusCode.UNKNOWN, errors.PeerLost),
        (grpc.StatusCode.INTERNAL, errors.PeerLost),
        (grpc.StatusCode.UNIMPLEMENTED, errors.PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_a_status_without_our_details_is_a_lost_peer(
    code: grpc.StatusCode, kind: type[EffuseError]
) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "socket closed")
    error = errors.from_rpc_error(bare, "prefill worker p1")
    assert type(error) is kind
    assert "prefill worker p1" in error.message
    assert "socket closed" not in error.message  # it names hosts and ports: for our log only


def test_details_that_are_not_a_status_are_ignored() -> None:
    metadata = grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff\xff"))
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), metadata, "x")
    assert type(errors.from_rpc_error(broken, "d0")) is errors.PeerLost
