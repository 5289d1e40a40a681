"""Checks a checkpoint by its headers, in a fraction of a second and without torch.

It finds every error that a worker would find before it reads a tensor: in files, index, names,
shapes, dtypes, sizes, and in an adapter. Only the worker knows whether the weights fit its device.
"""

from pathlib import Path

from effuse.models.adapter import open_adapter
from effuse.models.checkpoint import checked_tensors, dtype_name, open_tensors, weight_files
from effuse.models.config import ModelConfig
from effuse.models.tensors import tensor_shapes


def check_checkpoint(
    directory: Path,
    *,
    adapter: Path | None = None,
    dtype: str = "auto",
    block_size: int | None = None,
) -> None:
    """Raises CheckpointError with a worker's own text if a checkpoint directory, or its LoRA
    adapter, cannot be loaded.
    """
    config = ModelConfig.from_dir(directory, block_size=block_size)
    dtype_name(dtype, directory)
    shapes = tensor_shapes(config)
    opened = [open_tensors(weight_files(directory), None)]
    checked_tensors(directory, config, opened[0], shapes)
    if adapter is not None:
        opened.append(open_adapter(adapter, shapes, None).files)
    for files in opened:
        for name in files.locations:
            files.check_dtype(name)
