"""The families' forward in the plainest way, from the raw tensors of a checkpoint directory.

One sequence, positions from 0, an explicit dense mask, fp32. Written apart from the engine's
transformer: it shares the safetensors files with it and nothing else.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

Family = Literal["sdar", "dream", "llada"]


@dataclass(frozen=True, slots=True)
class RawLayer:
    """One layer's tensors as they were released; with a router those of all experts, stacked."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    biases: tuple[Tensor, Tensor, Tensor] | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    router: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RawModel:
    """A checkpoint in fp32 and the few numbers of its configuration that a forward needs."""

    family: Family
    heads: int
    kv_heads: int
    theta: float
    eps: float
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    embedding: Tensor
    layers: tuple[RawLayer, ...]
    norm: Tensor
    head: Tensor
    top_k: int = 0  # experts of a row, by the softmax of its router
    renormalises: bool = False  # their scores sum to 1

    @property
    def shifts(self) -> bool:
        """Dream: the row of p - 1 predicts p."""
        return self.family == "dream"

    def block_origin(self, prompt_len: int) -> int:
        """Where the block grid starts."""
        return 0 if self.family == "sdar" else prompt_len


def load_raw(directory: Path | str) -> RawModel:
    """Read a checkpoint directory."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    if config["model_type"] == "llada" and "num_experts" not in config:
        return _llada(config, tensors, _eos(directory, config))
    return _qwen(config, tensors, _eos(directory, config))


def visible(length: int, origin: int, block_size: int) -> Tensor:
    """[length, length] bool: a position sees its own block and earlier ones; everything before
    the origin is one block."""
    block = torch.tensor([max((p - origin) // block_size, -1) for p in range(length)])
    return block[:, None] >= block


@torch.no_grad()
def logits(model: RawModel, token_ids: list[int], mask: Tensor) -> Tensor:
    """Raw logits [T, V]: row i comes from position i's hidden state."""
    x = model.embedding[token_ids]
    for layer in model.layers:
        x = x + _attention(model, layer, _norm(x, layer.attn_norm, model.eps), mask)
        inner = _norm(x, layer.mlp_norm, model.eps)
        x = x + (_mlp(layer, inner) if layer.router is None else _experts(model, layer, inner))
    return _norm(x, model.norm, model.eps) @ model.head.T


def _mlp(layer: RawLayer, x: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ layer.gate.T) * (x @ layer.up.T)) @ layer.down.T


def _experts(model: RawModel, layer: RawLayer, x: Tensor) -> Tensor:
    """The results of all experts; those that a row did not choose count as zero."""
    assert layer.router is not None
    scores = (x @ layer.router.T).softmax(dim=-1)
    chosen = scores.topk(model.top_k, dim=-1)
    values = chosen.values
    if model.renormalises:
        values = values / values.sum(dim=-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(1, chosen.indices, values)
    gate = torch.einsum("th,eih->tei", x, layer.gate)
    up = torch.einsum("th,eih->tei", x, layer.up)
    given = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, layer.down)
    return torch.einsum("te,teh->th", weights, given)


def _attention(model: RawModel, layer: RawLayer, x: Tensor, mask: Tensor) -> Tensor:
    bias_q, bias_k, bias_v = layer.biases or (0, 0, 0)
    q = (x @ layer.q.T + bias_q).view(len(x), model.heads, -1)
    k = (x @ layer.k.T + bias_k).view(len(x), model.kv_heads, -1)
    v = (x @ layer.v.T + bias_v).view(len(x), model.kv_heads, -1)
    if layer.head_norms is not None:
        q = _norm(q, layer.head_norms[0], model.eps)
        k = _norm(k, layer.head_norms[1], model.eps)
    q, k = _rotate(q, model.theta), _rotate(k, model.theta)
    shared = model.heads // model.kv_heads
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1) @ layer.out.T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)
    angle = torch.arange(len(x))[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _eos(directory: Path, config: dict[str, object]) -> tuple[int, ...]:
    found: list[int] = []
    path = directory / "generation_config.json"
    stated = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    for entry in (config.get("eos_token_id"), stated):
        found += entry if isinstance(entry, list) else [entry] if isinstance(entry, int) else []
    return tuple(dict.fromkeys(found))


def _qwen(config: dict[str, object], t: dict[str, Tensor], eos: tuple[int, ...]) -> RawModel:
    """Dream, SDAR, and those with experts: a layer's tensors show its kind."""
    families: dict[object, Family] = {"Dream": "dream", "llada": "llada"}
    layers = []
    for index in range(_int(config, "num_hidden_layers")):
        at = f"model.layers.{index}"
        attn = f"{at}.self_attn"
        layers.append(
            RawLayer(
                attn_norm=t[f"{at}.input_layernorm.weight"],
                q=t[f"{attn}.q_proj.weight"],
                k=t[f"{attn}.k_proj.weight"],
                v=t[f"{attn}.v_proj.weight"],
                biases=(
                    t[f"{attn}.q_proj.bias"],
                    t[f"{attn}.k_proj.bias"],
                    t[f"{attn}.v_proj.bias"],
                )
                if f"{attn}.q_proj.bias" in t
                else None,
                head_norms=(t[f"{attn}.q_norm.weight"], t[f"{attn}.k_norm.weight"])
                if f"{attn}.q_norm.weight" in t
                else None,
                out=t[f"{attn}.o_proj.weight"],
                mlp_norm=t[f"{at}.post_attention_layernorm.weight"],
                gate=_all_experts(t, at, "gate_proj"),
                up=_all_experts(t, at, "up_proj"),
                down=_all_experts(t, at, "down_proj"),
                router=t.get(f"{at}.mlp.gate.weight"),
            )
        )
    embedding = t["model.embed_tokens.weight"]
    return RawModel(
        family=families.get(config["model_type"], "sdar"),
        heads=_int(config, "num_attention_heads"),
        kv_heads=_int(config, "num_key_value_heads"),
        theta=_theta(config),
        eps=_float(config, "rms_norm_eps"),
        mask_token_id=_int(config, "mask_token_id"),
        eos_token_ids=eos,
        block_size=_int(config, "block_size"),
        embedding=embedding,
        layers=tuple(layers),
        norm=t["model.norm.weight"],
        head=embedding if config["tie_word_embeddings"] else t["lm_head.weight"],
        top_k=_int(config, "num_experts_per_tok") if "num_experts" in config else 0,
        renormalises=bool(config.get("norm_topk_prob")),
    )


def _all_experts(t: dict[str, Tensor], layer: str, name: str) -> Tensor:
    """The MLP's matrix, or of all experts theirs."""
    if f"{layer}.mlp.{name}.weight" in t:
        return t[f"{layer}.mlp.{name}.weight"]
    count = len(t[f"{layer}.mlp.gate.weight"])
    return torch.stack([t[f"{layer}.mlp.experts.{i}.{name}.weight"] for i in range(count)])


def _llada(config: dict[str, object], t: dict[str, Tensor], eos: tuple[int, ...]) -> RawModel:
    layers = []
    for index in range(_int(config, "n_layers")):
        at = f"model.transformer.blocks.{index}"
        layers.append(
            RawLayer(
                attn_norm=t[f"{at}.attn_norm.weight"],
                q=t[f"{at}.q_proj.weight"],
                k=t[f"{at}.k_proj.weight"],
                v=t[f"{at}.v_proj.weight"],
                biases=None,
                head_norms=None,
                out=t[f"{at}.attn_out.weight"],
                mlp_norm=t[f"{at}.ff_norm.weight"],
                gate=t[f"{at}.ff_proj.weight"],
                up=t[f"{at}.up_proj.weight"],
                down=t[f"{at}.ff_out.weight"],
            )
        )
    embedding = t["model.transformer.wte.weight"]
    return RawModel(
        family="llada",
        heads=_int(config, "n_heads"),
        kv_heads=_int(config, "n_kv_heads"),
        theta=_theta(config),
        eps=_float(config, "rms_norm_eps"),
        mask_token_id=_int(config, "mask_token_id"),
        eos_token_ids=eos,
        block_size=_int(config, "block_size"),
        embedding=embedding,
        layers=tuple(layers),
        norm=t["model.transformer.ln_f.weight"],
        head=embedding if config["weight_tying"] else t["model.transformer.ff_out.weight"],
    )


def _int(config: dict[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int), key
    return value


def _float(config: dict[str, object], key: str) -> float:
    value = config[key]
    assert isinstance(value, int | float), key
    return float(value)


def _theta(config: dict[str, object]) -> float:
    nested = config.get("rope_parameters")
    return _float(nested if isinstance(nested, dict) else config, "rope_theta")
