"""Rivals of a prefill: only its products and attention, and plain eager PyTorch.

All prompts of a forward have the same length, are bidirectional, and begin without a cache. K and V
are contiguous. The bare products of the last layer are those that prefill needs: K and V, and for
models that shift their logits the rest of it over one row for each prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from effuse.models.transformer import LayerWeights, Transformer


def bare_prefill(model: Transformer, num_prompts: int, length: int) -> Callable[[], None]:
    """The products of all layers and cuDNN's attention on fixed random inputs, nothing else."""
    config = model.config
    num_rows, kv_heads, dim = num_prompts * length, config.num_kv_heads, config.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=model.device, dtype=model.dtype)

    x = random(num_rows, config.hidden_size)
    mixed = random(num_rows, config.num_heads * dim)
    activated = random(num_rows, config.intermediate_size)
    q = random(num_prompts, config.num_heads, length, dim)
    k, v = (random(num_prompts, kv_heads, length, dim) for _ in range(2))
    num_q = config.num_heads * dim
    last = model.weights.layers[-1]
    num_last = num_prompts if config.shift_logits else 0

    @torch.inference_mode()
    def run() -> None:
        for layer in model.weights.layers[:-1]:
            functional.linear(x, layer.qkv, layer.qkv_bias)
            attend(q, k, v)
            functional.linear(mixed, layer.attn_out)
            functional.linear(x, layer.gate_up)
            functional.linear(activated, layer.down)
        functional.linear(x, last.qkv[num_q:])
        if num_last:
            functional.linear(x[:num_last], last.qkv[:num_q])
            functional.linear(mixed[:num_last], last.attn_out)
            functional.linear(x[:num_last], last.gate_up)
            functional.linear(activated[:num_last], last.down)

    return run


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unmasked attention [B, Hq, L, D] of q [B, Hq, L, D] over k and v [B, Hkv, L, D]."""
    if q.device.type == "cpu":
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class PlainPrefill:
    """The same prompts in PyTorch operators, call by call, K and V kept layer by layer."""

    def __init__(self, model: Transformer, num_prompts: int, length: int) -> None:
        self._model = model
        self._shape = (num_prompts, length)
        config, device = model.config, model.device
        half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        angle = torch.arange(length, device=device)[:, None] / config.rope_theta**half
        angle = torch.cat([angle, angle], dim=-1)
        self._cos, self._sin = angle.cos().to(model.dtype), angle.sin().to(model.dtype)

    @torch.inference_mode()
    def run(self, token_ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """K and V [B, Hkv, L, D] of each layer, and the last rows [B, H] after the final norm.

        token_ids: [B, L] int64.
        """
        model = self._model
        x = functional.embedding(token_ids.view(-1), model.weights.embedding)
        stored = []
        for layer in model.weights.layers:
            mixed, kv = self._attention(layer, self._norm(x, layer.attn_norm))
            stored.append(kv)
            x = x + functional.linear(mixed, layer.attn_out)
            gate, up = functional.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        last = x.view(*self._shape, -1)[:, -1]
        return stored, self._norm(last, model.weights.norm)

    def _attention(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        config = self._model.config
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = functional.linear(x, layer.qkv, layer.qkv_bias)
        heads = heads.view(*self._shape, sum(sizes), config.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, sizes, dim=1)
        k = self._rotate(k)
        mixed = attend(self._rotate(q), k, v)
        return mixed.transpose(1, 2).reshape(len(x), -1), (k, v)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat([-second, first], dim=-1) * self._sin

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
