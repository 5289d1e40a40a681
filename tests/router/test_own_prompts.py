"""Which prompts decode workers take themselves, so that they are computed sooner."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from router.fake_model import worker_record
from router.test_policy import names

from effuse.placement.records import Load, Role
from effuse.router.policy import AttemptNeeds, Candidate, InFlight, Placement, PromptCost, place

ROWS = worker_record("d0", "decode").capacity.max_num_seqs * 4  # in blocks of 4
COST = PromptCost(tokens=200, seconds=0.2)  # 1000 tokens a second at a prefill worker


def fleet(
    *,
    waits: int,
    rate: int,
    piece: int = 100,
    own: int = 0,
    role: Role = "decode",
    whole: bool = False,
) -> list[Candidate]:
    """`waits`: tokens before the prompt at the prefill worker; `own`: those at the other one."""
    load = Load(total_pages=256, free_pages=256, prompt_rate=rate, prompt_piece=piece)
    found = [
        Candidate(worker_record("p0", "prefill"), InFlight(prompts=1, to_prefill=waits)),
        Candidate(worker_record("d0", role, load=load), InFlight(to_prefill=own)),
    ]
    attention = "bidirectional" if whole else "causal_blocks"
    for at, one in enumerate(found):
        model = replace(one.record.model, prompt_attention=attention)
        found[at] = replace(one, record=replace(one.record, model=model))
    return found


def placed(candidates: list[Candidate], prompt: PromptCost = COST) -> Placement | None:
    return place(candidates, AttemptNeeds(model="fake", mode="auto", prompt=prompt))


@pytest.mark.parametrize(
    ("waits", "rate", "own", "is_own"),
    [
        (0, 500, 0, False),  # the prefill worker is idle and faster
        (199, 500, 0, False),
        (201, 500, 0, True),  # 0.401 s there, 0.4 s here
        (201, 500, 10, False),  # prompts wait here, too
        (10_000, 500, 1000, True),
        (10_000, 500, 4 * 512, False),  # as many tokens as it may have at most
        (10_000, 0, 0, False),  # its rate is not known
    ],
)
@pytest.mark.parametrize("role", ["decode", "both"])
def test_a_prompt_goes_where_it_is_done_first(
    waits: int, rate: int, own: int, is_own: bool, role: Role
) -> None:
    if role == "both" and not rate:
        is_own = True  # it does both, and has fewer tokens
    found = placed(fleet(waits=waits, rate=rate, own=own, role=role))
    assert names(found) == (None if is_own else "p0", "d0")


@pytest.mark.parametrize(("piece", "is_own"), [(199, False), (200, True)])
def test_a_bidirectional_prompt_has_to_fit_into_a_gap(piece: int, is_own: bool) -> None:
    found = placed(fleet(waits=10_000, rate=500, piece=piece, whole=True))
    assert names(found) == (None if is_own else "p0", "d0")
    cut = placed(fleet(waits=10_000, rate=500, piece=piece))
    assert names(cut) == (None, "d0")


@pytest.mark.parametrize("waits", [0, 10_000])
def test_without_an_objective_all_stays_as_it_was(waits: int) -> None:
    free = PromptCost(200)
    assert names(placed(fleet(waits=waits, rate=500), free)) == ("p0", "d0")
    both = names(placed(fleet(waits=waits, rate=500, role="both"), free))
    assert both == (None if waits else "p0", "d0")


@pytest.mark.parametrize(
    ("there", "here", "tokens", "own", "is_own"),
    [
        (256, 512, 768, 0, True),  # a chat: only it has the answer before
        (256, 512, 513, 255, True),
        (256, 512, 512, 256, False),  # prompts wait here, too
        (512, 512, 768, 0, False),  # both have as much
        (768, 512, 1024, 0, False),
        (256, 512, 512 + ROWS, 0, True),
        (256, 512, 512 + ROWS + 1, 0, False),  # gaps would have more rows than a step of answers
        (256, 512, 512 + ROWS, 1, False),
    ],
)
def test_without_an_objective_a_decode_worker_takes_the_rest_of_what_it_knows(
    *, there: int, here: int, tokens: int, own: int, is_own: bool
) -> None:
    candidates = fleet(waits=0, rate=0, own=own)
    lives = [one.record.life for one in candidates]
    for at, one in enumerate(candidates):
        load = replace(one.record.load, prefix_queries=1)
        candidates[at] = replace(one, record=replace(one.record, load=load))
    need = AttemptNeeds(
        model="fake",
        mode="auto",
        cached=dict(zip(lives, (there, here), strict=True)),
        prompt=PromptCost(tokens),
    )
    assert names(place(candidates, need)) == (None if is_own else "p0", "d0")
    remote = place(candidates, replace(need, mode="remote"))
    assert names(remote) == ("p0", "d0")


@pytest.mark.parametrize("rate", [0, 500])
@pytest.mark.parametrize(
    ("seconds", "queued", "is_own"),
    [
        (None, 0, True),
        (None, 200, False),  # prompts of other routers wait there
        (0.0, 0, False),  # with an objective for gaps, what it knows is not enough
        (10.0, 0, True),
    ],
)
def test_a_decode_worker_that_knows_more_keeps_its_gaps(
    *, rate: int, seconds: float | None, queued: int, is_own: bool
) -> None:
    prefill, decode = fleet(waits=0, rate=rate)
    load = replace(decode.record.load, prefix_queries=1, queued_tokens=queued)
    decode = replace(decode, record=replace(decode.record, load=load))
    need = AttemptNeeds(
        model="fake",
        mode="auto",
        cached={decode.record.life: 512},
        prompt=PromptCost(512 + ROWS - 100, seconds),
    )
    is_own = is_own and (seconds is None or rate > 0)
    assert names(place([prefill, decode], need)) == (None if is_own else "p0", "d0")


@pytest.mark.parametrize("mode", ["remote", "local"])
def test_other_modes_do_not_ask(mode: str) -> None:
    need = AttemptNeeds(model="fake", mode=mode, prompt=COST)  # type: ignore[arg-type]
    found = place(fleet(waits=10_000, rate=500), need)
    assert names(found) == ("p0" if mode == "remote" else None, "d0")
