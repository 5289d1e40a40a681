"""A checkpoint directory of random weights in a published shape, and a tokenizer of made-up words.

A fleet of processes loads it like a real one: config.json, sharded safetensors and tokenizer.json.
Every id below the vocabulary's size except those of mask and end is a word, so that a prompt of n
words is a prompt of n ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from effuse.models.checkpoint import INDEX_FILE
from effuse.models.config import ModelConfig
from effuse.models.tensors import tensor_shapes

_TENSORS_A_FILE = 64
_RELEASES = {"dream": ("DreamModel", "Dream"), "sdar": ("SDARForCausalLM", "sdar")}


def write_checkpoint(
    path: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Path:
    """Writes the directory and returns it; weights are drawn on `device` as in `gpu_models`.

    Raises ValueError for an architecture other than Dream's and SDAR's.
    """
    if config.architecture not in _RELEASES:
        found = repr(config.architecture)
        raise ValueError(f"expected the shape of a Dream or SDAR model, got {found}")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_released(config, dtype), indent=1))
    if config.architecture == "dream":
        (path / "generation_config.json").write_text('{"algorithm": "d2f"}')
    word_tokenizer(config).save(str(path / "tokenizer.json"))
    places: dict[str, str] = {}
    tensors = random_tensors(config, device, dtype)
    groups = iter(lambda: tuple(islice(tensors, _TENSORS_A_FILE)), ())
    for number, group in enumerate(groups):
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in group}, path / file)
        places |= dict.fromkeys((name for name, _ in group), file)
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def word(token_id: int) -> str:
    """The text of this token."""
    return f"w{token_id}"


def random_tensors(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device).manual_seed(1)
    head = f"{config.family.layout.head}.weight"
    for name, shape in tensor_shapes(config).items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if not name.endswith("norm.weight"):
            tensor.normal_(0, 0.02, generator=generator)
        if name == head:
            tensor[[config.mask_token_id, *config.eos_token_ids]] = 0
        yield name, tensor


def word_tokenizer(config: ModelConfig) -> Tokenizer:
    special = {config.mask_token_id: "<mask>"}
    special |= {eos: f"<end {eos}>" for eos in config.eos_token_ids}
    vocabulary = {special.get(i, word(i)): i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    return tokenizer


def _released(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """config.json as its release writes it."""
    class_name, model_type = _RELEASES[config.architecture]
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "block_size": config.block_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
