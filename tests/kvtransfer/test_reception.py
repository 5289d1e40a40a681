"""Every kind of wrong arrival is refused, for the right reason, on both sides."""

from __future__ import annotations

import msgspec
import pytest
from kvtransfer.fixtures import (
    FIELD_NAMES,
    LEASE_S,
    SMALL,
    WHOLE,
    boundary,
    changed,
)
from kvtransfer.reception_scene import ALL, FINGERPRINT, PAGES, Scene

import effuse.kvtransfer.reception as reception_module
from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cause,
    Fenced,
    HandoffRefused,
    Promised,
)
from effuse.kvtransfer.digest import finish_of
from effuse.kvtransfer.messages import (
    Accepted,
    AttemptId,
    Field,
    PageRef,
    Pages,
    Placed,
    Rejected,
)


@pytest.fixture(params=[True, False], ids=["two_sided", "one_sided"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(is_two_sided=request.param)


@pytest.fixture
def two_sided() -> Scene:
    return Scene()


@pytest.fixture
def one_sided() -> Scene:
    return Scene(is_two_sided=False)


def test_an_honest_transfer_arrives_and_lies_where_it_was_reserved(scene: Scene) -> None:
    scene.begin()
    scene.send(1, 2)
    scene.send(0, 1)
    scene.time += 2.0
    scene.finish()
    # The writer's quarter of a second; the checks took no time.
    assert scene.events == [Arrived("transfer-1", scene.manifest(), 0.25, 3 * SMALL.page_bytes)]
    for index, page in enumerate(PAGES):
        assert scene.memory.bytes_at(page.page_id) == scene.source.bytes_at(index)
    assert scene.transport.answers[-1] == Accepted("transfer-1")
    placed = [one for one in scene.transport.answers if isinstance(one, Placed)]
    expected = [Placed("transfer-1", 1, 0), Placed("transfer-1", 0, 0)]
    assert placed == (expected if scene.is_two_sided else [])
    assert len(scene.receptions) == 0


def test_layers_may_come_one_after_the_other(scene: Scene) -> None:
    scene.begin()
    scene.send(groups=range(1, 2))
    scene.send(0, 1, groups=range(1))
    scene.send(1, 2, groups=range(1))
    scene.finish()
    assert [type(event) for event in scene.events] == [Arrived]


def test_a_group_of_layers_that_is_missing_is_refused(scene: Scene) -> None:
    scene.begin()
    scene.send(groups=range(1, 2))
    scene.send(0, 2, groups=range(1))
    scene.finish()
    cause, text = scene.refusal()
    assert cause is Cause.COVERAGE and "page 2" in text and "never arrived" in text


def test_nothing_arrives_before_its_digests_are_there(scene: Scene) -> None:
    slow = Scene(is_two_sided=scene.is_two_sided, slow=True)
    slow.begin()
    slow.send()
    slow.finish()
    assert slow.events == []
    slow.digester.may_show = True
    slow.receptions.turn()
    assert [type(event) for event in slow.events] == [Arrived]


def test_a_writer_that_introduces_itself_again_promises_pages_until_it_has_claimed_them(
    scene: Scene,
) -> None:
    slow = Scene(is_two_sided=scene.is_two_sided, slow=True)
    slow.begin()
    assert slow.events == []
    slow.begin()
    slow.begin(source="prefill-2")  # not the intended receiver: everything is refused
    promised, refused, *_ = slow.events
    assert promised == Promised("transfer-1")
    assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.INCARNATION
    late = Scene(is_two_sided=scene.is_two_sided, slow=True)
    late.time += 0.3 * LEASE_S
    late.begin()  # its next word may come after the end of the lease
    assert late.events == [Promised("transfer-1")]
    claimed = Scene(is_two_sided=scene.is_two_sided, slow=True)
    claimed.begin()
    claimed.send()
    claimed.finish()
    claimed.begin()
    assert claimed.events == []


def test_a_flipped_byte_is_refused(scene: Scene) -> None:
    scene.begin()
    scene.send()
    manifest = scene.manifest()
    scene.source.bytes_at(1)[17] ^= 1
    scene.finish()
    cause, text = scene.refusal()
    assert cause is Cause.DIGEST
    assert manifest.digest.hex() in text


def test_a_byte_flipped_on_the_way_is_refused(scene: Scene) -> None:
    scene.begin()
    spoiled = bytearray(scene.source.bytes_at(0, 3))
    spoiled[5] ^= 0x80
    scene.send(payload=[memoryview(spoiled)])
    scene.finish()
    assert scene.refusal()[0] is Cause.DIGEST


def test_with_the_digest_check_off_a_flipped_byte_would_pass(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: its result is due to exactly this check."""
    monkeypatch.setattr(reception_module, "check_digest", lambda *_: None)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        test_a_byte_flipped_on_the_way_is_refused(scene)
    assert [type(event) for event in scene.events] == [Arrived]


def test_pages_that_were_never_written_are_refused(one_sided: Scene) -> None:
    """The notification of a write shows that it has ended, not that it was right."""
    one_sided.begin()
    one_sided.send(payload=[memoryview(bytes(3 * SMALL.page_bytes))])
    one_sided.finish()
    assert one_sided.refusal()[0] is Cause.DIGEST


def test_swapped_pages_are_refused(scene: Scene) -> None:
    scene.begin()
    scene.send(payload=[scene.source.bytes_at(i) for i in (1, 0, 2)])
    scene.finish()
    assert scene.refusal()[0] is Cause.DIGEST


def test_pages_named_in_another_order_are_refused(scene: Scene) -> None:
    scene.begin()
    scene.send(pages=(PAGES[1], PAGES[0], PAGES[2]))
    assert scene.refusal()[0] is Cause.COVERAGE


@pytest.mark.parametrize("missing", [1, 512, 1024])
def test_truncated_pages_are_refused(two_sided: Scene, missing: int) -> None:
    two_sided.begin()
    two_sided.send(payload=[two_sided.source.bytes_at(0, 3)[:-missing]])
    assert two_sided.refusal()[0] is Cause.SIZE
    assert not two_sided.memory.tensor.any()


def test_more_bytes_than_pages_are_refused(two_sided: Scene) -> None:
    two_sided.begin()
    two_sided.send(0, 2, payload=[two_sided.source.bytes_at(0, 3)])
    assert two_sided.refusal()[0] is Cause.SIZE


def test_more_in_one_piece_than_there_is_room_for_is_refused(two_sided: Scene) -> None:
    """Bytes copied into a GPU's pages go through a buffer of that size."""
    two_sided.transport.most_bytes = 2 * SMALL.page_bytes
    two_sided.begin()
    two_sided.send(0, 2)
    assert two_sided.events == []
    two_sided.expect(PAGES)
    two_sided.begin()
    two_sided.memory.tensor.zero_()
    two_sided.send(0, 3)
    assert two_sided.refusal()[0] is Cause.SIZE
    assert not two_sided.memory.tensor.any()


def test_bytes_where_none_are_needed_are_refused(one_sided: Scene) -> None:
    one_sided.begin()
    honest = Pages(
        one_sided.reserved.attempt, "prefill-1", "decode-1", WHOLE, 0, PAGES, 0, ALL.stop
    )
    one_sided.say(honest, [one_sided.source.bytes_at(0, 3)])
    assert one_sided.refusal()[0] is Cause.MALFORMED


def test_a_stale_generation_is_refused(scene: Scene) -> None:
    scene.begin()
    scene.send(pages=(PAGES[0], PageRef(4, 4), PAGES[2]))
    cause, text = scene.refusal()
    assert cause is Cause.GENERATION
    assert "generation=5" in text and "generation=4" in text


def test_a_duplicate_push_is_refused_and_places_nothing(two_sided: Scene) -> None:
    two_sided.begin()
    two_sided.send()
    two_sided.send(payload=[memoryview(bytes(3 * SMALL.page_bytes))])
    assert two_sided.refusal()[0] is Cause.COVERAGE
    assert two_sided.memory.bytes_at(3) == two_sided.source.bytes_at(0)


def test_missing_pages_are_refused(scene: Scene) -> None:
    scene.begin()
    scene.send(0, 2)
    scene.finish()
    cause, text = scene.refusal()
    assert cause is Cause.COVERAGE and "page 2" in text and "never arrived" in text


@pytest.mark.parametrize("first", [1, 3, 1 << 31])
def test_pages_beyond_the_reservation_are_refused(scene: Scene, first: int) -> None:
    scene.begin()
    honest = Pages(
        scene.reserved.attempt, "prefill-1", "decode-1", WHOLE, first, PAGES, 0, ALL.stop
    )
    scene.say(honest)
    assert scene.refusal()[0] is Cause.COVERAGE


@pytest.mark.parametrize("groups", [(0, 0), (1, 1), (2, 1), (0, 3), (0, 1 << 31)])
def test_layers_that_there_are_not_are_refused(scene: Scene, groups: tuple[int, int]) -> None:
    scene.begin()
    scene.say(Pages(scene.reserved.attempt, "prefill-1", "decode-1", WHOLE, 0, PAGES, *groups))
    assert scene.refusal()[0] is Cause.COVERAGE


@pytest.mark.parametrize(
    "attempt",
    [AttemptId("request-1", 2, "transfer-1"), AttemptId("request-2", 1, "transfer-1")],
)
@pytest.mark.parametrize("what", ["begin", "send", "finish"])
def test_another_attempt_is_refused(scene: Scene, attempt: AttemptId, what: str) -> None:
    if what != "begin":
        scene.begin()
    if what == "finish":
        scene.send()
    getattr(scene, what)(attempt=attempt)
    assert scene.refusal()[0] is Cause.ATTEMPT


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("begin", {"destination": "decode-0"}),
        ("begin", {"source": "prefill-0"}),
        ("send", {"destination": "decode-0"}),
        ("send", {"source": "prefill-0"}),
        ("finish", {"destination": "decode-0"}),
        ("finish", {"source": "prefill-0"}),
    ],
)
def test_another_incarnation_is_refused_on_either_side(
    scene: Scene, what: str, changes: dict[str, str]
) -> None:
    if what != "begin":
        scene.begin()
    if what == "finish":
        scene.send()
    getattr(scene, what)(**changes)
    cause, text = scene.refusal()
    assert cause is Cause.INCARNATION and next(iter(changes.values())) in text


def test_a_transfer_that_was_forgotten_is_refused_and_nobody_else_told(two_sided: Scene) -> None:
    two_sided.begin()
    two_sided.receptions.forget("transfer-1")
    two_sided.send()
    assert two_sided.events == [Fenced("transfer-1")]
    (rejected,) = [one for one in two_sided.transport.answers if isinstance(one, Rejected)]
    assert rejected.cause == Cause.UNKNOWN_TRANSFER.value
    assert not two_sided.memory.tensor.any()


def test_a_second_manifest_is_refused(scene: Scene) -> None:
    slow = Scene(is_two_sided=scene.is_two_sided, slow=True)
    slow.begin()
    slow.send()
    slow.finish()
    slow.finish()
    assert slow.refusal()[0] is Cause.MALFORMED


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_field_of_the_fingerprint_refuses_before_a_byte_is_placed(
    scene: Scene, name: str
) -> None:
    theirs = changed(FINGERPRINT, name)
    scene.begin(fingerprint=theirs)
    cause, text = scene.refusal()
    assert cause is Cause.FINGERPRINT
    assert repr(name) in text and repr(dict(map(_pair, theirs))[name]) in text
    assert scene.transport.learnt == []


def test_pages_without_an_introduction_are_refused(two_sided: Scene) -> None:
    two_sided.send()
    assert two_sided.refusal()[0] is Cause.FINGERPRINT
    assert not two_sided.memory.tensor.any()


def test_a_manifest_of_another_model_is_refused(scene: Scene) -> None:
    scene.begin()
    scene.send()
    scene.finish(fingerprint=changed(FINGERPRINT, "weights"))
    assert scene.refusal()[0] is Cause.FINGERPRINT


def test_a_writer_that_cannot_be_answered_is_refused(scene: Scene) -> None:
    scene.transport.refusal = HandoffRefused(Cause.MALFORMED, "its metadata is of no use")
    scene.begin()
    assert scene.refusal() == (Cause.MALFORMED, "its metadata is of no use")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"num_bytes": 3 * SMALL.page_bytes - 1}, Cause.SIZE),
        ({"digest": bytes(16)}, Cause.DIGEST),
    ],
    ids=str,
)
def test_false_claims_of_a_manifest_are_refused(
    scene: Scene, change: dict[str, object], cause: Cause
) -> None:
    scene.begin()
    scene.send()
    scene.finish(**change)
    assert scene.refusal()[0] is cause


@pytest.mark.parametrize(
    "spoil",
    [
        {"boundary": boundary(21, tail_token_ids=(7, 8))},
        {"boundary": boundary(20, tail_token_ids=(7, 9))},
        {"boundary": boundary(20, tail_token_ids=(7, 8), hidden=b"x")},
        {"boundary": boundary(20, tail_token_ids=(7, 8), prompt_digest=bytes(16))},
    ],
    ids=["prompt_len", "tail", "hidden", "prompt_digest"],
)
def test_boundary_state_is_covered_by_the_seal(scene: Scene, spoil: dict[str, object]) -> None:
    scene.begin()
    scene.send()
    honest = finish_of(scene.manifest(), 250_000)
    spoilt = msgspec.structs.replace(honest.manifest, **spoil)
    scene.say(msgspec.structs.replace(honest, manifest=spoilt))
    assert scene.refusal()[0] is Cause.SEAL


@pytest.mark.parametrize("spoil", [{"elapsed_us": 250_001}, {"seal": b"x" * 16}], ids=str)
def test_what_is_told_beside_the_manifest_is_sealed_too(
    scene: Scene, spoil: dict[str, object]
) -> None:
    scene.begin()
    scene.send()
    scene.say(msgspec.structs.replace(finish_of(scene.manifest(), 250_000), **spoil))
    assert scene.refusal()[0] is Cause.SEAL


def test_another_seed_gives_other_digests(scene: Scene) -> None:
    other = msgspec.structs.replace(scene.reserved, digest_seed=scene.reserved.digest_seed + 1)
    scene.receptions.expect(other, "prefill-1")
    scene.begin()
    scene.send()
    scene.finish()
    assert scene.refusal()[0] is Cause.DIGEST


def _pair(field: Field) -> tuple[str, str]:
    return field.name, field.value
