"""Tiny random checkpoints of every architecture, written as their releases write directories.

With config.json, safetensors (single or sharded) and a working byte-level tokenizer.json; heads are
scaled so that confidences spread over both sides of a threshold. Imports nothing of effuse.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

Architecture = Literal["sdar", "dream", "llada", "fast_dllm_v2", "stable_diffcoder"]
ARCHITECTURES: tuple[Architecture, ...] = ("sdar", "dream", "llada")
"""Those that differ in their layers; Fast-dLLM v2's are Dream's, Stable-DiffCoder's are LLaDA's."""

# Ids 0..255 are bytes; every id from 258 on is a made-up word.
EOS_TOKEN_ID, MASK_TOKEN_ID = 256, 257
VOCAB_SIZE = 272


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny checkpoint; `head_dim` times `num_heads` need not be `hidden_size` (sdar)."""

    num_layers: int = 3
    hidden_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 1024


def architecture_of(text: str) -> Architecture:
    """The architecture that a command line names. Raises ValueError."""
    for known in ARCHITECTURES:
        if text == known:
            return known
    raise ValueError(f"expected one of {', '.join(ARCHITECTURES)}, got {text!r}")


def write_tiny_checkpoint(
    path: Path,
    architecture: Architecture,
    seed: int = 0,
    *,
    head_scale: float = 8.0,
    gain: float = 1.0,
    block_size: int = 4,
    tied: bool = False,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,),
    sizes: TinySizes | None = None,
    is_tuned: bool = True,
) -> Path:
    """Write a checkpoint directory at `path` and return it. Equal arguments, equal bytes.

    `is_tuned`: Dream's and LLaDA's configurations state that they are tuned for D2F, which their
    releases are not.

    With `head_scale` 8 about a third of the greedy confidences pass 0.9; with 1 none does. `gain`
    scales the contribution of layers: smaller ones round less, and make positions more similar.
    """
    sizes = sizes or TinySizes()
    path.mkdir(parents=True, exist_ok=True)
    config = {"block_size": block_size, "dtype": str(dtype).removeprefix("torch.")}
    config |= {"eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else [*eos_token_ids]}
    config |= {"mask_token_id": MASK_TOKEN_ID, "vocab_size": sizes.vocab_size}
    config |= _llada_config(sizes, tied) if architecture == "llada" else {}
    config |= _qwen_config(architecture, sizes, tied, block_size) if architecture != "llada" else {}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if is_tuned and architecture in ("dream", "llada"):
        (path / "generation_config.json").write_text('{"algorithm": "d2f"}')
    tensors = random_tensors(architecture, sizes, seed, head_scale, gain, tied)
    write_tensors(path, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards)
    build_tokenizer(sizes.vocab_size).save(str(path / "tokenizer.json"))
    return path


def write_tensors(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write one file, or `shards` of them with an index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensors(
    architecture: Architecture,
    sizes: TinySizes,
    seed: int,
    head_scale: float = 1.0,
    gain: float = 1.0,
    tied: bool = False,
) -> dict[str, Tensor]:
    """All tensors in fp32 under their released names. Attention is sharp and its output strong, so
    that positions, all masks to begin with, differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q_dim, kv_dim = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        return drawn

    def near(value: float, size: int) -> Tensor:
        return value + 0.1 * torch.randn(size, generator=generator)

    llada = architecture == "llada"
    top = "model.transformer" if llada else "model"
    tensors = {
        f"{top}.{'wte' if llada else 'embed_tokens'}.weight": matrix(
            sizes.vocab_size, hidden, hidden**0.5
        )
    }
    for layer in range(sizes.num_layers):
        at = f"{top}.{'blocks' if llada else 'layers'}.{layer}"
        attention, mlp = (at, at) if llada else (f"{at}.self_attn", f"{at}.mlp")
        tensors |= {
            f"{at}.{'attn_norm' if llada else 'input_layernorm'}.weight": near(1, hidden),
            f"{attention}.q_proj.weight": matrix(q_dim, hidden, 2.0 * gain),
            f"{attention}.k_proj.weight": matrix(kv_dim, hidden, 2.0 * gain),
            f"{attention}.v_proj.weight": matrix(kv_dim, hidden, 1.5 * gain),
            f"{attention}.{'attn_out' if llada else 'o_proj'}.weight": matrix(
                hidden, q_dim, 2.0 * gain
            ),
            f"{at}.{'ff_norm' if llada else 'post_attention_layernorm'}.weight": near(1, hidden),
            f"{mlp}.{'ff_proj' if llada else 'gate_proj'}.weight": matrix(
                inner, hidden, 1.5 * gain
            ),
            f"{mlp}.up_proj.weight": matrix(inner, hidden, 1.5 * gain),
            f"{mlp}.{'ff_out' if llada else 'down_proj'}.weight": matrix(hidden, inner, 1.5 * gain),
        }
        if architecture in ("dream", "fast_dllm_v2"):
            for name, size in (("q_proj", q_dim), ("k_proj", kv_dim), ("v_proj", kv_dim)):
                tensors[f"{attention}.{name}.bias"] = near(0, size)
        if architecture == "sdar":
            for name in ("q_norm", "k_norm"):
                tensors[f"{attention}.{name}.weight"] = near(1.7, sizes.head_dim)
    norm = f"{top}.{'ln_f' if llada else 'norm'}.weight"
    tensors[norm] = near(1, hidden) * (head_scale / hidden**0.5 if tied else 1)
    if not tied:
        head = "model.transformer.ff_out" if llada else "lm_head"
        tensors[f"{head}.weight"] = matrix(sizes.vocab_size, hidden, head_scale)
    return tensors


def build_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Bytes without merges, the two special tokens, and words for the remaining ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<|eos|>", "<|mask|>", *(f"w{i}" for i in range(258, vocab_size))]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in ("<|eos|>", "<|mask|>")])
    return tokenizer


def _qwen_config(
    architecture: str, sizes: TinySizes, tied: bool, block_size: int
) -> dict[str, object]:
    config: dict[str, object] = {
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": sizes.max_positions,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    if architecture == "sdar":
        return config | {
            "architectures": ["SDARForCausalLM"],
            "attention_bias": False,
            "head_dim": sizes.head_dim,
            "model_type": "sdar",
        }
    if architecture == "fast_dllm_v2":
        return config | {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "bd_size": block_size,
            "layer_types": ["full_attention"] * sizes.num_layers,
            "model_type": "Fast_dLLM_Qwen",
        }
    if architecture == "stable_diffcoder":
        return config | {
            "architectures": ["StableDiffcoderForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
            "model_type": "llama",
        }
    return config | {"architectures": ["DreamModel"], "model_type": "Dream", "use_mrope": False}


def _llada_config(sizes: TinySizes, tied: bool) -> dict[str, object]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": sizes.hidden_size,
        "embedding_size": sizes.vocab_size,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": sizes.max_positions,
        "mlp_hidden_size": sizes.intermediate_size,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "n_layers": sizes.num_layers,
        "rms_norm_eps": 1e-05,
        "rope": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "weight_tying": tied,
    }
