"""`effuse top`: what it draws of a fleet, once and again and again."""

from __future__ import annotations

from itertools import islice

import pytest
from cli.looked_at import REQUEST, WORKER, router

from effuse.cli import look
from effuse.cli.look import Look, cells, looks
from effuse.cli.top import blocks_line, main
from effuse.v1 import monitor_pb2


def test_it_draws_once_where_nobody_sits(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as target:
        assert main(["--target", target]) == 0
    told = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert rows["prefill-0"][:3] == ["prefill-0", "to", "decode-0:"]
    assert "1 requests run, 0 wait" in told
    assert rows[REQUEST.name][1:] == [
        *("decoding", "prefill-0", ">", "decode-0", "1", "1.2", "s", "8", "of", "64"),
        *("■■", "█░░█"),
    ]


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "127.0.0.1:1"]) == 1
    assert "effuse top: UNAVAILABLE" in capsys.readouterr().err


def test_an_interval_that_no_router_takes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--interval", "100"])
    assert "expected a number in [0.05, 60], got 100" in capsys.readouterr().err


def test_looks_go_on_when_the_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_AGAIN_S", 0.0)
    with router() as target:
        seen = list(islice(looks(target, 0.05), 5))
    assert all(isinstance(one, Look) and list(one.workers) == [WORKER] for one in seen)
    shown = [
        [cells(b) for r in one.requests.requests for b in r.blocks] for one in seen if one.requests
    ]
    assert shown == [["█░░█"], ["█░██"], ["████"], [], ["█░░█"]]


def test_the_tail_of_a_prompt_is_no_part_of_an_answers_first_block() -> None:
    block = monitor_pb2.RunningBlock(token_offset=-1, num_tokens=4, masks=b"\x0c")
    assert cells(block) == "█░░"
    request = monitor_pb2.RunningRequest(num_tokens=0, block_size=4, blocks=[block])
    assert blocks_line(request) == "█░░"
