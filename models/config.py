"""A published checkpoint's config.json, reduced to the numbers that the transformer needs.

Each family's own `family_NAME.py` names the keys that its config.json may state.
`config_stated.py` compares the other keys with the model, so that a key that would change the
forward is obeyed or refused. `end_ids.py` finds the ids that end an answer. `tensors.py` has the
names of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from effuse.config.decoding import ALGORITHMS, Algorithm, DecodeSettings
from effuse.models.config_keys import CheckpointError, ConfigKeys
from effuse.models.config_stated import check_stated, rotary_dim
from effuse.models.end_ids import end_ids
from effuse.models.families import BY_NAME, find_family
from effuse.models.family import ExpertConfig, Family

PromptAttention = Literal["causal_blocks", "bidirectional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and conventions of one checkpoint. Sizes are element counts; `vocab_size` is the width
    of the logits, which includes padded rows of the released head.
    """

    architecture: str
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
    family: Family = field(init=False, repr=False, compare=False)  # what its releases share

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", BY_NAME[self.architecture])
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads: the "
                "number of heads must be a multiple of the number of KV heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        for name, token in (
            ("mask_token_id", self.mask_token_id),
            *(("eos_token_id", token) for token in self.eos_token_ids),
        ):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} {token} lies outside 0..{self.vocab_size - 1}")
        if self.mask_token_id in self.eos_token_ids:
            raise ValueError(f"mask_token_id {self.mask_token_id} is also an eos_token_id")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    @property
    def shift_logits(self) -> bool:
        """Position p is predicted by the hidden row of p - 1."""
        return self.family.shift_logits

    @property
    def top_k_first(self) -> bool:
        """Sampling applies top-k before top-p, which then covers only the first k."""
        return self.family.top_k_first

    @property
    def rotary_shape(self) -> tuple[int, int]:
        """Positions and rotated dimensions of the rotary table. The last block may go beyond the
        last position of the text."""
        rotated = self.rotary_dim or self.head_dim
        return self.max_position_embeddings + self.block_size, rotated

    @property
    def prompt_attention(self) -> PromptAttention:
        """Whether the prompt attends to all of itself, or block by block like the answer."""
        return "causal_blocks" if self.family.is_block_causal else "bidirectional"

    @property
    def postponed_ids(self) -> tuple[int, ...]:
        """Ids that LLaDA's confidence_eos_eot_inf writes last."""
        beside = (token for token in self.family.turn_end_ids if token < self.vocab_size)
        return tuple(dict.fromkeys((*self.eos_token_ids, *beside)))

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The experts of a layer, or None for a plain MLP."""
        if self.experts is None or layer < self.experts.num_dense_layers:
            return None
        return self.experts

    def block_origin(self, prompt_len: int) -> int:
        """Position where the block grid starts; everything before it is one bidirectional block."""
        return 0 if self.prompt_attention == "causal_blocks" else prompt_len

    def unfit(self, algorithm: Algorithm) -> str | None:
        """Why this algorithm cannot decode the model; None if it can."""
        if algorithm == "fast_dllm_v2" and self.architecture != "fast_dllm_v2":
            wanted = "that was tuned for it"
        elif ALGORITHMS[algorithm].is_canvas and self.family.is_block_causal:
            wanted = "whose prompt attends to all of itself"
        else:
            return None
        return f"{algorithm} needs a model {wanted}, and {self.architecture} is not one"

    def block_steps(self, settings: DecodeSettings, max_tokens: int) -> DecodeSettings:
        """`settings` with the steps per block that the family's authors use for such an answer.

        LLaDA2.0's generate takes at most as many steps as the answer has tokens. LLaDA2.1's, which
        edits tokens, fills at least one mask in each step, for any length.
        """
        if settings.edits_tokens or not self.family.caps_steps:
            return settings
        steps = min(settings.denoising_steps, max_tokens)
        return msgspec.structs.replace(settings, denoising_steps=steps)

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
            config = _read(keys, family, ends, block_size)
        except CheckpointError:
            raise
        except ValueError as error:  # of numbers that contradict each other
            raise CheckpointError(f"{keys.path}: {error}") from None
        check_stated(keys, config.facts())
        return config

    def facts(self) -> dict[str, object]:
        """By the names of `config_stated.py`; None for those that do not concern this model."""
        named = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        flags = ("rms_norm_eps", "qkv_bias", "qk_norm", "tie_embeddings")
        facts: dict[str, object] = {name: getattr(self, name) for name in (*named, *flags)}
        facts |= {"rope_type": "default", "activation": "silu", "mlp_size": None}
        facts["rotary_dim"] = self.rotary_dim or self.head_dim
        if self.experts is None:
            facts["mlp_size"] = self.intermediate_size
            none = dict.fromkeys(("num_experts", "top_k", "num_shared", "inner_size"), 0)
            of_none = {"num_groups": 1, "top_groups": 1, "scale": 1.0, "has_router_bias": False}
            return facts | none | of_none
        routing = self.experts.routing
        of_routing = ("num_experts", "top_k", "num_shared", "scale", "num_groups", "top_groups")
        facts |= {name: getattr(routing, name) for name in (*of_routing, "scores", "renormalises")}
        facts["inner_size"] = self.experts.intermediate_size
        facts["num_dense_layers"] = self.experts.num_dense_layers
        return facts | {"has_router_bias": self.experts.has_bias}


def _read(keys: ConfigKeys, family: Family, eos: tuple[int, ...], block_size: int) -> ModelConfig:
    """Raises ValueError, of which a CheckpointError names the file and the key."""
    form = family.form

    def size(key: str, *, default: int | None = None, least: int = 1) -> int:
        default = form.defaults.get(key, default)
        return keys.integer(form.names.get(key, key), default=default, least=least)

    keys.only(form.names.get("hidden_act", "hidden_act"), ("silu",))
    keys.only("quantization_config", (None,))
    for key, accepted in form.only.items():
        keys.only(key, accepted)
    keys.every("layer_types", "full_attention")
    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    head_dim = hidden_size // num_heads
    if form.has_head_dim:
        head_dim = size("head_dim", default=head_dim)
    else:
        keys.only("head_dim", (None, head_dim))
    experts = None if form.experts is None else form.experts(keys)
    share, tied = form.rotary_share, "tie_word_embeddings"
    return ModelConfig(
        architecture=family.architecture,
        num_layers=keys.num_layers(form.names.get("num_hidden_layers", "num_hidden_layers")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=size(
            "num_key_value_heads", default=num_heads if form.as_many_kv_heads else None
        ),
        head_dim=head_dim,
        # Without a dense layer its size is not used.
        intermediate_size=size(
            "intermediate_size",
            default=None
            if experts is None or experts.num_dense_layers
            else experts.intermediate_size,
        ),
        vocab_size=size("vocab_size", default=keys.integer("vocab_size")),
        max_position_embeddings=size("max_position_embeddings"),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps"),
        qkv_bias=form.qkv_bias,
        qk_norm=form.qk_norm,
        tie_embeddings=keys.flag(form.names.get(tied, tied), default=form.defaults.get(tied)),
        mask_token_id=size("mask_token_id", least=0),
        eos_token_ids=eos,
        block_size=block_size,
        rotary_dim=None if share is None else rotary_dim(keys, head_dim, share),
        experts=experts,
    )
