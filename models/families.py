"""The families of published checkpoints: the served ones, and why the others are not.

config.json's names identify a family, and are read first.
"""

from collections.abc import Mapping
from typing import Final

from effuse.models.config_keys import ConfigKeys
from effuse.models.family import Family
from effuse.models.family_dream import DREAM, DREAM_REASONER
from effuse.models.family_fast_dllm_v2 import FAST_DLLM_V2
from effuse.models.family_ling import LLADA2_MOE, LLADA_MOE
from effuse.models.family_llada import LLADA
from effuse.models.family_sdar import SDAR, SDAR_MOE
from effuse.models.family_seed import ILLADA, STABLE_DIFFCODER

FAMILIES: Final = (
    SDAR,
    SDAR_MOE,
    LLADA2_MOE,
    DREAM,
    LLADA,
    LLADA_MOE,
    FAST_DLLM_V2,
    DREAM_REASONER,
    STABLE_DIFFCODER,
    ILLADA,
)
BY_NAME: Final = {family.architecture: family for family in FAMILIES}

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
        is_like_it = has_experts == (family.form.experts is not None)
        if not classes and family.has_own_type and is_like_it:
            return family
    missing = next((MISSING[name] for name in classes if name in MISSING), None)
    called = f"{model_type!r} ({', '.join(classes)})" if classes else repr(model_type)
    served = ", ".join(f"{one.model_types[0]} ({', '.join(one.classes)})" for one in FAMILIES)
    why = f"it would need {missing}" if missing else f"accepted: {served}"
    raise keys.error("model_type", f"effuse does not serve {called}: {why}")
