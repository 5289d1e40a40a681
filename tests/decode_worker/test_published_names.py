"""Families that are another one's layers and loop under names of their own: the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tensors, write_tiny_checkpoint
from decoding.engines import Rig, make_request
from decoding.published import EOS, EOT, published_runs, write_published
from safetensors.torch import load_file
from sdar_answers import sdar_runs, write_sdar_checkpoint

from effuse.config.decoding import Sampling
from effuse.models.config import ModelConfig
from effuse.models.weights import load_model

LLAMA_NAMES = {
    "model.transformer.": "model.",
    "wte.": "embed_tokens.",
    "blocks.": "layers.",
    "ln_f.": "norm.",
    "attn_norm.": "input_layernorm.",
    "ff_norm.": "post_attention_layernorm.",
    "attn_out.": "self_attn.o_proj.",
    "ff_proj.": "mlp.gate_proj.",
    "up_proj.": "mlp.up_proj.",
}


def restate(path: Path, **changes: Any) -> None:
    """The same config.json, except for some keys."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_dream_reasoner_decodes_as_sdar(tmp_path: Path, block_size: int) -> None:
    path = write_sdar_checkpoint(tmp_path / "m", block_size)
    restate(path, model_type="Dream", architectures=["DreamForCausalLM"])
    model, runs = load_model(path), sdar_runs(block_size)
    assert model.config.architecture == "dream_reasoner"
    rig = Rig(model)
    answers = [
        rig.start(
            make_request(
                str(number),
                run.prompt,
                max_tokens=run.max_tokens,
                stop_token_ids=run.stops,
                sampling=Sampling(**run.sampling),
                algorithm="block_diffusion",
                **run.settings,
            )
        )
        for number, run in enumerate(runs)
    ]
    rig.run()
    assert [list(answer.token_ids) for answer in answers] == [run.tokens for run in runs]


@pytest.mark.parametrize("block_size", [4, 8])
def test_stable_diffcoder_decodes_as_its_authors_have_it(tmp_path: Path, block_size: int) -> None:
    """Forty runs of its `generate_block` around transformers' Llama, greedy, on whole blocks,
    because it cuts a last block short; with the mask id's logit at -1e30.
    """
    path = write_tiny_checkpoint(
        tmp_path / "m", "stable_diffcoder", 5, head_scale=6.0, gain=0.8, block_size=block_size
    )
    runs = [run for run in published_runs("stable_diffcoder") if run.block_size == block_size]
    assert len(runs) > 8 and {"low_confidence_static"} < {
        run.settings.get("remasking", "") for run in runs
    }
    rig = Rig(load_model(path))
    answers = [rig.start(run.request(str(number))) for number, run in enumerate(runs)]
    rig.run()
    for run, answer in zip(runs, answers, strict=True):
        assert list(answer.token_ids) == run.tokens, run


def test_illada_decodes_as_llada(tmp_path: Path) -> None:
    runs = [run for run in published_runs("llada") if run.checkpoint == 1][:24]
    rig = Rig(load_model(write_illada(tmp_path)))
    assert rig.model.config.architecture == "illada"
    answers = [rig.start(run.request(str(number))) for number, run in enumerate(runs)]
    rig.run()
    for run, answer in zip(runs, answers, strict=True):
        assert list(answer.token_ids) == run.tokens, run


def write_illada(home: Path) -> Path:
    """LLaDA's first published checkpoint, its tensors and keys by iLLaDA's names."""
    llada, path = write_published(home / "llada", "llada", 1, block_size=8), home / "illada"
    config = ModelConfig.from_dir(llada)
    path.mkdir()
    tensors = load_file(llada / "model.safetensors")
    write_tensors(path, {llama_name(name): tensor for name, tensor in tensors.items()})
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["ILLaDAForCausalLM"],
                "attention_bias": False,
                "block_size": 8,
                "eos_token_id": [EOS, EOT],
                "head_dim": config.head_dim,
                "hidden_act": "silu",
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "mask_token_id": config.mask_token_id,
                "max_position_embeddings": config.max_position_embeddings,
                "mlp_bias": False,
                "model_type": "illada",
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_layers,
                "num_key_value_heads": config.num_kv_heads,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_scaling": {"rope_type": "default", "factor": 1.0},
                "rope_theta": config.rope_theta,
                "tie_word_embeddings": config.tie_embeddings,
                "vocab_size": config.vocab_size,
            }
        )
    )
    return path


def llama_name(name: str) -> str:
    """Llama's name of a tensor of LLaDA's."""
    if name == "model.transformer.ff_out.weight":
        return "lm_head.weight"
    name = name.replace(".ff_out.", ".mlp.down_proj.")
    for old, new in LLAMA_NAMES.items():
        name = name.replace(old, new)
    for projection in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{projection}.", f".self_attn.{projection}.")
    return name
