"""A device's progress as a number in memory that the host reads without waiting for the device."""

from torch import Tensor


def write_mark(number: Tensor, target: Tensor) -> None:
    """Copies ``number`` [1] int64 into ``target`` [1] int64, behind what was queued before.

    On a GPU ``target`` is pinned memory of the host: whoever finds the number there knows that all
    kernels before this call have ended. A kernel does it, so a CUDA graph may hold it.
    """
    if number.is_cuda:
        from effuse.kernels import marks_triton

        marks_triton.launch(number, target)
    else:
        target.copy_(number)
