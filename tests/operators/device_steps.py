"""Whole device steps as CUDA runs them, in Triton's interpreter: bucketed rows, padding, kernels.

A separate program: `TRITON_INTERPRET=1 python -m operators.device_steps ARCHITECTURE`. Attention
leaves NaN in places that it does not write, so that an effect of padding would show in the tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from checkpoints import TinySizes, architecture_of, write_tiny_checkpoint
from decoding.device_decoder import DeviceDecoder
from decoding.engines import Rig, load_tiny, of_length, random_requests
from torch import Tensor

from effuse.decode_worker.device_step import DeviceStep
from effuse.kernels import attention_triton, sampling_triton
from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.sampling_shared_triton import sampling_shape
from effuse.kernels.values import Candidates, RowSampling
from effuse.models import transformer
from operators.interpreter import use_interpreter

SIZES = TinySizes(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch,
    *, scale: float,
) -> Tensor:  # fmt: skip
    if batch.gather is not None:  # a prefill
        return block_attention(q, k, v, k_cache, v_cache, batch, scale=scale)
    out = torch.full_like(q, torch.nan)
    attention_triton.launch(q, k, v, k_cache, v_cache, batch, scale=scale, out=out)
    return out


def sample(logits: Tensor, s: RowSampling, mask_token_id: int, *, top_k_first: bool) -> Candidates:
    shape = sampling_shape(logits.shape[1], 128)
    return sampling_triton.launch(logits, s, mask_token_id, shape, top_k_first=top_k_first)


def main() -> None:
    use_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(
            Path(folder) / "model", architecture_of(sys.argv[1]), seed=3, sizes=SIZES
        )
        model = load_tiny(path)
    requests = [
        of_length(request, 6) for request in random_requests(2, "d2f", block_size=4, sampled=True)
    ]
    rig = Rig(model)
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    expected = [list(rig.answers[r.attempt.transfer_id].token_ids) for r in requests]
    with (
        patch.object(model, "_attention", attention),
        patch.object(transformer, "sample_confidence", sample),
    ):
        decoder = DeviceDecoder(model, num_slots=2, max_rows=64, step_type=DeviceStep)
        tokens = decoder.decode(requests)
    print(json.dumps({"tokens": tokens, "expected": expected}))


if __name__ == "__main__":
    main()
