"""The families of published checkpoints: the served ones, and why the others are not.

config.json's names identify a family, and are read first. This file has only tables: each served
family has a reader in `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from effuse.config.decoding import Alg, Algorithm
from effuse.models.config_keys import ConfigKeys

Architecture = Literal[
    "sdar",
    "dream",
    "llada",
    "sdar_moe",
    "llada2_moe",
    "llada_moe",
    "fast_dllm_v2",
    "dream_reasoner",
    "stable_diffcoder",
    "illada",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A served family, with its authors' defaults for values that no file states."""

    architecture: Architecture
    model_types: tuple[str, ...]  # as config.json spells them, in lower case
    classes: tuple[str, ...]  # possible names in config.json's `architectures`
    block_size: int  # of a checkpoint that states none
    block_size_key: str = "block_size"  # config.json's name for it
    algorithm: Algorithm  # of a checkpoint without one and without an adapter
    is_adapted: bool = False  # adapters of the family are published, and change the algorithm
    confidence_threshold: float = 0.9  # of its algorithm, if that has one
    alg: Alg = "origin"  # of Dream's algorithm
    top_k_first: bool  # and top-p of the kept ones; otherwise the other way round
    caps_steps: bool = False  # a block takes at most as many steps as the answer has tokens
    has_experts: bool = False
    has_own_type: bool = True  # otherwise a config.json without a class means another model
    end_ids: tuple[int, ...] = ()  # of a checkpoint whose files name none
    turn_end_ids: tuple[int, ...] = ()  # which its code also writes last, if that is turned on
    origin: str  # source of these values, as shown to users


# Sources: generate.py of github.com/JetAstra/SDAR; the README of github.com/HKUNLP/Dream;
# generate.py and chat.py of github.com/ML-GSAI/LLaDA. Adapters of the last two: arXiv 2508.09192.
FAMILIES: Final = (
    Family(
        architecture="sdar",
        model_types=("sdar",),
        classes=("SDARForCausalLM",),
        block_size=4,
        algorithm="block_diffusion",
        confidence_threshold=0.85,
        top_k_first=True,
        origin="SDAR's generate.py",
    ),
    Family(
        architecture="sdar_moe",
        has_experts=True,
        model_types=("sdar_moe",),
        classes=("SDARMoeForCausalLM",),
        block_size=4,
        algorithm="block_diffusion",
        confidence_threshold=0.85,
        top_k_first=True,
        origin="SDAR's generate.py",
    ),
    Family(
        architecture="llada2_moe",
        has_experts=True,
        model_types=("llada2_moe",),
        classes=("LLaDA2MoeModelLM",),
        block_size=32,
        algorithm="block_diffusion",
        confidence_threshold=0.95,
        top_k_first=True,
        caps_steps=True,
        end_ids=(156892,),
        origin="LLaDA2's generate",
    ),
    Family(
        architecture="dream",
        model_types=("dream",),
        classes=("DreamModel",),
        block_size=32,
        algorithm="dream",
        is_adapted=True,
        alg="entropy",
        top_k_first=False,
        origin="Dream's README",
    ),
    Family(
        architecture="llada",
        model_types=("llada",),
        classes=("LLaDAModelLM",),
        block_size=32,
        algorithm="llada",
        is_adapted=True,
        top_k_first=False,
        turn_end_ids=(126348,),  # <|eot_id|>, which none of its files names
        origin="LLaDA's generate.py",
    ),
    Family(
        architecture="llada_moe",
        has_experts=True,
        model_types=("llada", "lladamoe"),
        classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        block_size=32,
        algorithm="llada",
        is_adapted=True,
        top_k_first=False,
        end_ids=(156892,),
        origin="LLaDA's generate.py",
    ),
    Family(
        architecture="fast_dllm_v2",
        model_types=("fast_dllm_qwen",),
        classes=("Fast_dLLM_QwenForCausalLM",),
        block_size=32,
        block_size_key="bd_size",
        algorithm="fast_dllm_v2",
        top_k_first=False,
        end_ids=(151645,),
        origin="Fast-dLLM v2's run_chatbot.py",
    ),
    Family(
        architecture="dream_reasoner",
        model_types=("dream",),
        classes=("DreamForCausalLM",),
        has_own_type=False,
        block_size=32,
        algorithm="block_diffusion",
        top_k_first=True,
        origin="DreamReasoner's generation_utils.py",
    ),
    Family(
        architecture="stable_diffcoder",
        model_types=("llama",),
        classes=("StableDiffcoderForCausalLM",),
        has_own_type=False,
        block_size=4,
        algorithm="block_diffusion",
        confidence_threshold=0.95,
        top_k_first=True,
        end_ids=(2,),
        origin="Stable-DiffCoder's generate_block",
    ),
    Family(
        architecture="illada",
        model_types=("illada",),
        classes=("ILLaDAForCausalLM", "ILLaDAModel"),
        block_size=32,
        algorithm="llada",
        top_k_first=False,
        origin="LLaDA's generate.py",
    ),
)

_EXPERTS: Final = "layers with a mixture of experts"
_MANY_PARTS: Final = "an input of images beside text"
MISSING: Final[Mapping[str, str]] = {
    "RND1LM": _EXPERTS,
    "DiffusionGemmaForBlockDiffusion": (
        f"a canvas of random tokens that is denoised by renoising, and {_EXPERTS}"
    ),
    "NemotronLabsDiffusionModel": "Ministral's layers, which scale queries by their position",
    "WeDLMForCausalLM": "causal attention over reordered positions",
    "MMadaModelLM": _MANY_PARTS,
}
"""Missing features of known families that are not served, by the class in config.json."""


def family_of(architecture: Architecture) -> Family:
    """The family of a config.json that was already read."""
    return next(family for family in FAMILIES if family.architecture == architecture)


def find_family(keys: ConfigKeys) -> Family:
    """The family in a config.json. Raises CheckpointError in one line that names the model and the
    missing feature; only `model_type` and `architectures` have been read then.
    """
    model_type = keys.text("model_type")
    classes = keys.strings("architectures", required=False)
    has_experts = bool(keys.values.get("num_experts"))
    for family in FAMILIES:
        if model_type.lower() not in family.model_types:
            continue
        if not set(classes).isdisjoint(family.classes):
            return family
        if not classes and family.has_own_type and family.has_experts == has_experts:
            return family
    missing = next((MISSING[name] for name in classes if name in MISSING), None)
    called = f"{model_type!r} ({', '.join(classes)})" if classes else repr(model_type)
    served = ", ".join(f"{one.model_types[0]} ({', '.join(one.classes)})" for one in FAMILIES)
    why = f"it would need {missing}" if missing else f"accepted: {served}"
    raise keys.error("model_type", f"effuse does not serve {called}: {why}")
