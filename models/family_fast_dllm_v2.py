"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5's layers, the prompt in blocks."""

from typing import Final

from effuse.models.family import Family, Form

FAST_DLLM_V2: Final = Family(
    architecture="fast_dllm_v2",
    model_types=("fast_dllm_qwen",),
    classes=("Fast_dLLM_QwenForCausalLM",),
    # The mask's id is its own code's.
    form=Form(defaults={"mask_token_id": 151665}, qkv_bias=True),
    is_block_causal=True,
    shift_logits=True,
    block_size=32,
    block_size_key="bd_size",
    algorithm="fast_dllm_v2",
    top_k_first=False,
    end_ids=(151645,),
    origin="Fast-dLLM v2's run_chatbot.py",
)
