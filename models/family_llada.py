"""LLaDA-8B: an OLMo configuration with Llama's blocks, the prompt in both directions."""

from typing import Final

from effuse.models.family import Family, Form, Layout

LLADA: Final = Family(
    architecture="llada",
    model_types=("llada",),
    classes=("LLaDAModelLM",),
    form=Form(
        only={
            "block_type": ("llama",),
            "layer_norm_type": ("rms",),
            "rope": (True,),
            "block_group_size": (None, 1),
            "clip_qkv": (None,),
            "scale_logits": (None, False),
        },
        names={
            "hidden_act": "activation_type",
            "hidden_size": "d_model",
            "intermediate_size": "mlp_hidden_size",
            "max_position_embeddings": "max_sequence_length",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "num_key_value_heads": "n_kv_heads",
            "tie_word_embeddings": "weight_tying",
            "vocab_size": "embedding_size",  # with the padded rows of the head
        },
        has_head_dim=False,
        as_many_kv_heads=True,
    ),
    layout=Layout(
        embedding="model.transformer.wte",
        norm="model.transformer.ln_f",
        head="model.transformer.ff_out",
        layers="model.transformer.blocks",
        attn_norm="attn_norm",
        qkv=("q_proj", "k_proj", "v_proj"),
        q_norm="q_norm",
        k_norm="k_norm",
        attn_out="attn_out",
        mlp_norm="ff_norm",
        mlp="",
        gate="ff_proj",
        down="ff_out",
    ),
    # generate.py and chat.py of github.com/ML-GSAI/LLaDA; adapters: arXiv 2508.09192
    block_size=32,
    algorithm="llada",
    is_adapted=True,
    top_k_first=False,
    turn_end_ids=(126348,),  # <|eot_id|>, which none of its files names
    origin="LLaDA's generate.py",
)
