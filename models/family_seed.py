"""Stable-DiffCoder and iLLaDA (arXiv 2606.25331): Llama's layers, keys and names, and the mask of
the tokenizer that both share with Seed-Coder. The latter has LLaDA's canvas.
"""

from typing import Final

from effuse.models.family import Family, Form

_FORM: Final = Form(defaults={"mask_token_id": 5})
STABLE_DIFFCODER: Final = Family(
    architecture="stable_diffcoder",
    model_types=("llama",),
    classes=("StableDiffcoderForCausalLM",),
    has_own_type=False,
    form=_FORM,
    is_block_causal=True,
    block_size=4,
    algorithm="block_diffusion",
    confidence_threshold=0.95,
    top_k_first=True,
    end_ids=(2,),
    origin="Stable-DiffCoder's generate_block",
)
ILLADA: Final = Family(
    architecture="illada",
    model_types=("illada",),
    classes=("ILLaDAForCausalLM", "ILLaDAModel"),
    form=_FORM,
    block_size=32,
    algorithm="llada",
    top_k_first=False,
    origin="LLaDA's generate.py",
)
