"""The limit of an engine step on the CPU: the same products in plain torch and nothing else.

The same rows, contexts, attention and head rows as one engine step, over contiguous K and V that
already exist: no pages, scheduling, sampling or state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from effuse.models.part import Part
from effuse.models.transformer import LayerWeights, Transformer


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence: its packed rows, its contiguous K and V [Hkv, context + rows, D], its mask."""

    begin: int
    end: int
    context: int
    keys: Tensor
    values: Tensor
    mask: Tensor  # [rows, context + rows] bool


class BareForward:
    """A step's shapes, prepared once; `run` is the timed part."""

    def __init__(self, model: Transformer, parts: Sequence[Part], block_size: int) -> None:
        self._model = model
        self._token_ids = torch.tensor([token for part in parts for token in part.token_ids])
        self._spans = _spans(model, parts, block_size)
        positions = [part.start + row for part in parts for row in range(len(part.token_ids))]
        self._cos, self._sin = _rotation(model, torch.tensor(positions))
        self._head_rows = _head_rows(parts)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Logits [candidates, V]."""
        model = self._model
        hidden = functional.embedding(self._token_ids, model.weights.embedding)
        for layer in model.weights.layers:
            hidden = hidden + self._attend(layer, self._norm(hidden, layer.attn_norm))
            gate, up = functional.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(
                2, dim=-1
            )
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        wanted = self._norm(hidden[self._head_rows], model.weights.norm)
        return functional.linear(wanted, model.weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._model.config.rms_norm_eps)

    def _attend(self, layer: LayerWeights, x: Tensor) -> Tensor:
        config = self._model.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = self._rotate(q).transpose(0, 1), self._rotate(k).transpose(0, 1)
        v = v.transpose(0, 1)
        out = torch.empty_like(q)
        for span in self._spans:
            rows = slice(span.begin, span.end)
            span.keys[:, span.context :] = k[:, rows]
            span.values[:, span.context :] = v[:, rows]
            out[:, rows] = functional.scaled_dot_product_attention(
                q[None, :, rows],
                span.keys[None],
                span.values[None],
                attn_mask=span.mask,
                enable_gqa=True,
            )[0]
        return functional.linear(out.transpose(0, 1).reshape(len(x), -1), layer.attn_out)

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-high, low), dim=-1) * self._sin


def _spans(model: Transformer, parts: Sequence[Part], block_size: int) -> list[_Span]:
    config = model.config
    spans, begin = [], 0
    for part in parts:
        rows = len(part.token_ids)
        shape = (config.num_kv_heads, part.start + rows, config.head_dim)
        position = torch.arange(part.start + rows)
        block = ((position - part.block_origin) // block_size).clamp(min=-1)
        mask = block[part.start :, None] >= block[None, :]
        spans.append(
            _Span(begin, begin + rows, part.start, torch.randn(shape), torch.randn(shape), mask)
        )
        begin += rows
    return spans


def _rotation(model: Transformer, positions: Tensor) -> tuple[Tensor, Tensor]:
    dim = model.config.head_dim
    frequency = model.config.rope_theta ** -(torch.arange(0, dim, 2) / dim)
    angle = (positions[:, None] * frequency).repeat(1, 2)[:, None, :]
    return angle.cos(), angle.sin()


def _head_rows(parts: Sequence[Part]) -> Tensor:
    rows, begin = [], 0
    for part in parts:
        rows += [begin + position - part.start for position in part.candidates]
        begin += len(part.token_ids)
    return torch.tensor(rows, dtype=torch.int64)
