"""Fingerprints name the field that differs, whichever it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kvtransfer.groups import layouts_of

from effuse.kvtransfer.layout import (
    MOST_GROUPS,
    Fingerprint,
    KVLayout,
    ModelFacts,
    fingerprint,
)
from effuse.kvtransfer.messages import Field, mismatch

FIELD_NAMES = (
    *("weights", "architecture", "dtype", "num_layers", "num_kv_heads", "head_dim", "page_size"),
    *("layout", "block_size", "mask_token_id", "prompt_attention", "commit_rule", "layer_groups"),
    *("digest", "handoff", "deterministic", "kv_unit_tokens"),
)
LAYOUT = KVLayout("unified", 7, 2, 32, 16, "float32")
FACTS = ModelFacts(
    weights="w1",
    architecture="sdar",
    block_size=16,
    mask_token_id=3,
    prompt_attention="causal_blocks",
    commit_rule="clean",
    unit_tokens=64,
)


def changed(print_: Fingerprint, name: str) -> Fingerprint:
    return tuple(Field(f.name, f.value + "x") if f.name == name else f for f in print_)


@pytest.mark.parametrize(("degree", "context"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 2)])
def test_a_page_of_the_pools_tables_counts_each_head_of_all_ranks_once(
    degree: int, context: int
) -> None:
    for rank in range(degree):
        own = layouts_of(LAYOUT, degree, context)[rank]
        assert own.span_bytes == LAYOUT.page_bytes * context
        assert own.span == LAYOUT.page_size * context


def test_page_bytes_count_all_layers_and_both_tensors() -> None:
    assert LAYOUT.page_bytes == 7 * 2 * 2 * 16 * 32 * 4
    assert dataclasses.replace(LAYOUT, dtype="bfloat16").page_bytes == LAYOUT.page_bytes // 2


def test_pages_for_rounds_up() -> None:
    assert [LAYOUT.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_the_fingerprint_has_the_agreed_fields_in_order() -> None:
    assert tuple(f.name for f in fingerprint(LAYOUT, FACTS)) == FIELD_NAMES


def test_equal_fingerprints_agree() -> None:
    assert mismatch(fingerprint(LAYOUT, FACTS), fingerprint(LAYOUT, FACTS)) is None


def test_workers_with_and_without_batch_invariance_differ() -> None:
    ours = fingerprint(LAYOUT, dataclasses.replace(FACTS, deterministic=True))
    assert str(mismatch(ours, fingerprint(LAYOUT, FACTS))) == (
        "fingerprint field 'deterministic' differs: ours is 'true', theirs is 'false'"
    )
    older = tuple(field for field in fingerprint(LAYOUT, FACTS) if field.name != "deterministic")
    found = mismatch(ours, older)
    assert found is not None and (found.name, found.theirs) == ("deterministic", "(absent)")


def test_workers_with_the_fewest_tokens_in_a_unit_pair_with_older_ones() -> None:
    names = [field.name for field in fingerprint(LAYOUT, dataclasses.replace(FACTS, unit_tokens=0))]
    assert names == list(FIELD_NAMES[:-1])


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_single_field_is_compared(name: str) -> None:
    ours = fingerprint(LAYOUT, FACTS)
    found = mismatch(ours, changed(ours, name))
    assert found is not None and found.name == name
    assert found.theirs == found.ours + "x"
    assert name in str(found) and repr(found.theirs) in str(found)


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_a_missing_field_is_a_mismatch(name: str) -> None:
    ours = fingerprint(LAYOUT, FACTS)
    found = mismatch(ours, tuple(f for f in ours if f.name != name))
    assert found is not None and (found.name, found.theirs) == (name, "(absent)")


def test_a_surplus_or_repeated_field_is_a_mismatch() -> None:
    ours = fingerprint(LAYOUT, FACTS)
    surplus = mismatch(ours, (*ours, Field("quantisation", "int8")))
    assert surplus is not None and surplus.name == "quantisation"
    assert mismatch(ours, (*ours, ours[0])) is not None


def test_workers_of_other_layouts_differ_in_the_field_layout_alone() -> None:
    ours = fingerprint(LAYOUT, FACTS)
    theirs = fingerprint(dataclasses.replace(LAYOUT, kind="distinct"), FACTS)
    found = mismatch(ours, theirs)
    assert found is not None
    assert (found.name, found.ours, found.theirs) == ("layout", "unified", "distinct")
    assert [a.name for a, b in zip(ours, theirs, strict=True) if a != b] == ["layout"]


@pytest.mark.parametrize(
    ("num_layers", "groups"),
    [(1, (1, 1)), (7, (7, 7)), (11, (1, 11)), (28, (7, 14)), (32, (8, 16)), (64, (8, 16))],
)
def test_layers_are_as_many_equal_groups_as_the_connector_gains_from(
    num_layers: int, groups: tuple[int, int]
) -> None:
    layout = dataclasses.replace(LAYOUT, num_layers=num_layers)
    for connector, num_groups in zip(("nixl", "zmq"), groups, strict=True):
        cut = dataclasses.replace(layout, most_groups=MOST_GROUPS[connector])
        assert cut.num_groups == num_groups
        assert cut.group_bytes * num_groups == layout.page_bytes
        assert cut.page_shape == (num_groups, 2, num_layers // num_groups, 2, 16, 32)
        assert cut.head_bytes * 2 == cut.group_bytes


def test_pages_of_other_groups_of_layers_are_refused() -> None:
    """The same numbers lie in another order there."""
    ours = dataclasses.replace(LAYOUT, num_layers=32, most_groups=MOST_GROUPS["nixl"])
    theirs = dataclasses.replace(ours, most_groups=MOST_GROUPS["zmq"])
    found = mismatch(fingerprint(ours, FACTS), fingerprint(theirs, FACTS))
    assert found is not None and (found.name, found.ours, found.theirs) == (
        "layer_groups",
        "8",
        "16",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "diagonal"}, r"one of \('unified', 'distinct'\), got 'diagonal'"),
        ({"kind": "distinct", "head_dim": 6}, "multiple of 4 for float32, got 6"),
        ({"dtype": "float8"}, "float8"),
        ({"page_size": 0}, "positive"),
    ],
)
def test_bad_layouts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LAYOUT, **change)
