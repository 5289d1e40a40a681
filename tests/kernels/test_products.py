"""The choice of tiles for products whose rows do not depend on each other; no GPU is needed."""

import pytest

from effuse.kernels import products_hopper
from effuse.kernels.products_hopper import MEASURED_ROWS, TILES, Plan, plan_of


def test_rows_between_measured_numbers_have_the_plan_of_the_next_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (Plan(TILES[0]), Plan(TILES[1]), Plan(TILES[2]))
    monkeypatch.setitem(products_hopper._measured, (256, 128, 1), found)
    first, second, third = MEASURED_ROWS[:3]
    rows = (1, first, first + 1, second, second + 1, third, third + 1, 100_000)
    expected = [TILES[0], TILES[0], TILES[1], TILES[1], TILES[2], TILES[2], TILES[2], TILES[2]]
    assert [plan_of(one, 256, 128).tile for one in rows] == expected
    assert plan_of(first, 256, 128, shares=2) != found[0], "measured for the whole sum only"


@pytest.mark.parametrize("rows", [1, 17, 132, 256, 700, 4224, 100_000])
@pytest.mark.parametrize("shares", [1, 2])
def test_without_a_measurement_a_plan_wastes_little(rows: int, shares: int) -> None:
    tile = plan_of(rows, 4096, 4096, shares).tile
    computed = -(-rows // tile.rows) * tile.rows
    assert computed <= max(32, 1.5 * rows)


def test_few_rows_of_few_columns_have_their_shares_apart() -> None:
    assert plan_of(132, 3584, 18944, shares=2).is_apart
