"""The bundled model for training: a plain torch SDAR (Qwen3 with block-causal masks).

Tensor names are those of the release, so a state dict is a checkpoint. No KV cache and no serving:
`transformer.py` serves the same weights with its own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = Tensor | BlockMask
TILE = 128


@dataclass(frozen=True, slots=True)
class DenoiserConfig:
    """Sizes of the model; the defaults are those of the bundled weights."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 448
    num_hidden_layers: int = 7
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 512


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        """`size` elements with a learnt gain, at first 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (scaled * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys, and rotary positions."""

    def __init__(self, config: DenoiserConfig) -> None:
        """Four projections without bias, two norms of `head_dim`."""
        super().__init__()
        width, kv_width = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self._head_dim = config.head_dim

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """`x` [batch, tokens, hidden]; `rotation` cos and sin [batch, 1, tokens, head_dim]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = _rotate(self.q_norm(q), rotation).to(v.dtype)
        k = _rotate(self.k_norm(k), rotation).to(v.dtype)
        if isinstance(mask, BlockMask):
            mixed = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            assert isinstance(mixed, Tensor)
        else:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask[:, None], enable_gqa=True
            )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DenoiserConfig) -> None:
        """Three projections without bias."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] in and out."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DenoiserConfig) -> None:
        """One layer with the release's names."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """[batch, tokens, hidden] in and out."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and final norm, which the release calls `model`."""

    def __init__(self, config: DenoiserConfig) -> None:
        """Layers are named by their index."""
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Denoiser(nn.Module):
    """The whole model, its head tied to the embedding."""

    def __init__(self, config: DenoiserConfig) -> None:
        """Normal initialisation, residual outputs scaled down by depth."""
        super().__init__()
        self.model = Trunk(config)
        self._config = config
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * config.num_hidden_layers) if residual else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(config.hidden_size))

    def forward(self, ids: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Logits [batch, tokens, vocab] of int ids and positions [batch, tokens]."""
        rotation = _rotation(positions, self._config)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rotation, mask)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotation(positions: Tensor, config: DenoiserConfig) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, config.head_dim, 2, device=positions.device)
    frequency = config.rope_theta ** (-half.float() / config.head_dim)
    angle = positions.float()[:, None, :, None] * torch.cat((frequency, frequency))
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-right, left), dim=-1) * rotation[1]


class Visibility(NamedTuple):
    """Which tokens see which in packed rows; fields are int [rows, tokens] as in `data.Rows`."""

    document: Tensor
    copy: Tensor
    block: Tensor
    start: Tensor

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule in flex attention's form: (row, head, query, key) to bool."""
        document, copy, block, start = self

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            clean = (copy[row, key] == 0) & (block[row, key] < start[row, query])
            group = (copy[row, key] == copy[row, query]) & (start[row, key] == start[row, query])
            noisy = group & (copy[row, query] != 0) & (block[row, key] <= block[row, query])
            return (document[row, key] == document[row, query]) & (clean | noisy)

        return sees

    def dense(self) -> Tensor:
        """Bool [rows, query, key]."""
        rows, tokens = self.block.shape
        device = self.block.device
        row = torch.arange(rows, device=device)[:, None, None]
        token = torch.arange(tokens, device=device)
        return self.rule()(row, row, token[None, :, None], token[None, None, :])

    def tiles(self) -> BlockMask:
        """The rule for flex attention; pairs of tiles that share no document are skipped."""
        documents = self.document.view(len(self.document), -1, TILE)
        low, high = documents.amin(-1), documents.amax(-1)
        meet = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        counts = meet.sum(-1, dtype=torch.int32)[:, None]
        order = meet.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]
        return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=TILE, mask_mod=self.rule())
