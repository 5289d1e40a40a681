"""config.json of the three releases, and refusals with the key's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import EOS_TOKEN_ID, Architecture, write_tiny_checkpoint

from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError

# The published configurations, shortened to the keys that matter and some that must not.
SDAR_8B = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DREAM_7B = {
    "architectures": ["DreamModel"],
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLADA_8B = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["LLaDAModelLM"],
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
RELEASES = {"sdar": SDAR_8B, "dream": DREAM_7B, "llada": LLADA_8B}


def write(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_sdar_release(tmp_path: Path) -> None:
    write(tmp_path, SDAR_8B)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    config = ModelConfig.from_dir(tmp_path)
    assert config.qk_norm and not config.qkv_bias and not config.shift_logits
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (36, 32, 8)
    assert (config.block_size, config.mask_token_id) == (4, 151669)
    assert config.eos_token_ids == (151643, 151645)
    assert config.prompt_attention == "causal_blocks" and config.block_origin(13) == 0


def test_dream_release(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path, DREAM_7B))
    assert config.qkv_bias and config.shift_logits and not config.qk_norm
    assert (config.head_dim, config.block_size, config.mask_token_id) == (128, 32, 151666)
    assert config.prompt_attention == "bidirectional" and config.block_origin(13) == 13


def test_llada_release(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write(tmp_path, LLADA_8B))
    assert not (config.qkv_bias or config.qk_norm or config.shift_logits)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (4096, 12288, 128)
    assert (config.rope_theta, config.rms_norm_eps, config.vocab_size) == (5e5, 1e-5, 126464)
    assert config.block_origin(7) == 7


def test_block_size_can_be_chosen(tmp_path: Path) -> None:
    assert ModelConfig.from_dir(write(tmp_path, DREAM_7B), block_size=16).block_size == 16
    with pytest.raises(CheckpointError, match="block_size must be at least 1, got 0"):
        ModelConfig.from_dir(tmp_path, block_size=0)


def test_newer_spelling_of_the_rotary_base(tmp_path: Path) -> None:
    config = {key: value for key, value in SDAR_8B.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert ModelConfig.from_dir(write(tmp_path, config)).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("release", "key", "value", "message"),
    [
        ("sdar", "model_type", "llama", "serve 'llama' (SDARForCausalLM): accepted: sdar"),
        ("sdar", "attention_bias", True, "true is not supported; accepted: false"),
        ("sdar", "num_experts", 128, "128 is not supported"),
        ("sdar", "hidden_act", "gelu", 'accepted: "silu"'),
        ("sdar", "use_sliding_window", True, "true is not supported"),
        ("sdar", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "'yarn' is not supported"),
        ("sdar", "rope_scaling", "linear", "expected an object"),
        ("sdar", "layer_types", ["full_attention", "sliding_attention"], "only 'full_attention'"),
        ("sdar", "quantization_config", {"bits": 4}, "accepted: missing"),
        ("sdar", "num_hidden_layers", 0, "expected an integer of at least 1, found 0"),
        ("sdar", "num_hidden_layers", True, "found True"),
        ("sdar", "block_size", 2**31, "expected an integer of at least 1, at most 2147483647"),
        ("sdar", "layer_types", [["full_attention"]], "only 'full_attention'"),
        ("sdar", "rms_norm_eps", float("inf"), "expected a number above 0, found inf"),
        ("sdar", "rope_theta", 10**400, "expected a number above 0, found 1000"),
        ("sdar", "rms_norm_eps", "tiny", "expected a number above 0, found 'tiny'"),
        ("sdar", "tie_word_embeddings", "yes", "expected true or false"),
        ("sdar", "eos_token_id", ["a"], "expected a token id or a list of them"),
        ("sdar", "eos_token_id", True, "expected a token id or a list of them, found True"),
        ("sdar", "eos_token_id", [7, False], "expected a token id or a list of them"),
        ("dream", "attention_bias", False, "accepted: true"),
        ("dream", "head_dim", 64, "accepted: missing or 128"),
        ("dream", "use_mrope", True, "true is not supported, and may change"),
        ("llada", "alibi", True, "true is not supported, and may change"),
        ("llada", "block_type", "sequential", 'accepted: "llama"'),
        ("llada", "include_qkv_bias", True, "accepted: false"),
        ("llada", "layer_norm_type", "default", 'accepted: "rms"'),
        ("llada", "rope", False, "accepted: true"),
        ("llada", "multi_query_attention", True, "true is not supported, and may change"),
    ],
)
def test_unsupported_values_name_the_key(
    tmp_path: Path, release: str, key: str, value: object, message: str
) -> None:
    write(tmp_path, RELEASES[release] | {key: value})
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert f"config.json: {key}: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("release", "key"),
    [
        ("sdar", "model_type"),
        ("sdar", "rope_theta"),
        ("sdar", "tie_word_embeddings"),
        ("sdar", "eos_token_id"),
        ("llada", "eos_token_id"),
        ("dream", "mask_token_id"),
        ("dream", "num_key_value_heads"),
        ("llada", "mlp_hidden_size"),
        ("llada", "weight_tying"),
        ("llada", "max_sequence_length"),
    ],
)
def test_missing_keys_are_named(tmp_path: Path, release: str, key: str) -> None:
    write(tmp_path, {k: v for k, v in RELEASES[release].items() if k != key})
    with pytest.raises(CheckpointError, match=f"{key}: missing; expected "):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 152064}, r"mask_token_id 152064 lies outside 0\.\.152063"),
        ({"eos_token_id": [5, -1]}, "eos_token_id -1 lies outside"),
        ({"eos_token_id": 151666}, "mask_token_id 151666 is also an eos_token_id"),
        ({"num_key_value_heads": 5}, "28 attention heads cannot share 5 KV heads"),
        ({"hidden_size": 28 * 3}, "head_dim 3 is odd"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dir(write(tmp_path, DREAM_7B | changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_files_that_hold_no_object(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dir(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: Is a directory"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"safetensors/config\.json: Not a directory"):
        ModelConfig.from_dir(tmp_path / "model.safetensors")


def test_a_llama_that_names_no_class_is_nobodys(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama"})
    with pytest.raises(CheckpointError, match="does not serve 'llama'"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "classes", "missing"),
    [
        ("rnd1", ["RND1LM"], "it would need layers with a mixture of experts"),
        ("llada", ["LLaDAOtherModelLM"], "llada (LLaDAMoEModelLM, LLaDAMoEModel)"),
        ("diffusion_gemma", ["DiffusionGemmaForBlockDiffusion"], "a canvas of random tokens"),
        ("llama", ["LlamaForCausalLM"], "accepted: sdar (SDARForCausalLM), sdar_moe"),
        ("qwen3", ["Qwen3ForCausalLM"], "accepted: sdar (SDARForCausalLM), sdar_moe"),
    ],
)
def test_what_is_not_served_is_named_before_all_else(
    tmp_path: Path, model_type: str, classes: list[str], missing: str
) -> None:
    write(tmp_path, {"model_type": model_type, "architectures": classes, "eos_token_id": "none"})
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dir(tmp_path)
    said = str(caught.value)
    assert (
        f"model_type: effuse does not serve {model_type!r} ({classes[0]}): " in said
        and missing in said
    )
    assert "\n" not in said


def test_a_family_is_known_without_its_class(tmp_path: Path) -> None:
    write(tmp_path, {key: value for key, value in SDAR_8B.items() if key != "architectures"})
    assert ModelConfig.from_dir(tmp_path).architecture == "sdar"


def test_sdar_heads_are_128_wide_where_nothing_is_stated(tmp_path: Path) -> None:
    config = {key: value for key, value in SDAR_8B.items() if key != "head_dim"}
    read = ModelConfig.from_dir(write(tmp_path, config | {"hidden_size": 2560}))
    assert read.head_dim == 128  # and not 2560 / 32


END = {"content": "<end>", "special": True}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"generation_config.json": {"eos_token_id": 7}}, (7,)),
        (
            {"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"9": END}}},
            (9,),
        ),
        (
            {
                "generation_config.json": {},
                "tokenizer_config.json": {"eos_token": END},
                "tokenizer.json": {"added_tokens": [{"id": 3, "content": "<a>"}, {"id": 4} | END]},
            },
            (4,),
        ),
    ],
)
def test_end_ids_of_other_files(
    tmp_path: Path, files: dict[str, object], ids: tuple[int, ...]
) -> None:
    write(tmp_path, {key: value for key, value in SDAR_8B.items() if key != "eos_token_id"})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == ids


def test_an_end_without_an_id_is_named(tmp_path: Path) -> None:
    write(tmp_path, {key: value for key, value in SDAR_8B.items() if key != "eos_token_id"})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: eos_token: '<end>' has no"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("architecture", ["sdar", "dream", "llada"])
def test_tiny_checkpoints_are_read(tmp_path: Path, architecture: Architecture) -> None:
    config = ModelConfig.from_dir(write_tiny_checkpoint(tmp_path, architecture, block_size=8))
    assert (config.architecture, config.block_size) == (architecture, 8)
    assert config.eos_token_ids == (EOS_TOKEN_ID,)
