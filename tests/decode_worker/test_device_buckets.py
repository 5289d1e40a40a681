"""Buckets are fine, and the prediction of a step's needs covers the machine's next step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoding.scripts import MASK_ID, make_settings
from operators.torch_plan import Views, plan_step
from operators.torch_steps import advance

from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker import device_buckets
from effuse.decode_worker.denoise import open_step
from effuse.decode_worker.device_buckets import (
    LEAST_SAVED,
    LEAST_SAVED_EACH,
    Beginnings,
    Forecast,
    Integers,
    bucket,
    context_class,
)
from effuse.decode_worker.device_slots import slot_row
from effuse.decode_worker.sequence import Sequence
from effuse.kernels.step_slots import (
    MOST_SHARED,
    NUM_RUNS,
    Column,
    SlotLayout,
    SlotTable,
    StepRows,
)
from effuse.kernels.values import Candidates

LAYOUT = SlotLayout(num_slots=2, block_size=8, max_window=3, max_stops=1, max_pages=32)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)


def test_buckets_grow_and_pad_little() -> None:
    waste = []
    for count in range(1, 9000):
        size = bucket(count)
        assert size >= count and bucket(size) == size and size >= bucket(max(1, count - 1))
        waste.append(size / count - 1)
    assert np.mean(waste[128:]) < 0.03
    assert max(waste[512:]) < 0.13


def test_context_classes_cover_and_double_at_most() -> None:
    for count in (0, 1, 768, 769, 5000, 100_000):
        size = context_class(count)
        assert size >= count and size % 256 == 0
        assert size <= max(768, 2 * count)


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_slot_with_a_filter_is_forecast_until_it_leaves(changed: dict[str, float]) -> None:
    forecast = Forecast(LAYOUT)
    forecast.join(0, _row(1))
    assert not forecast.need().filters
    forecast.join(1, _row(1, Sampling(**{"temperature": 0.5, "seed": 1, **changed})))  # type: ignore[arg-type]
    assert forecast.need().filters
    forecast.leave(1)
    assert not forecast.need().filters


@pytest.mark.parametrize(("window", "pace"), [(3, 1), (1, 4)])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_forecast_is_what_comes(lag: int, window: int, pace: int) -> None:
    """At an even pace, with the last records or those before them, no row is forecast in vain."""
    table = SlotTable(LAYOUT, torch.device("cpu"))
    rows = StepRows(LAYOUT, 96, torch.device("cpu"))
    control = torch.tensor([0, 0, 96, 0], dtype=torch.int32)
    records = torch.zeros(2, LAYOUT.record_width, dtype=torch.int32)
    forecast, told = Forecast(LAYOUT), []
    row = _row(window)
    table.rows[0] = torch.from_numpy(row)
    forecast.join(0, row)
    for step in range(40):
        forecast.launched()
        plan_step(table, control, rows, 96, 8, MASK_ID, False, False)
        advance(table, control, rows.first_candidate, _of_each_block(table, pace), records)
        told.append(records.clone().numpy())
        if step >= lag:
            forecast.read(told[step - lag], is_last=lag == 0)
        need = forecast.need()
        if step > lag:  # by then it knows the pace
            assert need.rows == need.least_rows == int(table.rows[:, Column.NUM_BLOCKS][0]) * 8
            assert int(table.rows[:, Column.NUM_MASKS][0]) <= need.candidates <= need.rows
            assert need.context >= int(table.rows[:, Column.START][0])
    assert {int(r[0, Column.NUM_SETTLED]) for r in told} == {0, 1}


def test_records_of_others_are_passed_over() -> None:
    forecast = Forecast(LAYOUT)
    row = _row()
    forecast.join(0, row)
    before = forecast.need()
    stale = np.zeros((2, LAYOUT.record_width), dtype=np.int32)
    stale[:, Column.GENERATION] = row[Column.GENERATION] + 1
    stale[:, Column.NUM_BLOCKS] = 3
    forecast.read(stale, is_last=True)
    assert forecast.need() == before
    forecast.leave(0)
    assert forecast.need().rows == 0


def _row(window: int = 3, sampling: Sampling = GREEDY) -> Integers:
    sequence = Sequence(
        range(10, 18),
        origin=8,
        block_size=8,
        mask_token_id=MASK_ID,
        stopping=Stopping(max_tokens=200),
    )
    sequence.store(8)
    settings = make_settings(window=window, add=0.25, full=0.5)
    open_step(sequence, settings)
    facts = {"generation": 1, "pages": range(32), "page_size": 8}
    return slot_row(LAYOUT, sequence, settings, sampling, **facts)  # type: ignore[arg-type]


def _of_each_block(table: SlotTable, pace: int) -> Candidates:
    """Passes so many of the first masks of every block."""
    masked = Views(table).masked[0]
    start = int(table.rows[:, Column.START][0]) // 8 - 1
    order = (start + torch.arange(LAYOUT.ring)) % LAYOUT.ring
    exists = torch.arange(LAYOUT.ring) < table.rows[:, Column.NUM_BLOCKS][0]
    flight = masked[order] * exists[:, None]
    passes = ((flight.cumsum(1) <= pace) & (flight == 1))[flight == 1]
    count = len(passes)
    return Candidates(torch.full((count,), 9), passes.float(), torch.zeros(count))


PAGE = 4
SLOTS = SlotLayout(num_slots=24, block_size=4, max_window=1, max_stops=1, max_pages=64)


@pytest.fixture(autouse=True)
def short_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_buckets, "LEAST_SAVED", 1)
    monkeypatch.setattr(device_buckets, "LEAST_SAVED_EACH", 0)


def beginnings(
    pages: dict[int, str], *, kv_heads: int = 8, layout: SlotLayout = SLOTS
) -> Beginnings:
    """Of slots with these cached pages, a letter each; blocks of 4 rows and 4 heads in a group."""
    found = Beginnings(layout, PAGE, groups=4, kv_heads=kv_heads)
    for slot, ids in pages.items():
        row = np.zeros(layout.width, dtype=np.int32)
        row[Column.START] = len(ids) * PAGE + PAGE - 1  # the last page is not full
        row[Column.WINDOW] = 1
        row[layout.pages_at : layout.pages_at + len(ids)] = list(map(ord, ids))
        row[layout.pages_at + len(ids)] = ord("Z")  # the page that is not full
        found.join(slot, row)
    return found


def told(values: Integers) -> tuple[list[int], list[tuple[int, int]], dict[int, int]]:
    """(slots in packed order; slot and pages of each shared beginning; run of each slot)."""
    order, runs = values[: 2 * SLOTS.num_slots].reshape(2, -1).tolist()
    leaders, pages = values[2 * SLOTS.num_slots :].reshape(2, NUM_RUNS).tolist()
    assert sorted(order) == list(range(SLOTS.num_slots))
    assert runs == sorted(runs) and pages[MOST_SHARED] == 0
    shared = [(slot, count) for slot, count in zip(leaders, pages, strict=True) if count]
    return order, shared, dict(zip(order, runs, strict=True))


def runs_of(run_of: dict[int, int]) -> list[set[int]]:
    """The slots of each shared beginning."""
    kept = {run for run in run_of.values() if run < MOST_SHARED}
    return [{slot for slot, own in run_of.items() if own == run} for run in sorted(kept)]


def test_slots_with_the_same_pages_read_them_together() -> None:
    found = beginnings({3: "abcx", 5: "abcyy", 9: "qr", 11: "abc", 14: "qrs", 20: "t"})
    values = found.changed()
    assert values is not None and found.changed() is None
    order, shared, run_of = told(values)
    assert runs_of(run_of) == [{9, 14}, {3, 5, 11}]
    (pair, two), (three, pages) = shared
    assert (pair in {9, 14}, two) == (three in {3, 5, 11}, pages - 1) == (True, 2)
    assert {run_of[slot] for slot in order[5:]} == {MOST_SHARED}


def test_longer_beginnings_of_some_beat_a_short_one_of_all() -> None:
    four = {slot: "s" + letter * 9 for slot, letter in enumerate("aaabbbccc")}
    values = beginnings(four).changed()
    assert values is not None
    assert [count for _, count in told(values)[1]] == [10, 10, 10]
    alike = {slot: "s" * 9 + letter for slot, letter in enumerate("aaabbbccc")}
    values = beginnings(alike).changed()
    assert values is not None
    assert [count for _, count in told(values)[1]] == [9]


def most_saved(lists: list[str], known: int = 0) -> int:
    """By trying all: pages that these sequences need not read again, if each shares one beginning
    of more than `known` pages. 16 rows each, so that few of them fit a tile."""
    groups: dict[str, list[str]] = {}
    for ids in lists:
        groups.setdefault(ids[known : known + 1], []).append(ids)
    groups.pop("", None)
    total = 0
    for alike in groups.values():
        tiles = len(alike) - -(-len(alike) // 8)
        total += max(tiles * (known + 1), most_saved(alike, known + 1))
    return total


def test_no_other_choice_saves_more() -> None:
    draw = random.Random(7)
    for _ in range(300):
        count = draw.randint(1, 12)
        lists = ["".join(draw.choices("ab", k=draw.randint(0, 6))) for _ in range(count)]
        found = beginnings(dict(enumerate(lists)))
        values = found.changed()
        saved = sum(one.saved for one in found._found) // PAGE
        assert saved == most_saved(lists)
        for one in found._found:
            assert len({lists[slot][: one.num_pages] for slot in one.slots}) == 1
            assert all(len(lists[slot]) >= one.num_pages for slot in one.slots)
        assert (values is None) == (saved == 0)


def test_the_most_worth_are_shared_if_there_are_too_many() -> None:
    pairs = {slot: chr(100 + slot // 2) * (2 + slot // 2) for slot in range(20)}
    values = beginnings(pairs).changed()
    assert values is not None
    assert [count for _, count in told(values)[1]] == list(range(4, 12))


def test_a_slot_that_leaves_is_read_with_no_other() -> None:
    found = beginnings({1: "ab", 2: "ab", 3: "c"})
    assert found.changed() is not None
    found.leave(2)
    values = found.changed()
    assert values is not None and told(values)[1] == []
    found.leave(3)
    assert found.changed() is None


def test_full_tiles_save_nothing() -> None:
    alike = dict.fromkeys(range(6), "a" * 40)
    assert beginnings(alike).changed() is not None
    row = np.zeros(SLOTS.width, dtype=np.int32)
    wide = Beginnings(SLOTS, PAGE, groups=32, kv_heads=8)  # 4 rows of 32 heads fill a tile
    for slot, ids in alike.items():
        row[Column.START] = len(ids) * PAGE
        row[SLOTS.pages_at : SLOTS.pages_at + len(ids)] = 1
        wide.join(slot, row)
    assert wide.changed() is None and not wide.pay_off


@pytest.mark.parametrize(("others", "fewer_heads", "expected"), [(0, 0, 1), (8, 0, 0), (0, 1, 0)])
def test_sharing_pays_off_from_a_number_of_keys_on(
    others: int, fewer_heads: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences of 16 rows fill one tile instead of eight; otherwise slots keep their order,
    in which they wait. Own keys count against it."""
    monkeypatch.setattr(device_buckets, "LEAST_SAVED", LEAST_SAVED)
    monkeypatch.setattr(device_buckets, "LEAST_SAVED_EACH", LEAST_SAVED_EACH)
    saved = 7 * 240 * PAGE - 8 * 10 * PAGE * LEAST_SAVED_EACH
    heads = math.ceil(LEAST_SAVED / saved)
    layout = replace(SLOTS, max_pages=512)
    alike = {slot: "a" * 240 + chr(1000 + slot) * 10 for slot in range(8)}
    alike |= {9 + i: chr(2000 + i) * 250 for i in range(others)}
    found = beginnings(alike, kv_heads=heads - fewer_heads, layout=layout)
    assert (found.changed() is not None) == expected == found.pay_off
