"""Everything that can be wrong with what arrives is refused, for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from kvtransfer.fixtures import SMALL, boundary, changed, filled, print_of, reservation

import effuse.kvtransfer.incoming as incoming_module
from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.digest import page_digests, sealed
from effuse.kvtransfer.incoming import Incoming
from effuse.kvtransfer.layout import FIELD_NAMES
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import (
    AttemptId,
    Manifest,
    PageRef,
    ReceiverAddress,
    Reservation,
)

FINGERPRINT = print_of(SMALL)
PAGES = (PageRef(3, 1), PageRef(4, 5), PageRef(1, 2))


@dataclass
class Scene:
    """A source, a pool that expects three pages of it, and the honest messages between them."""

    source: PageMemory
    memory: PageMemory
    incoming: Incoming
    reserved: Reservation

    def introduce(self) -> None:
        self.incoming.introduce(self.reserved.attempt, "prefill-1", "decode-1", FINGERPRINT)

    def place(self, first: int = 0, count: int = 3, **changes: object) -> None:
        words: dict[str, Any] = {
            "attempt": self.reserved.attempt,
            "source": "prefill-1",
            "destination": "decode-1",
            "first": first,
            "pages": self.reserved.pages[first : first + count],
        }
        if "payload" not in changes:
            words["payload"] = [self.source.read_pages(i) for i in range(first, first + count)]
        self.incoming.place(**(words | changes))

    def manifest(self, **changes: object) -> Manifest:
        honest = Manifest(
            attempt=self.reserved.attempt,
            source_incarnation="prefill-1",
            destination_incarnation="decode-1",
            fingerprint=FINGERPRINT,
            pages=self.reserved.pages,
            page_digests=tuple(page_digests(self.source, range(3))),
            num_bytes=3 * self.source.page_bytes,
            boundary=boundary(20, tail_token_ids=(7, 8)),
        )
        return sealed(msgspec.structs.replace(honest, **changes))


@pytest.fixture
def scene() -> Scene:
    memory = PageMemory(SMALL, 6)
    incoming = Incoming(memory, "decode-1", FINGERPRINT)
    reserved = reservation(memory, ReceiverAddress(connector="zmq"), PAGES)
    incoming.expect(reserved, "prefill-1")
    return Scene(filled(SMALL, 3), memory, incoming, reserved)


def refused(cause: Cause, action: Callable[[], object]) -> str:
    with pytest.raises(HandoffRefused) as caught:
        action()
    assert caught.value.cause is cause, caught.value
    return str(caught.value)


def test_an_honest_transfer_is_accepted_and_lies_where_it_was_reserved(scene: Scene) -> None:
    scene.introduce()
    scene.place(1, 2)
    scene.place(0, 1)
    scene.incoming.accept(scene.manifest(), one_sided=False)
    for index, page in enumerate(PAGES):
        assert scene.memory.read_pages(page.page_id) == scene.source.read_pages(index)
    assert len(scene.incoming) == 0


def test_runs_of_pages_travel_in_one_piece(scene: Scene) -> None:
    scene.introduce()
    scene.place(payload=[scene.source.read_pages(0, 3)])
    scene.incoming.accept(scene.manifest(), one_sided=False)


def test_a_flipped_byte_is_refused(scene: Scene) -> None:
    scene.introduce()
    scene.place()
    manifest = scene.manifest()
    scene.source.page_bytes_view(1)[17] ^= 1
    text = refused(
        Cause.DIGEST,
        lambda: scene.incoming.accept(scene.manifest(), one_sided=False),
    )
    assert "page 1" in text and manifest.page_digests[1].hex() in text


def test_a_byte_flipped_on_the_way_is_refused(scene: Scene) -> None:
    scene.introduce()
    spoiled = bytearray(scene.source.read_pages(0, 3))
    spoiled[5] ^= 0x80
    scene.place(payload=[memoryview(spoiled)])
    refused(Cause.DIGEST, lambda: scene.incoming.accept(scene.manifest(), one_sided=False))


def test_with_the_digest_check_off_a_flipped_byte_would_pass(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: what it asserts is due to this very check."""
    monkeypatch.setattr(incoming_module, "check_digests", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_byte_flipped_on_the_way_is_refused(scene)


def test_swapped_pages_are_refused(scene: Scene) -> None:
    scene.introduce()
    scene.place(payload=[scene.source.read_pages(i) for i in (1, 0, 2)])
    refused(Cause.DIGEST, lambda: scene.incoming.accept(scene.manifest(), one_sided=False))


def test_pages_named_in_another_order_are_refused(scene: Scene) -> None:
    scene.introduce()
    swapped = (PAGES[1], PAGES[0], PAGES[2])
    refused(Cause.COVERAGE, lambda: scene.place(pages=swapped))


@pytest.mark.parametrize("missing", [1, 512, 1024])
def test_truncated_pages_are_refused(scene: Scene, missing: int) -> None:
    scene.introduce()
    short = scene.source.read_pages(0, 3)[:-missing]
    refused(Cause.SIZE, lambda: scene.place(payload=[short]))


def test_more_bytes_than_pages_are_refused(scene: Scene) -> None:
    scene.introduce()
    refused(Cause.SIZE, lambda: scene.place(0, 2, payload=[scene.source.read_pages(0, 3)]))


def test_a_stale_generation_is_refused(scene: Scene) -> None:
    scene.introduce()
    stale = (PAGES[0], PageRef(4, 4), PAGES[2])
    text = refused(Cause.GENERATION, lambda: scene.place(pages=stale))
    assert "generation=5" in text and "generation=4" in text
    scene.place()
    refused(
        Cause.GENERATION,
        lambda: scene.incoming.accept(scene.manifest(pages=stale), one_sided=False),
    )


def test_a_duplicate_push_is_refused_and_places_nothing(scene: Scene) -> None:
    scene.introduce()
    scene.place()
    junk = [memoryview(bytes(3 * SMALL.page_bytes))]
    refused(Cause.COVERAGE, lambda: scene.place(payload=junk))
    assert scene.memory.read_pages(3) == scene.source.read_pages(0)


def test_missing_pages_are_refused(scene: Scene) -> None:
    scene.introduce()
    scene.place(0, 2)
    text = refused(Cause.COVERAGE, lambda: scene.incoming.accept(scene.manifest(), one_sided=False))
    assert "page 2" in text and "never arrived" in text


@pytest.mark.parametrize("span", [(-1, 2), (2, 2), (3, 1), (1 << 31, 1)])
def test_pages_beyond_the_reservation_are_refused(scene: Scene, span: tuple[int, int]) -> None:
    scene.introduce()
    first, count = span
    pages = PAGES[:count]
    refused(Cause.COVERAGE, lambda: scene.place(first, count, pages=pages, payload=[]))


@pytest.mark.parametrize(
    "attempt",
    [AttemptId("request-1", 2, "transfer-1"), AttemptId("request-2", 1, "transfer-1")],
)
def test_another_attempt_is_refused(scene: Scene, attempt: AttemptId) -> None:
    scene.introduce()
    refused(Cause.ATTEMPT, lambda: scene.place(attempt=attempt))
    refused(
        Cause.ATTEMPT,
        lambda: scene.incoming.accept(scene.manifest(attempt=attempt), one_sided=False),
    )


def test_another_incarnation_is_refused_on_either_side(scene: Scene) -> None:
    scene.introduce()
    text = refused(Cause.INCARNATION, lambda: scene.place(destination="decode-0"))
    assert "decode-0" in text and "decode-1" in text
    refused(Cause.INCARNATION, lambda: scene.place(source="prefill-0"))
    refused(
        Cause.INCARNATION,
        lambda: scene.incoming.accept(
            scene.manifest(destination_incarnation="decode-0"), one_sided=True
        ),
    )


def test_a_transfer_that_was_forgotten_is_refused(scene: Scene) -> None:
    scene.introduce()
    scene.incoming.forget("transfer-1")
    refused(Cause.UNKNOWN_TRANSFER, scene.place)
    assert not scene.memory.tensor.any()


def test_a_manifest_ends_its_transfer_even_when_it_is_refused(scene: Scene) -> None:
    scene.introduce()
    refused(Cause.COVERAGE, lambda: scene.incoming.accept(scene.manifest(), one_sided=False))
    refused(
        Cause.UNKNOWN_TRANSFER, lambda: scene.incoming.accept(scene.manifest(), one_sided=False)
    )


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_of_the_fingerprint_refuses_before_a_byte_is_placed(
    scene: Scene, name: str
) -> None:
    theirs = changed(FINGERPRINT, name)
    text = refused(
        Cause.FINGERPRINT,
        lambda: scene.incoming.introduce(scene.reserved.attempt, "prefill-1", "decode-1", theirs),
    )
    assert repr(name) in text and repr(dict(map(_pair, theirs))[name]) in text
    refused(Cause.FINGERPRINT, scene.place)
    assert not scene.memory.tensor.any()
    refused(
        Cause.FINGERPRINT,
        lambda: scene.incoming.accept(scene.manifest(fingerprint=theirs), one_sided=True),
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"num_bytes": 3 * SMALL.page_bytes - 1}, Cause.SIZE),
        ({"page_digests": ()}, Cause.DIGEST),
        ({"pages": PAGES[:2]}, Cause.COVERAGE),
        ({"pages": (*PAGES, PageRef(5, 1))}, Cause.COVERAGE),
    ],
    ids=str,
)
def test_false_claims_of_a_manifest_are_refused(
    scene: Scene, change: dict[str, object], cause: Cause
) -> None:
    scene.introduce()
    scene.place()
    refused(cause, lambda: scene.incoming.accept(scene.manifest(**change), one_sided=False))


@pytest.mark.parametrize(
    "spoil",
    [
        {"boundary": boundary(21, tail_token_ids=(7, 8))},
        {"boundary": boundary(20, tail_token_ids=(7, 9))},
        {"boundary": boundary(20, tail_token_ids=(7, 8), hidden=b"x")},
        {"boundary": boundary(20, tail_token_ids=(7, 8), prompt_digest=bytes(16))},
        {"seal": b""},
        {"seal": b"x" * 16},
    ],
    ids=["prompt_len", "tail", "hidden", "seed", "no seal", "false seal"],
)
def test_boundary_state_is_covered_by_the_seal(scene: Scene, spoil: dict[str, object]) -> None:
    scene.introduce()
    scene.place()
    spoiled = msgspec.structs.replace(scene.manifest(), **spoil)
    refused(Cause.SEAL, lambda: scene.incoming.accept(spoiled, one_sided=False))


def test_one_sided_pages_are_digested_where_they_lie(scene: Scene) -> None:
    for index, page in enumerate(PAGES):
        scene.memory.write_pages(page.page_id, scene.source.read_pages(index))
    scene.incoming.landed(scene.reserved.attempt, "prefill-1", 0, 2)
    scene.incoming.accept(scene.manifest(), one_sided=True)


def test_one_sided_pages_that_never_landed_are_refused(scene: Scene) -> None:
    refused(Cause.DIGEST, lambda: scene.incoming.accept(scene.manifest(), one_sided=True))


@pytest.mark.parametrize("span", [(0, 4), (3, 1), (2, 2)])
def test_landed_pages_beyond_the_reservation_are_refused(
    scene: Scene, span: tuple[int, int]
) -> None:
    refused(
        Cause.COVERAGE,
        lambda: scene.incoming.landed(scene.reserved.attempt, "prefill-1", *span),
    )


def _pair(field: object) -> tuple[str, str]:
    return field.name, field.value  # type: ignore[attr-defined]
