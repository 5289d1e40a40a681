"""The released form of the bundled model: bf16 safetensors and a Hugging Face style config.

Reads and writes folders for training and evaluation; serving loads them with its own code.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from effuse.training.data import BLOCK
from effuse.training.denoiser import Denoiser, DenoiserConfig
from effuse.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, PROMPT_ID, load_tokenizer

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)


def padded_vocabulary(tokenizer: Path) -> int:
    """The tokenizer's vocabulary size rounded up to a multiple of 16; the rest is never used."""
    return -(-load_tokenizer(tokenizer).get_vocab_size() // 16) * 16


def write_release(
    folder: Path, weights: dict[str, Tensor], config: DenoiserConfig, tokenizer: Path
) -> None:
    """Write model.safetensors (bf16), config.json, generation_config.json and tokenizer.json to
    `folder`."""
    halves = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_described(config), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")
    # The layers are SDAR's, but training was D2F's.
    (folder / "generation_config.json").write_text('{"algorithm": "d2f"}\n')
    if tokenizer != folder / "tokenizer.json":
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def read_release(folder: Path, device: torch.device) -> tuple[Denoiser, Tokenizer]:
    """The model in fp32 and its tokenizer, from the output of `write_release`."""
    described = json.loads((folder / "config.json").read_text())
    model = Denoiser(DenoiserConfig(**{size: described[size] for size in _SIZES}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device).eval(), load_tokenizer(folder / "tokenizer.json")


def adopt(folder: Path, model: Denoiser, tokenizer: Path) -> None:
    """Start `model` from released weights; embedding rows follow their words to the new ids.

    Words that the release lacks keep their fresh rows. Sizes must agree.
    """
    released, known = read_release(folder, torch.device("cpu"))
    source, target = released.state_dict(), model.state_dict()
    words = load_tokenizer(tokenizer)
    old = source.pop("model.embed_tokens.weight")
    for word, index in words.get_vocab().items():
        row = known.token_to_id(word)
        if row is not None:
            target["model.embed_tokens.weight"][index].copy_(old[row])
    for name, value in source.items():
        target[name].copy_(value)


def _described(config: DenoiserConfig) -> dict[str, object]:
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": PROMPT_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "mask_token_id": MASK_ID,
        "block_size": BLOCK,
    }
