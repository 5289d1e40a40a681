"""The same parts on the CPU and on a CUDA device: candidates, boundary, K and V agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    MASK_TOKEN_ID,
    Architecture,
    TinySizes,
    write_tiny_checkpoint,
)
from expert_checkpoints import ExpertFamily, write_expert_checkpoint

from effuse.config.decoding import Sampling
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.models.runner import ModelRunner, Part, PartResult
from effuse.models.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES = TinySizes(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192)
PAGE, BLOCK, NUM_PAGES = 16, 16, 24


def run_on(
    device: str, path: Path, dtype: torch.dtype, temperature: float
) -> tuple[list[PartResult], torch.Tensor]:
    """Two prompts of ragged length, then both denoise two blocks in one forward."""
    model = load_model(path, device=device, dtype=dtype, block_size=BLOCK)
    config = model.config
    sizes = config.num_layers, config.num_kv_heads, config.head_dim, PAGE
    layout = KVLayout("unified", *sizes, str(dtype).removeprefix("torch."))
    memory = PageMemory(layout, NUM_PAGES, device)
    runner = ModelRunner(model, memory.layer_views(), page_size=PAGE, block_size=BLOCK)
    prompts = [list(range(30, 69)), list(range(101, 121))]
    origins = [config.block_origin(len(prompt)) for prompt in prompts]
    cached = [
        len(p) - (len(p) - origin) % BLOCK for p, origin in zip(prompts, origins, strict=True)
    ]
    pages = [[5, 2, 9], [1, 7]]
    prefills = [
        Part(
            token_ids=prompts[i][: cached[i]],
            start=0,
            pages=pages[i],
            num_stored=cached[i],
            block_origin=origins[i],
            keep_boundary=True,
        )
        for i in range(2)
    ]
    results = runner.run(prefills)
    parts = []
    for i in range(2):
        tail = prompts[i][cached[i] :]
        masks = 2 * BLOCK - len(tail)
        parts.append(
            Part(
                token_ids=tail + [MASK_TOKEN_ID] * masks,
                start=cached[i],
                pages=pages[i],
                num_stored=0,
                block_origin=origins[i],
                candidates=range(len(prompts[i]), len(prompts[i]) + masks),
                boundary=results[i].boundary,
                denoise_counts=[1] * masks,
                sampling=Sampling(temperature=temperature, seed=1 << 63, top_k=40),
            )
        )
    return runner.run(parts), memory.tensor.float().cpu()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp32_agrees_with_the_cpu(
    tmp_path: Path, architecture: Architecture, temperature: float
) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=SIZES)
    on_cpu, cpu_memory = run_on("cpu", path, torch.float32, temperature)
    on_gpu, gpu_memory = run_on("cuda", path, torch.float32, temperature)
    torch.testing.assert_close(gpu_memory, cpu_memory, rtol=0, atol=1e-4)
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert one.tokens == other.tokens
        assert other.confidences == pytest.approx(one.confidences, abs=1e-3)


@pytest.mark.parametrize("family", ["sdar_moe", "llada2_moe"])
def test_experts_in_fp32_agree_with_the_cpu(tmp_path: Path, family: ExpertFamily) -> None:
    path = write_expert_checkpoint(tmp_path, family, head_scale=3.0, head_dim=32)
    on_cpu, cpu_memory = run_on("cpu", path, torch.float32, 0.0)
    on_gpu, gpu_memory = run_on("cuda", path, torch.float32, 0.0)
    torch.testing.assert_close(gpu_memory, cpu_memory, rtol=0, atol=1e-3)
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert other.confidences == pytest.approx(one.confidences, abs=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_stays_near_fp32(tmp_path: Path, architecture: Architecture) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, head_scale=3.0, sizes=SIZES)
    _, exact = run_on("cpu", path, torch.float32, 0.0)
    results, rounded = run_on("cuda", path, torch.bfloat16, 0.0)
    assert (rounded - exact).abs().max() < 0.2
    assert all(0 < c <= 1 for result in results for c in result.confidences)
