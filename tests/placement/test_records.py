"""Stored values: what is written is read again, and what does not fit is refused, never guessed."""

from __future__ import annotations

import json

import pytest
import redis_server

from effuse.placement.records import MalformedRecord, decode_placement, decode_worker, encode


def test_records_survive_their_stored_form() -> None:
    assert decode_worker(encode(redis_server.RECORD)) == redis_server.RECORD
    assert decode_placement(encode(redis_server.PLACED)) == redis_server.PLACED


def test_a_field_of_a_newer_release_is_ignored() -> None:
    value = json.loads(encode(redis_server.RECORD)) | {"colour": "blue"}
    assert decode_worker(json.dumps(value).encode()) == redis_server.RECORD


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"worker_id": "a"}',
        b'{"worker_id": "\xff"}',
        b'{"more": ' + b"[" * 100_000,
        encode(redis_server.RECORD).replace(b'"decode"', b'"router"'),
        encode(redis_server.RECORD).replace(b'"free_pages":64', b'"free_pages":"64"'),
    ],
)
def test_broken_workers_are_refused(broken: bytes) -> None:
    with pytest.raises(MalformedRecord, match="worker record"):
        decode_worker(broken)


def test_a_placement_in_an_unknown_state_is_refused() -> None:
    broken = encode(redis_server.PLACED).replace(b'"running"', b'"dancing"')
    with pytest.raises(MalformedRecord, match=r"\$\.state"):
        decode_placement(broken)
