"""A prefill worker that is frozen, front and engine, while pages are open to it over NIXL.

It is on the decode worker's machine and may write by itself. So its pages stay out of use as long
as it is stopped, and are back as soon as it goes on or has been killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from e2e.client import connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

from effuse.cli.fleet import Fleet
from effuse.client.client import Client
from effuse.v1.model_pb2 import WorkerQuarantine

STILL_S = 12.0  # longer than a writer elsewhere is waited for
SHORT_S = 2.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tiny_fleet("sdar", connector="nixl") as running:
        yield running


@pytest.mark.parametrize(("end", "still_s"), [(signal.SIGCONT, STILL_S), (signal.SIGKILL, SHORT_S)])
def test_pages_wait_for_a_frozen_writer_until_it_goes_on_or_is_killed(
    fleet: Fleet, end: signal.Signals, still_s: float
) -> None:
    with connect(fleet.address) as client:
        jobs = draw_jobs(3, 20, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
        job = max(jobs, key=lambda one: len(one.prompt))  # a short one takes no page
        client.generate(job.message(f"before-{end.name}"))
        wait_until(lambda: _free(fleet) == _total(fleet), "the first request left pages")
        front = fleet.processes["prefill-0"].pid
        frozen = [front, engine_of(front).pid]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        call = client.stub.Generate.future(job.message(f"given-up-{end.name}"), timeout=60)
        wait_until(lambda: _free(fleet) < _total(fleet), "no page was reserved")
        call.cancel()
        wait_until(lambda: bool(_quarantines(fleet)), "no page is in quarantine")
        time.sleep(still_s)
        (held,) = _quarantines(fleet)
        assert held.writer == fleet.address_of("prefill-0")
        assert held.pages == _total(fleet) - _free(fleet) > 0
        assert held.age.ToTimedelta().total_seconds() > still_s / 2
        for pid in frozen:
            os.kill(pid, end)
        wait_until(lambda: _free(fleet) == _total(fleet), "pages are still in quarantine")
        wait_until(lambda: not _quarantines(fleet), "it is still said that they are")
        if end is signal.SIGCONT:
            client.generate(job.message("after"))


def _free(fleet: Fleet) -> int:
    return load_of(fleet.address_of("decode-0")).free_pages


def _total(fleet: Fleet) -> int:
    return load_of(fleet.address_of("decode-0")).total_pages


def _quarantines(fleet: Fleet) -> list[WorkerQuarantine]:
    """Those of the decode worker, as clients see them."""
    with Client(fleet.address) as client:
        workers = {one.worker_id: one for one in client.workers()}
    return list(workers["decode-0"].quarantines)
