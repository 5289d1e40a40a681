"""The one line that a router logs of each request that ended."""

from __future__ import annotations

from typing import Any

import pytest
from router.asking import ask, failure
from router.fake_workers import once, raises
from router.fakes import FakeFleet, run

from effuse.client.answer import Stats
from effuse.protos import errors


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    ended = [one for one in caplog.records if one.getMessage() == "a request ended"]
    return [vars(one)["figures"] for one in ended]


def test_an_answer_has_one_line_with_all_that_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = once(raises(errors.PeerLost("gone")))
        answer = await ask(fleet, request_id="mine")
        await fleet.idle()
        assert (await ask(fleet, request_id="mine")).text == answer.text  # from a kept answer
        first, kept = lines(caplog)
        assert (first["request_id"], first["model"], first["status"]) == ("mine", "fake", "OK")
        assert first["prompt_tokens"] == answer.usage.prompt_tokens
        assert first["tokens"] == answer.usage.completion_tokens
        assert (first["attempts"], first["decode_worker"]) == (2, answer.stats.decode_worker)
        for name in ("queue_s", "prefill_s", "handoff_s", "first_block_s", "total_s"):
            assert first[name] == getattr(Stats.of(answer.stats), name)
        assert "story" not in first
        assert (kept["status"], kept["attempts"]) == ("OK", 0)

    with caplog.at_level("INFO"):
        run(body, num_prefill=0, num_decode=2)


def test_a_bad_end_has_one_line_with_its_story(caplog: pytest.LogCaptureFixture) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = raises(errors.Bug("it broke", retryable=False))
        await failure(ask(fleet))
        (line,) = lines(caplog)
        assert (line["status"], line["attempts"]) == ("INTERNAL", 1)
        assert "reserved" in line["story"]

    with caplog.at_level("INFO"):
        run(body, num_prefill=0)
