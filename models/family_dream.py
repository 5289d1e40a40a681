"""Dream: Qwen2's layers, the prompt in both directions, logits that predict the next position.
DreamReasoner (arXiv 2606.19257): Qwen3's layers and SDAR's blocks with Dream's name.
"""

from typing import Final

from effuse.models.family import Family, Form

DREAM: Final = Family(
    architecture="dream",
    model_types=("dream",),
    classes=("DreamModel",),
    form=Form(has_head_dim=False, qkv_bias=True),
    shift_logits=True,
    # The README of github.com/HKUNLP/Dream; adapters: arXiv 2508.09192
    block_size=32,
    algorithm="dream",
    is_adapted=True,
    alg="entropy",
    top_k_first=False,
    origin="Dream's README",
)

DREAM_REASONER: Final = Family(
    architecture="dream_reasoner",
    model_types=("dream",),
    classes=("DreamForCausalLM",),
    has_own_type=False,
    form=Form(qk_norm=True),
    is_block_causal=True,
    block_size=32,
    algorithm="block_diffusion",
    top_k_first=True,
    origin="DreamReasoner's generation_utils.py",
)
