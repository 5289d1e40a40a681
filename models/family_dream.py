"""Dream: Qwen2's layers, the prompt in both directions, logits that predict the next position."""

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
