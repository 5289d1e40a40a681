"""Canvases in a split fleet: the published loops' tokens, next to a handed-over request, and the
same answer if a decode worker is lost in the middle.

A canvas is never handed over, so each family has one of the connectors; test_equality.py shows that
both move pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
from decoding.published import Published, published_runs, write_published
from e2e.client import all_at_once, connect
from e2e.processes import engine_of

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.client.client import Client
from effuse.client.params import NAMES, Params, make_request
from effuse.config.decoding import Alg
from effuse.v1 import generation_pb2 as pb

MAX_MODEL_LEN = 256
Served = tuple[Literal["llada", "dream"], str]
LLADA: Served = ("llada", "nixl")
DREAM: Served = ("dream", "zmq")


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids="-".join)
def served(request: pytest.FixtureRequest) -> Served:
    """Architecture and connector of the fleet."""
    found: Served = request.param
    return found


@pytest.fixture(scope="module")
def fleet(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of the first published checkpoint, which prefills wherever it can."""
    (architecture, connector), home = served, tmp_path_factory.mktemp("canvas")
    config = FleetConfig(
        prefill=1,
        decode=2 if served == LLADA else 1,  # LLaDA's fleet loses one
        connector=connector,
        model=write_published(home / architecture, architecture, 1, block_size=8),
        worker_flags=("--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN)),
    )
    with Fleet(config) as fleet:
        yield fleet


def message(run: Published, request_id: str | None = None) -> pb.GenerateRequest:
    """The run as clients ask for it."""
    return make_request(run.prompt, run.params(), request_id=request_id, token_ids=True)


def test_tokens_are_those_of_the_published_loops(fleet: Fleet, served: Served) -> None:
    architecture, connector = served
    known = [*published_runs(architecture), *published_runs("fast_dllm")]
    runs = [run for run in known if (run.architecture, run.checkpoint) == (architecture, 1)]
    prompt, short = runs[0].prompt, Params(max_tokens=16, ignore_eos=True)
    alg: Alg | None = "entropy" if architecture == "dream" else None
    others = [
        make_request(prompt, replace(short, algorithm="d2f")),
        make_request(prompt, short, token_ids=True),  # the model's default decoding
        make_request(prompt, replace(short, algorithm=architecture, alg=alg), token_ids=True),
    ]
    with connect(fleet.address) as client:
        *answers, other, by_default, named = all_at_once(
            client.generate, [*map(message, runs), *others]
        )
        with Client(fleet.address) as told:
            (model,) = told.models()
    assert model.defaults.decoding.algorithm == NAMES["algorithm"][architecture]
    assert by_default.token_ids == named.token_ids and by_default.stats.prefill_worker == ""
    for run, answer in zip(runs, answers, strict=True):
        assert list(answer.token_ids) == run.tokens, run
        assert answer.stats.prefill_worker == "" and answer.stats.kv_bytes == 0
    assert other.stats.prefill_worker == "prefill-0" and other.stats.connector == connector


@pytest.mark.parametrize("served", [LLADA], ids="-".join, indirect=True)
def test_a_lost_decode_worker_changes_no_token(fleet: Fleet) -> None:
    """The second attempt goes on from the canvas that the last commit carried."""
    asked = message(
        Published(
            architecture="llada",
            checkpoint=1,
            prompt=[7, 8, 9],
            max_tokens=120,
            temperature=1.0,
            seed=5,
            settings={"algorithm": "llada", "block_length": 16, "remasking": "random"},
            tokens=[],
        ),
        "lost",
    )
    with connect(fleet.address) as client:
        events = client.stream(asked)
        tokens: list[int] = []
        forwards = 0
        for event in events:
            tokens += event.commit.token_ids
            if not forwards:
                engine_of(fleet.processes[client.look_up("lost").decode_worker].pid).kill()
            forwards = event.finished.stats.forward_passes or event.commit.forward_passes
        attempt = client.attempt_of("lost")
        asked.request_id = "undisturbed"
        assert list(client.generate(asked).token_ids) == tokens and len(tokens) == 120
    assert attempt == 2
    assert forwards == 120, "steps were done twice"
