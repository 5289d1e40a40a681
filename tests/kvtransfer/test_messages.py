"""Messages survive the wire, and nothing malformed or oversized does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvtransfer.fixtures import (
    WHOLE,
    boundary,
)

from effuse.kvtransfer.digest import finish_of, seal_of
from effuse.kvtransfer.messages import (
    MAX_MANIFEST_BYTES,
    MAX_RANKS,
    AttemptId,
    Field,
    KVPart,
    MalformedMessage,
    Manifest,
    PageRef,
    ReceiverAddress,
    Reservation,
    Shard,
    check_reservation,
    decode_reservation,
    decode_to_receiver,
    encode,
)

ATTEMPT = AttemptId("request-1", 1, "transfer-1")


def shard(page_bytes: int = 4096, part: KVPart = WHOLE, **address: Any) -> Shard:
    """A rank at an address."""
    return Shard(address=ReceiverAddress(**address), part=part, page_bytes=page_bytes)


RESERVATION = Reservation(
    attempt=ATTEMPT,
    incarnation="decode-1",
    shards=(shard(connector="zmq", endpoint="tcp://127.0.0.1:1"),),
    num_pool_pages=8,
    pages=(PageRef(3, 1), PageRef(4, 7)),
    fingerprint=(Field("weights", "w1"),),
    digest_seed=5,
    lease_s=5.0,
)
MANIFEST = Manifest(
    attempt=ATTEMPT,
    source="prefill-1",
    destination="decode-1",
    part=WHOLE,
    fingerprint=(Field("weights", "w1"),),
    digest=b"d" * 16,
    num_bytes=8192,
    boundary=boundary(37, tail_token_ids=(1, 2), hidden=b"h" * 8),
)
FINISH = finish_of(MANIFEST, 5)


def test_messages_survive_the_wire() -> None:
    assert decode_to_receiver(encode(FINISH)) == FINISH
    assert decode_reservation(encode(RESERVATION)) == RESERVATION
    assert check_reservation(RESERVATION) == RESERVATION


def test_the_seal_covers_every_field() -> None:
    changes: list[dict[str, object]] = [
        {"attempt": AttemptId("request-1", 2, "transfer-1")},
        {"source": "prefill-2"},
        {"destination": "decode-2"},
        {"part": KVPart(0, 1, 0, 2)},
        {"fingerprint": (Field("weights", "w2"),)},
        {"digest": b"e" * 16},
        {"num_bytes": 8193},
        {"boundary": msgspec.structs.replace(MANIFEST.boundary, prompt_len=38)},
        {"boundary": msgspec.structs.replace(MANIFEST.boundary, tail_token_ids=(1, 3))},
        {"boundary": msgspec.structs.replace(MANIFEST.boundary, hidden=b"g" * 8)},
        {"boundary": msgspec.structs.replace(MANIFEST.boundary, hidden=None)},
        {"boundary": msgspec.structs.replace(MANIFEST.boundary, prompt_digest=bytes(16))},
    ]
    assert {name for change in changes for name in change} == set(MANIFEST.__struct_fields__)
    seals = {seal_of(msgspec.structs.replace(MANIFEST, **change), 5) for change in changes}
    assert len(seals | {FINISH.seal, seal_of(MANIFEST, 6)}) == len(changes) + 2


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_truncated_messages_are_malformed(cut: int) -> None:
    with pytest.raises(MalformedMessage):
        decode_to_receiver(encode(FINISH)[:cut])


@pytest.mark.parametrize(
    "change",
    [
        {"digest": b"short"},
        {"attempt": AttemptId("", 1, "t")},
        {"attempt": AttemptId("r", 0, "t")},
        {"attempt": AttemptId("r", 1, "t" * 129)},
        {"num_bytes": -1},
        {"fingerprint": tuple(Field(str(i), "") for i in range(65))},
    ],
    ids=str,
)
def test_values_beyond_their_caps_are_malformed(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        manifest = msgspec.structs.replace(MANIFEST, **change)
        decode_to_receiver(encode(msgspec.structs.replace(FINISH, manifest=manifest)))


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedMessage, match="exceeds the cap"):
        decode_to_receiver(bytes(MAX_MANIFEST_BYTES + 1))


def test_a_field_of_nobodys_that_never_ends_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="recursion"):
        decode_to_receiver(b"\x82\xa4type\xa6Finish\xa4more" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": (PageRef(8, 1),)}, "outside a pool of 8"),
        ({"pages": (PageRef(3, 1), PageRef(3, 1))}, "twice"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"shards": (shard(0, connector="nixl"),)}, "page_bytes"),
        ({"shards": (shard(connector="nixl", part=KVPart(-1, 2, 0, 2)),)}, "part"),
        ({"shards": (shard(connector="nixl"),) * (MAX_RANKS + 1)}, "shards"),
        ({"shards": (shard(connector="nixl", pool_address=(1 << 63) - 8),)}, "beyond 63 bits"),
        ({"shards": (shard(connector="nixl", memory_kind="TAPE"),)}, "memory_kind"),
    ],
    ids=str,
)
def test_a_reservation_is_checked_before_use(change: dict[str, object], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        check_reservation(msgspec.structs.replace(RESERVATION, **change))
