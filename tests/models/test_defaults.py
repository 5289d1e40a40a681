"""A checkpoint's defaults for requests, and that each value names its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import Architecture, write_tiny_checkpoint

import effuse.models
from effuse.config.decoding import Algorithm, DecodingDefaults
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError
from effuse.models.defaults import read_defaults, refuse_unserved

# As published with SDAR-8B-Chat.
SDAR_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [7, 8],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
# Of a decode worker; a prefill worker has only the first.
DECODES = {"max_num_batched_tokens": 2048, "max_window": 8, "max_stop_ids": 16}
GENERATION, SDAR = "generation_config.json", "SDAR's generate.py"


def defaults(
    path: Path,
    architecture: Architecture = "sdar",
    generation: object = None,
    *,
    algorithm: Algorithm | None = None,
    adapted: bool = False,
) -> DecodingDefaults:
    write_tiny_checkpoint(path, architecture, block_size=8, is_tuned=False)
    if generation is not None:
        (path / GENERATION).write_text(json.dumps(generation))
    config = ModelConfig.from_dir(path)
    return read_defaults(path, config, algorithm=algorithm, adapted=adapted)


def test_sdar_decodes_as_its_authors_do(tmp_path: Path) -> None:
    found = defaults(tmp_path, "sdar", SDAR_GENERATION)
    settings, sampling = found.settings, found.sampling
    assert (settings.algorithm, settings.denoising_steps) == ("block_diffusion", 8)
    assert settings.remasking == "low_confidence_dynamic"
    assert settings.confidence_threshold == pytest.approx(0.85)
    assert sampling.temperature == pytest.approx(0.6) and sampling.top_p == pytest.approx(0.95)
    assert (sampling.top_k, sampling.seed, found.max_tokens) == (20, 0, 256)
    assert dict(found.sources) == {
        **dict.fromkeys(("algorithm", "confidence_threshold", "denoising_steps"), SDAR),
        **dict.fromkeys(("temperature", "top_p", "top_k"), GENERATION),
        "eos_token_ids": f"config.json and {GENERATION}",
    }


def test_dream_decodes_as_its_authors_do(tmp_path: Path) -> None:
    found = defaults(tmp_path, "dream")
    settings = found.settings
    assert (settings.algorithm, settings.alg, settings.steps) == ("dream", "entropy", 0)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.top_k) == (0, 1, 0)
    assert dict(found.sources) == {
        **dict.fromkeys(("algorithm", "alg"), "Dream's README"),
        "eos_token_ids": "config.json",
    }


def test_llada_decodes_as_its_authors_do(tmp_path: Path) -> None:
    found = defaults(tmp_path, "llada")
    settings = found.settings
    assert (settings.algorithm, settings.block_length, settings.steps) == ("llada", 8, 0)
    assert (settings.remasking, settings.cfg_scale) == ("low_confidence", 0)
    knobs = {"algorithm", "block_length", "remasking", "eos_token_ids"}
    assert set(dict(found.sources)) == knobs


@pytest.mark.parametrize("architecture", ["dream", "llada"])
def test_what_is_adapted_decodes_with_d2f(tmp_path: Path, architecture: Architecture) -> None:
    found = defaults(tmp_path, architecture, adapted=True)
    assert (found.settings.algorithm, found.settings.window) == ("d2f", 4)
    assert found.settings.confidence_threshold == pytest.approx(0.9)
    assert dict(found.sources)["algorithm"] == "the adapter"


def test_the_bundled_model_says_that_it_is_d2fs() -> None:
    path = Path(next(iter(effuse.models.__path__))) / "bundled"
    found = read_defaults(path, ModelConfig.from_dir(path))
    assert found.settings.algorithm == "d2f" and found.sampling.temperature == 0
    assert found.settings.confidence_threshold == pytest.approx(0.9)  # D2F's and not SDAR's
    assert dict(found.sources)["algorithm"] == GENERATION


def test_who_goes_first(tmp_path: Path) -> None:
    stated = {"algorithm": "d2f"}
    asked = defaults(tmp_path, "sdar", stated, algorithm="block_diffusion", adapted=True)
    assert asked.settings.algorithm == "block_diffusion"
    assert dict(asked.sources)["algorithm"] == "--default-algorithm"
    assert dict(asked.sources)["confidence_threshold"] == SDAR
    assert defaults(tmp_path, "sdar", stated).settings.algorithm == "d2f"
    adapted = defaults(tmp_path, "dream", {}, adapted=True)
    assert adapted.settings.algorithm == "d2f"
    assert dict(adapted.sources)["algorithm"] == "the adapter"


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.25}, 0.25),
        ({"temperature": None, "top_p": None, "top_k": None}, 0.0),
    ],
)
def test_sampling_as_the_file_says(
    tmp_path: Path, generation: dict[str, object], temperature: float
) -> None:
    found = defaults(tmp_path, "sdar", generation)
    assert found.sampling.temperature == temperature and found.sampling.top_k == 0


def test_what_the_file_has_and_effuse_does_not_take_is_shown(tmp_path: Path) -> None:
    stated = {"repetition_penalty": 1.3, "min_p": 0.2, "presence_penalty": 0, "top_k": 20}
    found = defaults(tmp_path, "fast_dllm_v2", stated)
    assert (found.sampling.repetition_penalty, found.sampling.min_p) == (1, 0)
    names = [name for name, source in found.sources if source == f"effuse, not {GENERATION}"]
    assert names == ["min_p", "repetition_penalty"]


def test_a_checkpoint_may_state_that_its_tokens_are_edited(tmp_path: Path) -> None:
    assert not defaults(tmp_path, "sdar").settings.edits_tokens
    found = defaults(tmp_path, "sdar", {"editing_threshold": 0.5})
    assert found.settings.edits_tokens and found.settings.editing_threshold == 0.5
    assert dict(found.sources)["editing_threshold"] == GENERATION
    assert not found.settings_of("d2f", 8).edits_tokens


def test_the_length_of_an_answer(tmp_path: Path) -> None:
    found = defaults(tmp_path, "dream", {"max_new_tokens": 768})
    assert found.max_tokens == 768 and ("max_tokens", GENERATION) in found.sources


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", -1, "expected a number from 0.001 to 100, or 0 for greedy, found -1"),
        ("top_p", 1.5, "expected a number above 0, at most 1, found 1.5"),
        ("top_p", 1e-46, "expected a number above 0, at most 1, found 1e-46"),
        ("top_k", 2.5, "expected an integer from 0"),
        ("top_k", True, "found True"),
        ("max_new_tokens", 0, "expected an integer from 1"),
        ("editing_threshold", 1.5, "expected a number from 0 to 1, found 1.5"),
        ("algorithm", "ar", "expected one of d2f, block_diffusion"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}: ") as caught:
        defaults(tmp_path, "sdar", {key: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("dream", "dream needs a model whose prompt attends to all of itself, and sdar is not"),
        ("fast_dllm_v2", "fast_dllm_v2 needs a model that was tuned for it, and sdar is not"),
    ],
)
def test_an_algorithm_that_would_have_every_request_refused(
    tmp_path: Path, algorithm: Algorithm, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{GENERATION}: algorithm: {message}"):
        defaults(tmp_path, "sdar", {"algorithm": algorithm})
    with pytest.raises(CheckpointError, match=rf"^--default-algorithm: {message}"):
        defaults(tmp_path, "sdar", {}, algorithm=algorithm)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_batched_tokens": 7}, "^--max-num-batched-tokens: .* 8, a block of 8, got 7"),
        ({"max_model_len": 4097}, "^--max-model-len: expected at most the model's 1024 .* 4097"),
        (DECODES | {"max_window": 0}, "^--max-window: expected at least 1, .* got 0"),
        (DECODES | {"max_stop_ids": 0}, "^--max-stop-ids: expected at least 1, .* got 0"),
        (DECODES | {"max_num_batched_tokens": 15}, "^--max-num-batched-tokens: .* 16, .* got 15"),
    ],
)
def test_limits_in_which_a_model_does_not_fit_are_named(
    tmp_path: Path, limits: dict[str, int], message: str
) -> None:
    write_tiny_checkpoint(tmp_path, "sdar", block_size=8)
    refuse_unserved(tmp_path, limits={"max_num_batched_tokens": 8, "max_model_len": None})
    refuse_unserved(tmp_path, limits=DECODES)
    with pytest.raises(CheckpointError, match=message):
        refuse_unserved(tmp_path, limits=limits)


def test_a_block_size_that_is_not_stated_is_told(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "sdar", block_size=8)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_defaults(tmp_path, ModelConfig.from_dir(tmp_path))
    assert found.settings.denoising_steps == 4
    assert dict(found.sources)["block_size"] == f"{SDAR}, because config.json has none"
    other = read_defaults(tmp_path, ModelConfig.from_dir(tmp_path, block_size=16))
    assert "block_size" not in dict(other.sources)


def test_a_models_values_are_for_its_own_algorithm(tmp_path: Path) -> None:
    found = defaults(tmp_path, "sdar")
    assert found.settings_of("block_diffusion", 8) == found.settings
    other = found.settings_of("d2f", 8)
    assert other.algorithm == "d2f" and other.confidence_threshold == pytest.approx(0.9)
