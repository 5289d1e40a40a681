"""A LoRA adapter directory in PEFT's published form, and the weight change that it defines.

Plain LoRA on linear layers (Hu et al., arXiv 2106.09685), optionally rank-stabilised. Every other
PEFT option is refused by name, because an ignored option would silently give another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effuse.models.checkpoint import TensorFiles, open_tensors
from effuse.models.config_keys import CheckpointError, ConfigKeys
from effuse.models.tensors import Shape, TensorCut

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Keys that change the merge, and their values for a plain LoRA.
_FIXED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "alora_invocation_tokens": (None,),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "bias": (None, "none"),
    "exclude_modules": (None,),
    "fan_in_fan_out": (None, False),
    # PiSSA, OLoRA and similar methods start from a changed base, which the factors do not contain.
    "init_lora_weights": (None, True, False, "gaussian"),
    "layer_replication": (None,),
    "layers_to_transform": (None,),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (None,),
    "use_dora": (None, False),
    "use_qalora": (None, False),
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank factors of some linear modules: `delta` is scale * B @ A."""

    scale: float
    modules: frozenset[str]
    files: TensorFiles

    def delta(self, module: str, cut: TensorCut | None = None) -> Tensor | None:
        """Change of a module's weight [out, in], or of a cut of it, in fp32; None if there is no
        change."""
        if module not in self.modules:
            return None
        a, b = (self.files.take(name).float() for name in _factor_names(module))
        if cut is not None and cut.dim:
            (a,) = cut.of(a)
        elif cut is not None:
            import torch

            b = torch.cat(cut.of(b))
        return (b @ a).mul_(self.scale)


def open_adapter(
    directory: Path, base: Mapping[str, Shape], device: torch.device | None
) -> Adapter:
    """Open an adapter for a model whose tensors have the names and shapes of `base`. Without a
    device it is checked but not merged.

    Raises CheckpointError that names a target module that the model lacks, a missing, wrongly
    shaped or extra factor, or an unsupported option.
    """
    keys = ConfigKeys.read(directory / CONFIG_FILE)
    for key, accepted in _FIXED.items():
        keys.only(key, accepted)
    rank = keys.integer("r")
    stabilised = keys.flag("use_rslora", default=False)
    scale = keys.number("lora_alpha") / (math.sqrt(rank) if stabilised else rank)
    modules = _targets(keys, base)
    files = open_tensors([directory / TENSOR_FILE], device)
    _check(directory / TENSOR_FILE, files, modules, rank)
    return Adapter(scale, frozenset(modules), files)


def _targets(keys: ConfigKeys, base: Mapping[str, Shape]) -> dict[str, Shape]:
    """Linear modules, with their weight's shape, whose names end like one in the configuration."""
    linears = {
        name.removesuffix(".weight"): shape for name, shape in base.items() if len(shape) == 2
    }
    chosen: dict[str, Shape] = {}
    for target in keys.strings("target_modules"):
        found = {n: s for n, s in linears.items() if n == target or n.endswith(f".{target}")}
        if not found:
            leaves = sorted({name.rsplit(".", 1)[-1] for name in linears})
            raise keys.error(
                "target_modules",
                f"the model has no module {target!r}; it has {', '.join(leaves)}",
            )
        chosen |= found
    return chosen


def _factor_names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _check(path: Path, files: TensorFiles, modules: Mapping[str, Shape], rank: int) -> None:
    expected: dict[str, Shape] = {}
    for module, (rows, columns) in modules.items():
        name_a, name_b = _factor_names(module)
        expected |= {name_a: (rank, columns), name_b: (rows, rank)}
    for name, shape in expected.items():
        found = files.shape(name) if name in files.locations else None
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise CheckpointError(f"{path}: tensor {name} {what}, expected {list(shape)}")
    for name in sorted(files.locations.keys() - expected.keys()):
        raise CheckpointError(
            f"{path}: tensor {name} does not belong to a target module of the adapter"
        )
