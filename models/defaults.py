"""A checkpoint's defaults for settings that a request leaves out, and the source of each value.

A flag comes first, then generation_config.json, then the family's own code (`families.py`).
Otherwise effuse's own default is used, which is greedy. Reads files of a few hundred bytes and no
weights.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from effuse.config.decoding import (
    ADAPTED,
    ALGORITHMS,
    MAX_TOKENS,
    SAMPLING,
    SETTINGS,
    Algorithm,
    Bounds,
    DecodeSettings,
    DecodingDefaults,
    Sampling,
    plain_settings,
)
from effuse.config.flags import flag_of
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError, ConfigKeys
from effuse.models.end_ids import GENERATION_CONFIG, stated_end_ids

_SAMPLING: Final = {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")}
_UNUSED: Final = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Settings of which effuse does not take generation_config.json's value."""


def refuse_unserved(
    directory: Path,
    block_size: int | None = None,
    algorithm: Algorithm | None = None,
    *,
    adapted: bool = False,
    limits: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises CheckpointError for a checkpoint that cannot be served, or not with the requested
    `algorithm`, or not within a worker's `limits`. It only reads JSON files, in milliseconds and
    without torch, so that a parent of processes can check first.

    limits: values of a worker's settings by their names; others than limits are ignored.
    """
    config = ModelConfig.from_dir(directory, block_size=block_size)
    defaults = read_defaults(directory, config, algorithm=algorithm, adapted=adapted)
    size, most = config.block_size, config.max_position_embeddings
    if (length := limits.get("max_model_len") or most) > most:
        raise CheckpointError(
            f"--max-model-len: expected at most the model's {most} positions, got {length}"
        )
    least, why = {"max_num_batched_tokens": size}, f"a block of {size}"
    if "max_window" in limits:  # without them requests with only the model's defaults are refused
        window, num_blocks = defaults.settings.most_active, -(-length // size)
        rows = max(2, min(window + 1, num_blocks)) * size
        least = {"max_window": window, "max_num_batched_tokens": rows}
        least["max_stop_ids"] = len(config.eos_token_ids)
        why = "the model's default for requests without a value"
    for name, count in least.items():
        if (found := limits.get(name, count)) < count:
            raise CheckpointError(f"{flag_of(name)}: expected at least {count}, {why}, got {found}")


def read_defaults(
    directory: Path,
    config: ModelConfig,
    *,
    algorithm: Algorithm | None = None,
    adapted: bool = False,
) -> DecodingDefaults:
    """The defaults of a checkpoint with this `config`.

    `algorithm` is the requested one, and `adapted` is true if an adapter is merged into the
    weights. Raises CheckpointError for an unusable value of generation_config.json, naming its key,
    and for an algorithm that cannot decode the model.
    """
    path = directory / GENERATION_CONFIG
    keys = ConfigKeys.read(path) if path.exists() else ConfigKeys(path, {})
    sources: dict[str, str] = {}
    family = config.family
    stated = ConfigKeys.read(directory / "config.json")
    if stated.values.get(family.block_size_key) is None and config.block_size == family.block_size:
        sources["block_size"] = f"{family.origin}, because config.json has none"
    sources["eos_token_ids"] = " and ".join(stated_end_ids(directory, stated)) or family.origin
    settings = _settings(keys, config, algorithm, adapted, sources)
    sampling, max_tokens = _sampling(keys), _number(keys, "max_new_tokens", MAX_TOKENS)
    limits = {} if max_tokens is None else {"max_tokens": int(max_tokens)}
    sources |= dict.fromkeys([*sampling, *limits], GENERATION_CONFIG)
    own = Sampling()  # a file may state what effuse does anyway
    unused = [one for one in _UNUSED if keys.values.get(one) not in (None, getattr(own, one))]
    sources |= dict.fromkeys(unused, f"effuse, not {GENERATION_CONFIG}")
    return DecodingDefaults(
        settings=settings,
        sampling=Sampling(**sampling),
        sources=tuple(sources.items()),
        **limits,
    )


def _settings(
    keys: ConfigKeys,
    config: ModelConfig,
    asked: Algorithm | None,
    adapted: bool,
    sources: dict[str, str],
) -> DecodeSettings:
    """The algorithm and its settings; adds their origin to `sources`."""
    family = config.family
    own, source = family.algorithm, family.origin
    if asked is not None:
        own, source = asked, "--default-algorithm"
        if why := config.unfit(own):
            raise CheckpointError(f"{source}: {why}")
    elif keys.values.get("algorithm") is not None:
        own, source = _algorithm(keys), GENERATION_CONFIG
        if why := config.unfit(own):
            raise keys.error("algorithm", why)
    elif adapted:
        own, source = ADAPTED if family.is_adapted else own, "the adapter"
    sources["algorithm"] = source
    settings = plain_settings(own, config.block_size)
    if own != family.algorithm:
        return settings
    authored = ALGORITHMS[own].authored
    stated = {"confidence_threshold": family.confidence_threshold, "alg": family.alg}
    knobs: dict[str, Any] = {name: stated[name] for name in authored if name in stated}
    sources |= dict.fromkeys(authored, family.origin)
    editing = _number(keys, "editing_threshold", SETTINGS["editing_threshold"])  # effuse's own key
    if own == "block_diffusion" and editing is not None:
        knobs["editing_threshold"] = editing
        sources["editing_threshold"] = GENERATION_CONFIG
    return msgspec.structs.replace(settings, **knobs)


def _algorithm(keys: ConfigKeys) -> Algorithm:
    """effuse's own key: the algorithm for which a checkpoint was tuned."""
    stated = keys.text("algorithm")
    for known in ALGORITHMS:
        if stated == known:
            return known
    accepted = ", ".join(ALGORITHMS)
    raise keys.error("algorithm", f"expected one of {accepted}, found {stated!r}")


def _sampling(keys: ConfigKeys) -> dict[str, Any]:
    """The sampling settings of the file; if the file turns sampling off, decoding is greedy."""
    if keys.values.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: _number(keys, name, bounds) for name, bounds in _SAMPLING.items()}
    stated = {name: value for name, value in found.items() if value is not None}
    if keys.values.get("do_sample") is True:
        stated.setdefault("temperature", 1.0)  # as transformers reads it
    return stated


def _number(keys: ConfigKeys, key: str, bounds: Bounds) -> float | None:
    value = keys.values.get(key)
    if value is None:
        return None
    kinds = int if bounds.is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or value not in bounds:
        raise keys.error(key, f"expected {bounds.form}, found {value!r}")
    return value
