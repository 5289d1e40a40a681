"""Planted bugs in the engine's input to a forward: the oracle's tokens must expose each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, oracle_settings, random_requests
from oracle.decode import decode_with
from oracle.forward import load_raw

from effuse.config.decoding import Stopping
from effuse.decode_worker import request as parts_of_requests
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.request import DecodeRequest, denoise_part, prefill_part
from effuse.models.part import Part

Prefill = Callable[[DecodeRequest, int], Part]
Denoise = Callable[[DecodeRequest, StepPlan], Part]


def rebuilt_as_one_prompt(request: DecodeRequest, num_rows: int) -> Part:
    part = prefill_part(request, num_rows)
    return dataclasses.replace(part, block_origin=request.sequence.in_flight_start)


def prompt_not_bidirectional(request: DecodeRequest, num_rows: int) -> Part:
    return dataclasses.replace(prefill_part(request, num_rows), block_origin=0)


def kv_of_a_noisy_forward(request: DecodeRequest, plan: StepPlan) -> Part:
    part = denoise_part(request, plan)
    tokens = list(part.token_ids)
    tokens[: plan.num_stored] = [request.sequence.mask_token_id] * plan.num_stored
    return dataclasses.replace(part, token_ids=tokens)


def boundary_never_renewed(request: DecodeRequest, plan: StepPlan) -> Part:
    return dataclasses.replace(denoise_part(request, plan), keep_boundary=False)


def denoise_counts_forgotten(request: DecodeRequest, plan: StepPlan) -> Part:
    part = denoise_part(request, plan)
    return dataclasses.replace(part, denoise_counts=[0] * len(part.candidates))


def prompt_tail_masked(request: DecodeRequest, plan: StepPlan) -> Part:
    part = denoise_part(request, plan)
    tail = max(0, request.sequence.prompt_len - plan.start)
    tokens = [request.sequence.mask_token_id] * tail + list(part.token_ids[tail:])
    return dataclasses.replace(part, token_ids=tokens)


def nothing_wrong(request: DecodeRequest, plan: StepPlan) -> Part:
    return denoise_part(request, plan)


def agrees(directory: Path) -> bool:
    """True if a preempting engine gives the oracle's tokens to every request."""
    raw = load_raw(directory)
    requests = [
        msgspec.structs.replace(request, stopping=Stopping(max_tokens=20))
        for request in random_requests(10, "d2f", block_size=4, sampled=True)
    ]
    rig = Rig(load_tiny(directory), num_pages=18, page_size=3)
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    assert rig.engine.counters.preemptions > 0
    return all(
        rig.answers[request.attempt.transfer_id].token_ids
        == decode_with(raw, request.prompt_token_ids, oracle_settings(request)).token_ids
        for request in requests
    )


@pytest.mark.parametrize(
    ("architecture", "name", "bug"),
    [
        ("dream", "prefill_part", rebuilt_as_one_prompt),
        ("llada", "prefill_part", prompt_not_bidirectional),
        ("sdar", "denoise_part", kv_of_a_noisy_forward),
        ("dream", "denoise_part", boundary_never_renewed),
        ("llada", "denoise_part", denoise_counts_forgotten),
        ("sdar", "denoise_part", prompt_tail_masked),
    ],
)
def test_the_oracle_exposes_a_planted_bug(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: Architecture,
    name: str,
    bug: Prefill | Denoise,
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=3)
    monkeypatch.setattr(parts_of_requests, name, bug)
    assert not agrees(directory)


def test_nothing_is_exposed_where_nothing_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", "dream", seed=3)
    monkeypatch.setattr(parts_of_requests, "denoise_part", nothing_wrong)
    assert agrees(directory)
