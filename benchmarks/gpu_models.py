"""Published model shapes with random weights, made on the device; only the speed is like theirs.

Weights are normal with deviation 0.02, norms are 1, and the head's rows of mask and end ids are
zero so that neither is ever drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effuse.models.config import ModelConfig
from effuse.models.transformer import LayerWeights, ModelWeights, Transformer

DREAM_7B = ModelConfig(
    architecture="dream",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152064,
    max_position_embeddings=16384,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    block_size=32,
)
LLADA_8B = ModelConfig(
    architecture="llada",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=126464,
    max_position_embeddings=16384,
    rope_theta=5e5,
    rms_norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    block_size=32,
)
# For trying the benchmarks out where there is no GPU.
TINY = ModelConfig(
    architecture="dream",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=96,
    max_position_embeddings=4096,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=False,
    mask_token_id=90,
    eos_token_ids=(91,),
    block_size=32,
)
MODELS = {"dream-7b": DREAM_7B, "llada-8b": LLADA_8B, "tiny": TINY}


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A transformer of this shape; equal calls give equal weights on one kind of device."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0, 0.02, generator=generator)

    def ones() -> Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        width, q_dim = config.hidden_size, config.num_heads * config.head_dim
        qkv_dim = q_dim + 2 * config.num_kv_heads * config.head_dim
        return LayerWeights(
            attn_norm=ones(),
            qkv=normal(qkv_dim, width),
            qkv_bias=normal(qkv_dim) if config.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            attn_out=normal(width, q_dim),
            mlp_norm=ones(),
            gate_up=normal(2 * config.intermediate_size, width),
            down=normal(width, config.intermediate_size),
        )

    head = normal(config.vocab_size, config.hidden_size)
    head[[config.mask_token_id, *config.eos_token_ids]] = 0
    weights = ModelWeights(
        embedding=normal(config.vocab_size, config.hidden_size),
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=ones(),
        head=head,
    )
    return Transformer(config, weights)
