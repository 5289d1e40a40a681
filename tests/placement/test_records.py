"""Stored values: a written value can be read again, and invalid ones are refused, never guessed."""

from __future__ import annotations

import json
import re

import pytest
import redis_server
from msgspec import structs

from effuse.placement.records import (
    MOST_LINKS,
    Link,
    Load,
    MalformedRecord,
    decode_placement,
    decode_worker,
    encode,
)


def test_records_survive_their_stored_form() -> None:
    assert decode_worker(encode(redis_server.RECORD)) == redis_server.RECORD
    assert decode_placement(encode(redis_server.PLACED)) == redis_server.PLACED


def test_counts_at_zero_are_left_out() -> None:
    value = json.loads(encode(structs.replace(redis_server.RECORD, load=Load(steps=3))))
    assert value["load"] == {"steps": 3}
    assert decode_worker(json.dumps(value).encode()).load == Load(steps=3)


def test_workers_of_one_model_share_its_record() -> None:
    values = [encode(structs.replace(redis_server.RECORD, worker_id=name)) for name in "ab"]
    first, second = map(decode_worker, values)
    assert first.model is second.model and first.model == redis_server.RECORD.model
    other = decode_worker(values[0].replace(b'"vocab_size":', b'"vocab_size":1'))
    assert other.model != first.model, "another model under the same name"


def test_a_field_of_a_newer_release_is_ignored() -> None:
    value = json.loads(encode(redis_server.RECORD)) | {"colour": "blue"}
    assert decode_worker(json.dumps(value).encode()) == redis_server.RECORD


def test_a_worker_of_an_older_release_promises_nothing() -> None:
    value = json.loads(encode(redis_server.RECORD))
    del value["model"]["deterministic"], value["capacity"]["replicas"]
    assert decode_worker(json.dumps(value).encode()) == redis_server.RECORD
    assert not redis_server.RECORD.model.deterministic


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"attempt":1', b'"attempt":-1'),
        (b'"attempt":1', b'"attempt":4294967296'),
        (b'"seed":0', b'"seed":-1'),
        (b'"seed":0', b'"seed":18446744073709551616'),
    ],
)
def test_a_placement_with_numbers_beyond_their_bounds_is_refused(
    before: bytes, after: bytes
) -> None:
    stored = encode(redis_server.PLACED)
    assert before in stored
    with pytest.raises(MalformedRecord, match="placement record"):
        decode_placement(stored.replace(before, after))


@pytest.mark.parametrize("number", [b"-1", b"9223372036854775808"])
@pytest.mark.parametrize("name", [b"steps", b"free_pages", b"page_size", b"vocab_size"])
def test_a_worker_with_numbers_that_no_client_can_be_told_is_refused(
    name: bytes, number: bytes
) -> None:
    broken = re.sub(rb'"%s":\d+' % name, b'"%s":%s' % (name, number), encode(redis_server.RECORD))
    with pytest.raises(MalformedRecord, match=name.decode()):
        decode_worker(broken)


LINK = Link("decode-0", "18ea50053d4e62c2-63e84a4fef8eaec0", "rc_mlx5 or tcp", 213_412_345_678.9)


def test_links_survive_and_as_many_as_are_allowed_stay_small() -> None:
    record = redis_server.worker(role="prefill", links=(LINK,) * MOST_LINKS, min_handoff_gbps=2.5)
    value = encode(record)
    assert decode_worker(value) == record
    assert len(value) < 150_000


@pytest.mark.parametrize(
    "links",
    [
        (LINK,) * (MOST_LINKS + 1),
        (Link("d" * 129, "1", "tcp", 1.0),),
        (Link("d0", "1" * 129, "tcp", 1.0),),
        (Link("d0", "1", "t" * 65, 1.0),),
        (Link("d0", "1", "tcp", -1.0),),
    ],
)
def test_links_beyond_their_bounds_are_refused(links: tuple[Link, ...]) -> None:
    with pytest.raises(MalformedRecord, match="links"):
        decode_worker(encode(redis_server.worker(links=links)))


def test_a_link_is_of_one_life_and_is_held_to_the_limit() -> None:
    peer = redis_server.worker(worker_id="decode-0", incarnation=LINK.peer_incarnation)
    other = redis_server.worker(worker_id="decode-0", incarnation="later")
    for least, to_peer, to_other in (
        (0.0, True, True),
        (213.0, True, False),
        (214.0, False, False),
    ):
        own = redis_server.worker(
            worker_id="prefill-0", role="prefill", links=(LINK,), min_handoff_gbps=least
        )
        assert (own.link_to(peer), own.link_to(other)) == (LINK, None)
        assert (own.may_push_to(peer), own.may_push_to(other)) == (to_peer, to_other)
