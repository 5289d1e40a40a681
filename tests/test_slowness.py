"""A slow or busy machine has longer for each test, and a fast one no less than it had."""

from __future__ import annotations

import pytest
import slowness


@pytest.mark.parametrize(
    ("work_s", "start_s", "expected"),
    [(0.1, 0.05, 1.0), (0.2, 0.1, 1.0), (1.6, 0.1, 8.0), (0.2, 0.5, 5.0), (100.0, 9.0, 20.0)],
)
def test_the_worse_of_two_measures_counts(work_s: float, start_s: float, expected: float) -> None:
    assert slowness.slowness(work_s, start_s) == pytest.approx(expected)


def test_processes_that_tests_start_do_not_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(slowness.VARIABLE, "3.5")
    assert slowness.measured() == 3.5
    assert slowness.patient(10.0) == 35.0


def test_every_test_has_a_limit_that_is_patient(request: pytest.FixtureRequest) -> None:
    mark = request.node.get_closest_marker("timeout")
    assert mark.args == (slowness.patient(300.0),)


@pytest.mark.timeout(7)
def test_a_limit_of_its_own_is_patient_too(request: pytest.FixtureRequest) -> None:
    mark = request.node.get_closest_marker("timeout")
    assert mark.args == (slowness.patient(7.0),)
