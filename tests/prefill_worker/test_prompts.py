"""Prefill policy as data: chunks under a budget, refusals; how a failed push is reported."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from effuse.kvtransfer.connector import Cause, PushFailed
from effuse.kvtransfer.messages import AttemptId
from effuse.prefill_worker.executor import push_failed
from effuse.prefill_worker.prompts import make_prompt, schedule
from effuse.worker.messages import Failed, StartPrefill

ONE = AttemptId("r", 1, "t")


@pytest.mark.parametrize(
    ("left", "budget", "expected"),
    [
        ([(20, True)], 64, [20]),
        ([(20, True)], 18, [16]),
        ([(20, True)], 3, [0]),
        ([(8, True), (20, True), (8, True)], 24, [8, 16, 0]),
        ([(20, False), (4, False)], 10, [0, 4]),
        ([(20, False), (4, True)], 24, [20, 4]),
        ([(20, True), (4, True)], 22, [20, 0]),
        ([], 64, []),
        # Those that end in this forward pass a long one, in a quarter of the budget.
        ([(1000, True), (5, True), (9, True), (2, True)], 64, [48, 5, 9, 2]),
        ([(1000, True), (15, True), (9, True), (2, True)], 64, [52, 0, 9, 2]),
        ([(1000, True), (17, True)], 64, [64, 0]),
        ([(64, True), (5, True)], 64, [64, 0]),
        ([(1000, False), (5, False)], 64, [0, 5]),
    ],
    ids=str,
)
def test_chunks_end_with_a_block_and_fit_the_budget(
    left: list[tuple[int, bool]], budget: int, expected: list[int]
) -> None:
    assert schedule(left, budget=budget, block_size=4) == expected


def told(cause: Cause, message: str) -> Failed:
    return push_failed(ONE, PushFailed(ONE.transfer_id, cause, message))


def test_where_a_peer_lives_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    failed = told(Cause.PEER, "the receiver at tcp://10.3.2.1:4711 closed the connection")
    assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
    assert "10.3.2.1" not in failed.message
    assert "10.3.2.1" in caplog.text


def test_what_differs_is_told() -> None:
    failed = told(Cause.DIGEST, "page 3 differs")
    assert (failed.code, failed.message) == ("DATA_LOSS", "page 3 differs")


@pytest.mark.parametrize(
    ("attention", "degree", "pages"),
    [
        ("causal_blocks", 1, (20, 5, 5)),
        ("causal_blocks", 2, (20, 3, 5)),
        ("causal_blocks", 4, (20, 2, 5)),
        ("bidirectional", 2, (22, 3, 6)),
    ],
)
def test_a_page_of_the_pool_is_one_of_each_rank(
    attention: str, degree: int, pages: tuple[int, int, int]
) -> None:
    model = Mock(prompt_attention=attention, block_size=4)
    start = StartPrefill(attempt=ONE, prompt_token_ids=tuple(range(22)))
    found = make_prompt(start, model, 4, degree, 0.0)
    assert (found.num_paged, found.num_pages, found.num_moved) == pages
