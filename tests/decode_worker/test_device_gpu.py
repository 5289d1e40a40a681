"""The bundled model in a CUDA device's slots gives the oracle's tokens in fp32.

Requests join and leave at different steps, some are aborted, and with few pages some are preempted.
Requests whose decisions depend on rounding are left out, as in `test_engine_gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, make_request, oracle_settings, random_requests
from oracle.decode import decode_with
from oracle.forward import load_raw
from oracle.settings import OracleResult
from tokenizers import Tokenizer

import effuse.models
from effuse.problems.problem import problem
from effuse.worker import messages
from effuse.worker.messages import StartDecode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUNDLED = Path(next(iter(effuse.models.__path__))) / "bundled"
DRAWN, AT_LEAST = 20, 12
MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class Solid:
    """Requests whose answers do not depend on rounding, with those answers."""

    requests: list[StartDecode]
    answers: list[OracleResult]


@pytest.mark.parametrize(
    ("num_pages", "kv_layout"),
    [(512, "unified"), (14, "unified"), (512, "distinct")],
    ids=["roomy", "preempted", "distinct"],
)
@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
def test_the_bundled_model_gives_the_oracles_tokens(
    algorithm: str, num_pages: int, kv_layout: str
) -> None:
    solid = _solid(algorithm)
    rig = DeviceRig(
        load_tiny(BUNDLED, "cuda"),
        num_pages=num_pages,
        page_size=16,
        budget=512,
        max_num_seqs=16,
        kv_layout=kv_layout,
    )
    for number, request in enumerate(solid.requests):
        rig.start(request)
        if number % 5 == 4:
            _start_and_abort(rig, request)
        for _ in range(number % 3):
            rig.step()
    rig.run()
    for request, expected in zip(solid.requests, solid.answers, strict=True):
        answer = rig.answers[request.attempt.transfer_id]
        assert answer.token_ids == expected.token_ids, request
        assert answer.finished.forward_passes == expected.forwards
    assert (rig.engine.counters.preemptions > 0) == (num_pages < 100)
    assert rig.pool.num_free == rig.pool.num_pages


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_says_what_the_hosts_engine_says(
    tmp_path: Path, architecture: Architecture, algorithm: str
) -> None:
    """Event by event, sampled, on the same device."""
    sizes = TinySizes(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32)
    directory = write_tiny_checkpoint(
        tmp_path / "model", architecture, seed=3, gain=0.6, sizes=sizes
    )
    model = load_tiny(directory, "cuda")
    requests = random_requests(12, algorithm, block_size=4, sampled=True)
    rigs = [kind(model, page_size=16, budget=256, num_pages=256) for kind in (Rig, DeviceRig)]
    for rig in rigs:
        for request in requests:
            rig.engine.handle(request)
        rig.run()
    told = [{name: answer.token_ids for name, answer in rig.answers.items()} for rig in rigs]
    assert told[0] == told[1]


def _start_and_abort(rig: Rig, like: StartDecode) -> None:
    request = make_request(f"gone-{like.attempt.request_id}", like.prompt_token_ids)
    rig.start(request)
    for _ in range(3):
        rig.step()
    rig.engine.handle(messages.Abort(attempt=request.attempt))


def _solid(algorithm: str) -> Solid:
    raw, words = load_raw(BUNDLED), Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    solid = Solid([], [])
    for number in range(DRAWN):
        prompt = words.encode(problem(2, number, "held_out").prompt).ids
        request = make_request(
            str(number),
            prompt,
            max_tokens=40 + 7 * number,
            stop_token_ids=raw.eos_token_ids,
            algorithm=algorithm,
            window=1 + number % 4,
            confidence_threshold=(0.9, 0.8)[number % 2],
            denoising_steps=16,
        )
        answer = decode_with(raw, prompt, oracle_settings(request))
        if _margin(request, answer) > MARGIN:
            solid.requests.append(request)
            solid.answers.append(answer)
    assert len(solid.requests) >= AT_LEAST
    return solid


def _margin(request: StartDecode, answer: OracleResult) -> float:
    return min(
        abs(candidate.confidence - request.settings.confidence_threshold)
        for step in answer.steps
        for candidate in step.candidates.values()
    )
