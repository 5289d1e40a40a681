"""A request that should run separately does not wait long for it, if its engines ended from
outside.
"""

from __future__ import annotations

import asyncio

import pytest
from router.asking import ask
from router.fakes import FakeFleet, run, until

from effuse.router import answer
from effuse.router.policy import Holder

TEXT = "the answer is three"


def test_who_may_share_does_not_wait_long_for_a_worker_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "ALONE_S", 0.2)

    async def body(fleet: FakeFleet) -> None:
        router, (first, second) = fleet.router, fleet.decode
        router.fleet._kept[first.record.life] = Holder(
            "other", "r2"
        )  # so that no other one can be spared
        monkeypatch.setattr(router.poison, "kinds_alone", lambda _: {"decode"})
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: fleet.is_waiting("alone"))
        assert not second.requests
        monkeypatch.setattr(router.poison.verdicts, "may_share", lambda _: True)
        assert (await asking).text == TEXT
        assert len(second.requests) == 1

    run(body, num_prefill=0, num_decode=2)
