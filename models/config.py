"""A published checkpoint's config.json, reduced to the numbers that the transformer needs.

Each family has one reader for its releases' files. `config_stated.py` compares the other keys with
the model, so that a key that would change the forward is obeyed or refused. `families.py` finds the
family, `end_ids.py` the ids that end an answer. Tensors and their names are in `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from effuse.models.config_experts import (
    ExpertConfig,
    llada2_experts,
    llada_experts,
    qwen_experts,
)
from effuse.models.config_keys import CheckpointError, ConfigKeys
from effuse.models.config_stated import check_stated, rotary_dim
from effuse.models.end_ids import end_ids
from effuse.models.families import FAMILIES, Architecture, family_of, find_family

PromptAttention = Literal["causal_blocks", "bidirectional"]

_BLOCK_CAUSAL: Final[frozenset[Architecture]] = frozenset(
    {"sdar", "sdar_moe", "llada2_moe", "fast_dllm_v2", "dream_reasoner", "stable_diffcoder"}
)
_QWEN2: Final[frozenset[Architecture]] = frozenset({"dream", "fast_dllm_v2"})
_LLAMA: Final[frozenset[Architecture]] = frozenset({"stable_diffcoder", "illada"})
_SHIFTED: Final[frozenset[Architecture]] = frozenset({"dream", "fast_dllm_v2"})
_TOP_K_FIRST: Final = frozenset(one.architecture for one in FAMILIES if one.top_k_first)
# Values that releases leave to the tokenizer or to their own code.
_SDAR_MASK_TOKEN_ID = 151669
_LING_MASK_TOKEN_ID = 156895
_FAST_DLLM_MASK_TOKEN_ID = 151665
_SEED_MASK_TOKEN_ID = 5
_SDAR_HEAD_DIM = 128  # default of its configuration class, for any hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and conventions of one checkpoint. Sizes are element counts; `vocab_size` is the width
    of the logits, which includes padded rows of the released head.
    """

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    rotary_dim: int | None = None  # the first dimensions of a head are rotated; None: all
    experts: ExpertConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads: the "
                "number of heads must be a multiple of the number of KV heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        for name, token in (
            ("mask_token_id", self.mask_token_id),
            *(("eos_token_id", token) for token in self.eos_token_ids),
        ):
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(f"{name} {token} lies outside 0..{self.vocab_size - 1}")
        if self.mask_token_id in self.eos_token_ids:
            raise CheckpointError(f"mask_token_id {self.mask_token_id} is also an eos_token_id")
        if self.block_size < 1:
            raise CheckpointError(f"block_size must be at least 1, got {self.block_size}")

    @property
    def shift_logits(self) -> bool:
        """Position p is predicted by the hidden row of p - 1."""
        return self.architecture in _SHIFTED

    @property
    def top_k_first(self) -> bool:
        """Sampling applies top-k before top-p, which then covers only the first k."""
        return self.architecture in _TOP_K_FIRST

    @property
    def prompt_attention(self) -> PromptAttention:
        """Whether the prompt attends to all of itself, or block by block like the answer."""
        return "causal_blocks" if self.architecture in _BLOCK_CAUSAL else "bidirectional"

    @property
    def postponed_ids(self) -> tuple[int, ...]:
        """Ids that LLaDA's confidence_eos_eot_inf writes last."""
        turn_ends = family_of(self.architecture).turn_end_ids
        beside = (token for token in turn_ends if token < self.vocab_size)
        return tuple(dict.fromkeys((*self.eos_token_ids, *beside)))

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The experts of a layer, or None for a plain MLP."""
        if self.experts is None or layer < self.experts.num_dense_layers:
            return None
        return self.experts

    def block_origin(self, prompt_len: int) -> int:
        """Position where the block grid starts; everything before it is one bidirectional block."""
        return 0 if self.prompt_attention == "causal_blocks" else prompt_len

    @classmethod
    def from_dir(cls, path: Path | str, *, block_size: int | None = None) -> ModelConfig:
        """Read `config.json`, and the other files for the end ids.

        `block_size` overrides the checkpoint's. An unsupported family is refused first, before the
        rest of the file is read. Raises CheckpointError that names file and key.
        """
        directory = Path(path)
        keys = ConfigKeys.read(directory / "config.json")
        family = find_family(keys)
        if block_size is None:
            block_size = keys.integer(family.block_size_key, default=family.block_size)
        ends = end_ids(directory, keys, family.end_ids)
        try:
            config = _READERS[family.architecture](keys, ends, block_size)
        except CheckpointError as error:  # of numbers that contradict each other
            named = str(keys.path) in str(error)
            raise error if named else CheckpointError(f"{keys.path}: {error}") from None
        check_stated(keys, config)
        return config


def _sdar(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    keys.only("attention_bias", (None, False))
    keys.only("num_experts", (None, 0))
    mask_token_id = keys.integer("mask_token_id", default=_SDAR_MASK_TOKEN_ID, least=0)
    return _qwen(keys, "sdar", _sdar_head_dim(keys), mask_token_id, eos, block_size)


def _dream(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    keys.only("attention_bias", (None, True))
    keys.only("use_mrope", (None, False))
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    keys.only("head_dim", (None, head_dim))  # its class has none
    mask_token_id = keys.integer("mask_token_id", least=0)
    return _qwen(keys, "dream", head_dim, mask_token_id, eos, block_size)


def _fast_dllm_v2(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's layers, the prompt in blocks."""
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", default=head_dim)
    mask_token_id = keys.integer("mask_token_id", default=_FAST_DLLM_MASK_TOKEN_ID, least=0)
    return _qwen(keys, "fast_dllm_v2", head_dim, mask_token_id, eos, block_size)


def _dream_reasoner(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """DreamReasoner (arXiv 2606.19257): Qwen3's layers and SDAR's blocks with Dream's name."""
    keys.only("attention_bias", (None, False))
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", default=head_dim)
    mask_token_id = keys.integer("mask_token_id", least=0)
    return _qwen(keys, "dream_reasoner", head_dim, mask_token_id, eos, block_size)


def _stable_diffcoder(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    return _llama(keys, "stable_diffcoder", eos, block_size)


def _illada(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """iLLaDA (arXiv 2606.25331): LLaDA's canvas, the keys and names of Llama."""
    keys.only("layer_norm_eps", (None,))
    return _llama(keys, "illada", eos, block_size)


def _llama(
    keys: ConfigKeys,
    architecture: Literal["stable_diffcoder", "illada"],
    eos: tuple[int, ...],
    block_size: int,
) -> ModelConfig:
    """Llama's layers, and the mask of the tokenizer that both share with Seed-Coder."""
    keys.only("attention_bias", (None, False))
    keys.only("mlp_bias", (None, False))
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", default=head_dim)
    mask_token_id = keys.integer("mask_token_id", default=_SEED_MASK_TOKEN_ID, least=0)
    return _qwen(keys, architecture, head_dim, mask_token_id, eos, block_size)


def _qwen(
    keys: ConfigKeys,
    architecture: Architecture,
    head_dim: int,
    mask_token_id: int,
    eos: tuple[int, ...],
    block_size: int,
    experts: ExpertConfig | None = None,
) -> ModelConfig:
    """The keys that Qwen3 (qk-norm, no bias), Qwen2 (qkv bias) and Llama (neither) share."""
    keys.only("hidden_act", ("silu",))
    keys.only("use_sliding_window", (None, False))
    keys.only("quantization_config", (None,))
    keys.every("layer_types", "full_attention")
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.num_layers(),
        hidden_size=keys.integer("hidden_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps"),
        qkv_bias=architecture in _QWEN2,
        qk_norm=architecture not in _QWEN2 | _LLAMA,
        tie_embeddings=keys.flag("tie_word_embeddings"),
        mask_token_id=mask_token_id,
        eos_token_ids=eos,
        block_size=block_size,
        experts=experts,
    )


def _llada(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """LLaDA-8B's release: an OLMo configuration with Llama's blocks."""
    for key, accepted in _LLADA_FIXED.items():
        keys.only(key, accepted)
    num_heads, hidden_size = keys.integer("n_heads"), keys.integer("d_model")
    return ModelConfig(
        architecture="llada",
        num_layers=keys.num_layers("n_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("n_kv_heads", default=num_heads),
        head_dim=hidden_size // num_heads,
        intermediate_size=keys.integer("mlp_hidden_size"),
        vocab_size=keys.integer("embedding_size", default=keys.integer("vocab_size")),
        max_position_embeddings=keys.integer("max_sequence_length"),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps"),
        qkv_bias=False,
        qk_norm=False,
        tie_embeddings=keys.flag("weight_tying"),
        mask_token_id=keys.integer("mask_token_id", least=0),
        eos_token_ids=eos,
        block_size=block_size,
    )


_LLADA_FIXED: dict[str, tuple[object, ...]] = {
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (None, False),
    "attention_layer_norm": (None, False),
    "bias_for_layer_norm": (None, False),
    "block_group_size": (None, 1),
    "clip_qkv": (None,),
    "include_bias": (None, False),
    "include_qkv_bias": (None, False),
    "input_emb_norm": (None, False),
    "layer_norm_with_affine": (None, True),
    "multi_query_attention": (None, False),
    "quantization_config": (None,),
    "scale_logits": (None, False),
}


def _sdar_moe(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """Qwen3's layers with experts instead of the MLP."""
    keys.only("attention_bias", (None, False))
    mask_token_id = keys.integer("mask_token_id", default=_SDAR_MASK_TOKEN_ID, least=0)
    experts = qwen_experts(keys)
    return _qwen(keys, "sdar_moe", _sdar_head_dim(keys), mask_token_id, eos, block_size, experts)


def _sdar_head_dim(keys: ConfigKeys) -> int:
    return keys.integer("head_dim", default=_SDAR_HEAD_DIM)


def _llada2_moe(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """LLaDA2.0 and 2.1 (arXiv 2512.15745, 2602.08676): Ling's layers, the prompt in blocks."""
    keys.only("use_qkv_bias", (None, False))
    keys.only("use_bias", (False,))
    keys.only("use_qk_norm", (None, True))
    keys.only("norm_head", (None, False))
    return _ling(keys, "llada2_moe", llada2_experts(keys), 0.5, eos, block_size)


def _llada_moe(keys: ConfigKeys, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """LLaDA-MoE (arXiv 2509.24389): OLMoE's layers, the prompt in both directions."""
    keys.only("attention_bias", (None, False))
    keys.only("qk_layernorm", (True,))
    keys.only("clip_qkv", (None,))
    return _ling(keys, "llada_moe", llada_experts(keys), 1.0, eos, block_size)


def _ling(
    keys: ConfigKeys,
    architecture: Literal["llada2_moe", "llada_moe"],
    experts: ExpertConfig,
    rotary_share: float,
    eos: tuple[int, ...],
    block_size: int,
) -> ModelConfig:
    """The keys of both, and the token ids of their common tokenizer."""
    keys.only("hidden_act", ("silu",))
    keys.only("use_sliding_window", (None, False))
    keys.only("quantization_config", (None,))
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    head_dim = keys.integer("head_dim", default=hidden_size // num_heads)
    dense = "intermediate_size" if architecture == "llada2_moe" else "dense_intermediate_size"
    has_dense = experts.num_dense_layers > 0
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.num_layers(),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        intermediate_size=keys.integer(dense) if has_dense else experts.intermediate_size,
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps"),
        qkv_bias=False,
        qk_norm=True,
        tie_embeddings=keys.flag("tie_word_embeddings", default=False),
        mask_token_id=keys.integer("mask_token_id", default=_LING_MASK_TOKEN_ID, least=0),
        eos_token_ids=eos,
        block_size=block_size,
        rotary_dim=rotary_dim(keys, head_dim, rotary_share),
        experts=experts,
    )


Reader = Callable[[ConfigKeys, tuple[int, ...], int], ModelConfig]
"""From a config.json, the ids that end an answer and the block size."""

_READERS: Final[Mapping[Architecture, Reader]] = {
    "sdar": _sdar,
    "dream": _dream,
    "llada": _llada,
    "sdar_moe": _sdar_moe,
    "llada2_moe": _llada2_moe,
    "llada_moe": _llada_moe,
    "fast_dllm_v2": _fast_dllm_v2,
    "dream_reasoner": _dream_reasoner,
    "stable_diffcoder": _stable_diffcoder,
    "illada": _illada,
}
