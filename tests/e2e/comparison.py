"""A fleet's answers held against the reference decoder's, token for token."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from e2e.workload import Job
from oracle.forward import RawModel
from oracle.settings import OracleResult, Settings

from effuse.v1 import generation_pb2 as pb

MARGIN = 2e-5
FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}

Pair = tuple[Job, OracleResult]


def settings_of(job: Job, raw: RawModel | None = None) -> Settings:
    """The job in the oracle's words; its stop ids join the model's own where the model is given."""
    shared = {field.name for field in fields(Settings)} & {field.name for field in fields(Job)}
    values = {name: getattr(job, name) for name in shared}
    stops = (*raw.eos_token_ids, *job.stop_token_ids) if raw else None
    return Settings(**(values | {"stop_token_ids": stops}))


def margin(job: Job, answer: OracleResult) -> float:
    """How far the closest confidence lies from the threshold."""
    return min(
        (
            abs(candidate.confidence - job.confidence_threshold)
            for step in answer.steps
            for candidate in step.candidates.values()
        ),
        default=1.0,
    )


def shaken(raw: RawModel, seed: int) -> RawModel:
    """The model with weights that are off by 1 in 10,000, which disturbs its logits far more than
    any order of additions does: an answer that is the same hangs on no rounding."""
    generator = torch.Generator().manual_seed(seed)
    off = {
        name: 1 + 1e-4 * torch.randn(getattr(raw.layers[0], name).shape, generator=generator)
        for name in ("q", "k", "v", "out", "gate", "up", "down")
    }
    layers = [
        replace(layer, **{name: getattr(layer, name) * factor for name, factor in off.items()})
        for layer in raw.layers
    ]
    return replace(raw, layers=tuple(layers))


def compare(pairs: list[Pair], answers: list[pb.GenerateResponse]) -> None:
    for (job, expected), answer in zip(pairs, answers, strict=True):
        assert tuple(answer.token_ids) == expected.token_ids, job
        assert answer.finish_reason == FINISH[expected.finish], job
        assert answer.usage.prompt_tokens == len(job.prompt)
        assert answer.usage.completion_tokens == len(expected.token_ids)
