"""DreamReasoner (arXiv 2606.19257): Qwen3's layers and SDAR's blocks with Dream's name."""

from typing import Final

from effuse.models.family import Family, Form

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
