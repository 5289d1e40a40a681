"""Writers for which pages in quarantine wait: by writer, refused after a while, logged once."""

from __future__ import annotations

import logging

import pytest

from effuse.placement.records import MOST_QUARANTINES
from effuse.protos.errors import TransferFailed
from effuse.v1.worker_pb2 import WorkerRef
from effuse.worker.attempts import ALARM_S, SILENT_S, Quarantines

ONE, OTHER = (
    WorkerRef(address=f"10.0.0.{host}:1", incarnation="life", engine_port=2) for host in (1, 2)
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pages_are_counted_by_writer_with_the_age_of_the_oldest() -> None:
    clock = Clock()
    quarantines = Quarantines(clock)
    with quarantines.holding(ONE, 3):
        clock.now = 1.0
        with quarantines.holding(OTHER, 5), quarantines.holding(ONE, 4):
            clock.now = 3.0
            listed = [(one.writer, one.pages, one.age_s) for one in quarantines.listed()]
            assert listed == [(ONE.address, 7, 3.0), (OTHER.address, 5, 2.0)]
        assert [one.pages for one in quarantines.listed()] == [3]
    assert quarantines.listed() == ()


def test_a_list_is_never_longer_than_a_record_takes() -> None:
    quarantines = Quarantines(Clock())
    held = [
        quarantines.holding(
            WorkerRef(address=f"10.0.0.1:{port}", incarnation="life", engine_port=2), 1
        )
        for port in range(1, MOST_QUARANTINES + 10)
    ]
    for one in held:
        one.__enter__()
    assert len(quarantines.listed()) == MOST_QUARANTINES


def test_who_holds_pages_for_too_long_gets_no_more_until_it_lets_go() -> None:
    clock = Clock()
    quarantines = Quarantines(clock)
    with quarantines.holding(ONE, 3):
        clock.now = SILENT_S - 0.1
        quarantines.check(ONE)
        clock.now = SILENT_S
        quarantines.check(OTHER)
        with pytest.raises(TransferFailed, match="has not released pages here for 10 s"):
            quarantines.check(ONE)
    quarantines.check(ONE)


def test_the_log_says_once_per_writer_what_to_do_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    quarantines = Quarantines(clock)
    with caplog.at_level(logging.WARNING):
        with quarantines.holding(ONE, 3) as tell, quarantines.holding(ONE, 4) as tell_of_other:
            clock.now = ALARM_S - 1.0
            tell()
            assert not caplog.messages
            clock.now = ALARM_S
            for _ in range(3):
                tell()
                tell_of_other()
            (alarm,) = caplog.messages
            assert alarm.startswith(
                f"7 pages cannot be used, because the prefill worker at {ONE.address}"
            )
            assert "kill it" in alarm
        assert caplog.messages[1:] == [f"all pages that {ONE.address} held are free again"]
