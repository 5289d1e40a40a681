"""The engine on a CUDA device gives the oracle's tokens in fp32, preempted or not.

Sizes are those of the device's kernels. Requests whose decisions depend on rounding are left out,
because the device adds in another order than the oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import (
    Rig,
    load_tiny,
    make_request,
    of_length,
    oracle_settings,
    random_requests,
)
from oracle.decode import decode
from oracle.settings import OracleResult

from effuse.kernels.pages import place_on_cuda
from effuse.worker.messages import Abort, StartDecode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


SIZES = TinySizes(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32)
PAGE_SIZE, NUM_PAGES = 16, 8
REQUESTS = 16
MARGIN = 1e-3


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_on_the_device_are_the_oracles(
    tmp_path: Path, architecture: Architecture, algorithm: str
) -> None:
    directory = write_tiny_checkpoint(
        tmp_path / "model", architecture, seed=3, gain=0.6, sizes=SIZES
    )
    pairs = _solid(directory, algorithm)
    rig = Rig(load_tiny(directory, "cuda"), num_pages=NUM_PAGES, page_size=PAGE_SIZE, budget=96)
    for request, _ in pairs:
        rig.engine.handle(request)
    rig.run()
    for request, expected in pairs:
        assert rig.answers[request.attempt.transfer_id].token_ids == expected.token_ids
    assert rig.engine.counters.preemptions > 0


CANVASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "llada": ("llada", {"algorithm": "llada", "block_length": 16, "remasking": "low_confidence"}),
    "dream": ("dream", {"algorithm": "dream", "alg": "entropy"}),
    "no cache": ("llada", {"algorithm": "fast_dllm", "block_length": 16}),
    "prefix cache": ("llada", {"algorithm": "fast_dllm", "block_length": 16, "cache": "prefix"}),
    "dual cache": ("dream", {"algorithm": "fast_dllm", "block_length": 16, "cache": "dual"}),
}


@pytest.mark.parametrize("name", CANVASES)
def test_canvases_on_the_device_are_the_hosts(tmp_path: Path, name: str) -> None:
    """Together with requests in blocks; all answers are the CPU's."""
    architecture, settings = CANVASES[name]
    directory = write_tiny_checkpoint(
        tmp_path / "model", architecture, seed=3, gain=0.6, sizes=SIZES
    )
    canvases = [
        make_request(f"canvas-{at}", range(at, at + 9 + 7 * at), max_tokens=32, **settings)
        for at in range(4)
    ]
    requests = [*canvases, *(request for request, _ in _solid(directory, "d2f")[:4])]
    told = []
    for device in ("cpu", "cuda"):
        model = load_tiny(directory, device)
        make = Rig if device == "cpu" else DeviceRig
        rig = make(model, num_pages=4 * NUM_PAGES, page_size=PAGE_SIZE, budget=256)
        answers = [rig.start(request) for request in requests]
        rig.run()
        told.append([answer.token_ids for answer in answers])
    assert told[0] == told[1]


def test_pages_of_a_cancelled_prompt_are_free_once_the_device_has_done_with_them(
    tmp_path: Path,
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", "sdar", seed=3, sizes=SIZES)
    rig = DeviceRig(load_tiny(directory, "cuda"), num_pages=32, page_size=PAGE_SIZE, budget=256)
    rig.place = place_on_cuda
    rig.connect(None)
    rig.start(make_request("first", range(40)))
    rig.run()  # nothing is left to be compiled
    torch.cuda._sleep(1 << 31)  # type: ignore[no-untyped-call]  # about a second
    request = make_request("second", range(40))
    rig.start(request)
    rig.step()
    assert not torch.cuda.current_stream().query()
    rig.engine.handle(Abort(attempt=request.attempt))
    assert rig.pool.num_free == rig.pool.num_pages
    assert torch.cuda.current_stream().query()


def _solid(directory: Path, algorithm: str) -> list[tuple[StartDecode, OracleResult]]:
    """Greedy requests whose confidences are all far from their threshold."""
    pairs = []
    for drawn in random_requests(64, algorithm, block_size=4):
        request = of_length(drawn, 64)
        expected = decode(directory, request.prompt_token_ids, oracle_settings(request))
        if _margin(request, expected) > MARGIN:
            pairs.append((request, expected))
    assert len(pairs) >= REQUESTS
    return pairs[:REQUESTS]


def _margin(request: StartDecode, answer: OracleResult) -> float:
    threshold = request.settings.confidence_threshold
    return min(
        abs(candidate.confidence - threshold)
        for step in answer.steps
        for candidate in step.candidates.values()
    )
