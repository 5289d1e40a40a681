"""A checkpoint checked by its headers alone, in a fraction of a second and without torch.

All that a worker would find before it reads a tensor: files, index, names, shapes, dtypes, sizes,
an adapter's as well. Not here: whether the weights fit a device, which the worker knows.
"""

from pathlib import Path

from effuse.models.adapter import open_adapter
from effuse.models.checkpoint import (
    check_index,
    check_tensors,
    dtype_name,
    open_tensors,
    tensor_shapes,
    weight_files,
    without_tied_head,
)
from effuse.models.config import ModelConfig


def check_checkpoint(
    directory: Path,
    *,
    adapter: Path | None = None,
    dtype: str = "auto",
    block_size: int | None = None,
) -> None:
    """Raises CheckpointError, with what a worker would say of them, where a checkpoint directory or
    the LoRA adapter beside it cannot be loaded."""
    config = ModelConfig.from_dir(directory, block_size=block_size)
    dtype_name(dtype, directory)
    shapes = tensor_shapes(config)
    with open_tensors(weight_files(directory), None) as files:
        check_index(directory, files)
        check_tensors(directory, without_tied_head(config, files), shapes)
        for name in files.locations:
            files.check_dtype(name)
    if adapter is not None:
        with open_adapter(adapter, shapes, None) as opened:
            for name in opened.files.locations:
                opened.files.check_dtype(name)
