"""A sample of `e2e.degrees`: workers of several devices give the reference decoder's tokens.

`make degrees` has all cases, among them replicas and the loops of LLaDA and Dream. Two ranks each
are in `test_roles.py`; `worker/test_ranks.py` compares a group's tokens for replicas, Dream and
experts.
"""

from __future__ import annotations

import pytest
from e2e.client import all_at_once, connect, wait_until
from e2e.degrees import Case, all_cases, count_wrong, differing, flags_of, serving
from e2e.rank_faults import ranks_of
from e2e.test_lost_engines import life_of

from effuse.cli.commands import FleetConfig
from effuse.v1 import generation_pb2 as pb


@pytest.mark.parametrize(
    "case",
    [
        Case("LLaDA2's loop, experts spread", "zmq", 2, 1),
        Case("sdar", "nixl", 2, 1, ("d2f",), stages=(1, 2), max_tokens=16),
    ],
    ids=str,
)
def test_tokens_equal_the_oracles(case: Case) -> None:
    num_wrong, num_tokens = differing(case, most=8)
    assert num_tokens > 500
    assert num_wrong == 0


def test_a_fleet_takes_the_flags_of_every_case() -> None:
    cases = list(all_cases())
    assert len(cases) > 250
    for case in cases:
        prefill, decode = flags_of(case)
        FleetConfig(
            prefill=min(case.prefill, 1), prefill_flags=(*prefill,), decode_flags=(*decode,)
        )


def test_a_changed_a_missing_and_another_token_each_count_as_one() -> None:
    asked = [(pb.GenerateRequest(n=2), (1, 2, 3))] * 3
    others = [pb.GenerateResponse(token_ids=(1, 2, 3))]
    written = ((1, 9, 3), (1, 2), (1, 2, 3, 4))
    answers = [pb.GenerateResponse(token_ids=ids, others=others) for ids in written]
    assert count_wrong(asked, answers) == (3, 18)


def test_prompts_and_context_are_cut_over_ranks_also_after_one_has_died() -> None:
    case = Case("sdar", "nixl", 1, 2, ("d2f",), context=2, rows=2, max_tokens=16)
    with serving(case) as (fleet, asked), connect(fleet.address) as client:
        requests = [request for request, _ in asked[:8]]
        expected = [[list(tokens)] * (request.n or 1) for request, tokens in asked[:8]]

        def answered() -> None:
            answers = all_at_once(client.generate, requests)
            assert [
                [list(each.token_ids) for each in (one, *one.others)] for one in answers
            ] == expected
            assert {one.stats.prefill_worker for one in answers} == {"prefill-0"}

        answered()
        life, (victim,) = life_of(fleet, "prefill-0"), ranks_of(fleet, "prefill-0", "prefill")
        victim.kill()
        wait_until(lambda: life_of(fleet, "prefill-0") not in ("", life), "no engine came back")
        answered()
