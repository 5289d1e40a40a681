"""Buckets are fine, and the prediction of a step's needs covers the machine's next step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding.scripts import MASK_ID, make_settings
from operators.torch_plan import Views, plan_step
from operators.torch_steps import advance

from effuse.config.decoding import Sampling, Stopping
from effuse.decode_worker.denoise import open_step
from effuse.decode_worker.device_buckets import Forecast, Integers, bucket, context_class
from effuse.decode_worker.device_slots import slot_row
from effuse.decode_worker.sequence import Sequence
from effuse.kernels.step_slots import Column, SlotLayout, SlotTable, StepRows
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
        plan_step(table, control, rows, 96, 8, MASK_ID, False)
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
