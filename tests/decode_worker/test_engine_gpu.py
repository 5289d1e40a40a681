"""The engine on a CUDA device gives the oracle's tokens in fp32, preempted or not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, oracle_settings, random_requests
from oracle.decode import decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_on_the_device_are_the_oracles(
    tmp_path: Path, architecture: Architecture, algorithm: str
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=3)
    requests = [
        msgspec.structs.replace(request, max_tokens=24)
        for request in random_requests(16, algorithm, block_size=4, sampled=True)
    ]
    rig = Rig(load_tiny(directory, "cuda"), num_pages=20, page_size=4, budget=96)
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    for request in requests:
        expected = decode(directory, request.prompt_token_ids, oracle_settings(request))
        assert rig.answers[request.attempt.transfer_id].token_ids == expected.token_ids
    assert rig.engine.counters.preemptions > 0
