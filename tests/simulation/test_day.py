"""Short days of small fleets that steer themselves, and planted planners that oscillate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from effuse.router import role_changes, steering

from .day import simulate
from .day_load import Weather
from .day_report import LEAST_SHARE, MOST_CHANGES

STEADY = Weather(days=0.02, peak=0.8).steady()  # half an hour
STEEP = Weather(seconds=3600, days=0.5)  # an hour is a day, so waves are 24 times as steep
# What was planted shows within a quarter of an hour.
PLANTED_STEADY, PLANTED_STEEP = replace(STEADY, days=0.01), replace(STEEP, days=0.25)


def test_a_fleet_follows_waves_and_survives_failures() -> None:
    report = simulate(STEEP, workers=40, routers=3)
    assert report.share >= LEAST_SHARE, report.text()


def test_a_steady_load_changes_few_roles() -> None:
    report = simulate(STEADY, workers=40, routers=3)
    assert report.share >= LEAST_SHARE, report.text()
    assert report.changes_per_hour <= MOST_CHANGES, report.text()


def test_a_planner_that_oscillates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAIN", "FULL_GAIN", "AFTER_S", "FULL_AFTER_S", "BUSY", "FULL"):
        monkeypatch.setattr(steering, name, 0.0)
    monkeypatch.setattr(role_changes, "COOL_S", 0.0)
    report = simulate(PLANTED_STEADY, workers=40, routers=3)
    assert report.changes_per_hour > 10 * MOST_CHANGES, report.text()


def test_a_fleet_that_never_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waves need other roles: those of the first minutes lose requests later."""
    monkeypatch.setattr(role_changes, "COOL_S", 1e9)
    report = simulate(PLANTED_STEEP, workers=40, routers=3)
    assert report.share < LEAST_SHARE, report.text()
