"""Steps on the device, two in flight, give the tokens of the host's engine, forward by forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from decoding.device_decoder import DeviceDecoder
from decoding.engines import Rig, load_tiny, of_length, random_requests

from effuse.decode_worker import device_buckets
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

SIZES = TinySizes(num_heads=2, num_kv_heads=1, head_dim=16)  # tensor cores need 16 columns


def expected(model: Transformer, requests: Sequence[StartDecode]) -> list[list[int]]:
    rig = Rig(model)
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    return [list(rig.answers[request.attempt.transfer_id].token_ids) for request in requests]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_the_hosts_engine(
    tmp_path: Path, architecture: Architecture, algorithm: str, device: str
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", architecture, seed=3, sizes=SIZES)
    model = load_tiny(directory, device)
    requests = [
        of_length(request, 18)
        for request in random_requests(7, algorithm, block_size=4, sampled=True)
    ]
    assert DeviceDecoder(model).decode(requests) == expected(model, requests)


@pytest.mark.parametrize("device", DEVICES)
def test_beginnings_that_are_read_together_change_no_token(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_buckets, "LEAST_SAVED", 1)
    monkeypatch.setattr(device_buckets, "LEAST_SAVED_EACH", 0)
    directory = write_tiny_checkpoint(tmp_path / "model", "sdar", seed=4, sizes=SIZES)
    model = load_tiny(directory, device)
    requests = [
        of_length(msgspec.structs.replace(one, prompt_token_ids=(*range(20, 40), 7 + i, 9)), 18)
        for i, one in enumerate(random_requests(9, "block_diffusion", block_size=4, sampled=True))
    ]
    decoder = DeviceDecoder(model, shared_pages=5)
    assert decoder.decode(requests) == expected(model, requests)
    assert decoder.stepper.num_sharing > 5


@pytest.mark.parametrize("device", DEVICES)
def test_small_buckets_and_late_pages_change_no_token(tmp_path: Path, device: str) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", "dream", seed=5, sizes=SIZES)
    model = load_tiny(directory, device)
    requests = [
        of_length(request, 18) for request in random_requests(6, "d2f", block_size=4, sampled=True)
    ]
    decoder = DeviceDecoder(model, max_rows=32, pages_come_late=True)
    assert decoder.decode(requests) == expected(model, requests)
    assert decoder.waits > 0
