"""A served family of published checkpoints, as values that its own `family_NAME.py` states.

`config.py` reads a config.json by them, and `tensors.py` names tensors by them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from effuse.config.decoding import Alg, Algorithm
from effuse.kernels.experts_routing import Routing
from effuse.models.config_keys import ConfigKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The layers that have experts instead of an MLP, and their sizes."""

    routing: Routing
    intermediate_size: int  # of one expert
    num_dense_layers: int = 0  # this many first layers have none
    has_bias: bool = False  # of the choice, with one number for each expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The keys that a family's config.json may state. A key that is not named here must agree with
    the model, or is refused if it may change the forward (`config_stated.py`).
    """

    # Accepted values of keys that this check cannot judge; None lets the key be missing
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # the family's names of common keys
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be missing
    has_head_dim: bool = True  # otherwise it is always the heads' share of hidden_size
    as_many_kv_heads: bool = False  # as heads, if the file states no number
    rotary_share: float | None = None  # of a head, if none is stated; None always rotates all
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Callable[[ConfigKeys], ExpertConfig] | None = None  # reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Released module names: three of the model, then those in a layer. Qwen's are the default."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"  # followed by the layer's number
    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attn_out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."  # before the next three
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A served family, with its authors' defaults for values that no file states."""

    architecture: str
    model_types: tuple[str, ...]  # as config.json spells them, in lower case
    classes: tuple[str, ...]  # possible names in config.json's `architectures`
    has_own_type: bool = True  # otherwise a config.json without a class means another model
    form: Form
    layout: Layout = Layout()
    is_block_causal: bool = False  # the prompt attends block by block, like the answer
    shift_logits: bool = False  # position p is predicted by the hidden row of p - 1
    block_size: int  # of a checkpoint that states none
    block_size_key: str = "block_size"  # config.json's name for it
    algorithm: Algorithm  # of a checkpoint without one and without an adapter
    is_adapted: bool = False  # adapters of the family are published, and change the algorithm
    confidence_threshold: float = 0.9  # of its algorithm, if that has one
    alg: Alg = "origin"  # of Dream's algorithm
    top_k_first: bool  # and top-p of the kept ones; otherwise the other way round
    caps_steps: bool = False  # a block takes at most as many steps as the answer has tokens
    end_ids: tuple[int, ...] = ()  # of a checkpoint whose files name none
    turn_end_ids: tuple[int, ...] = ()  # which its code also writes last, if that is turned on
    origin: str  # source of these values, as shown to users
