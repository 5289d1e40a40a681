"""The choice of tiles for products whose rows do not depend on each other; no GPU is needed."""

from collections.abc import Callable

import pytest
import torch

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


class Device:
    """A stand-in for a GPU's queue: a slow host, and a clock that slows down."""

    def __init__(self, queue_s: float, seconds: Callable[[Plan], float]) -> None:
        self._queue_s, self._seconds = queue_s, seconds
        self.host = self.free_at = 0.0
        self.delays: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.delays.append(cycles)
        self.free_at = max(self.free_at, self.host) + cycles / 1e9

    def run(self, plan: Plan) -> None:
        self.host += self._queue_s
        slow = 1 + 20 * self.free_at  # hotter with time
        self.free_at = max(self.free_at, self.host) + self._seconds(plan) * slow


class Event:
    """Of `Device`."""

    def __init__(self, device: Device) -> None:
        self._device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self._device.free_at, self._device.host)

    def query(self) -> bool:
        return self._device.host >= self.at

    def synchronize(self) -> None:
        self._device.host = max(self._device.host, self.at)

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


def fastest(device: Device, plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(device))
    return products_hopper._fastest(plans, device.run, parts_s=0.0)


@pytest.mark.parametrize("best", [0, 7, len(TILES) - 1])
def test_the_fastest_plan_wins_although_the_clock_drifts(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [Plan(tile) for tile in TILES]
    device = Device(1e-6, lambda plan: 1e-4 if plan is plans[best] else 1.03e-4)
    assert fastest(device, plans, monkeypatch) is plans[best]


def test_a_host_slower_than_the_device_gets_a_longer_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all plans would seem to take as long as the host."""
    plans = [Plan(tile) for tile in TILES]
    device = Device(1e-3, lambda plan: 1e-5 if plan is plans[7] else 1.03e-5)
    assert fastest(device, plans, monkeypatch) is plans[7]
    assert max(device.delays) > 4 * min(device.delays)
