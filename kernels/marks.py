"""How far a running forward is, as numbers in memory that the host reads without
waiting for the device.

On a GPU the forwards themselves say which groups of layers have stored their K and V: behind each
group's last store a kernel writes the forward's number into pinned memory, in a CUDA graph as well
as outside. On the CPU a forward counts as it goes, for readers on other threads.
"""

from collections.abc import Callable

import torch
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


class LayerMarks:
    """Progress of one model on one device, whose forwards run one after the other."""

    def __init__(self, num_layers: int, num_groups: int, device: torch.device) -> None:
        if num_layers % num_groups:
            raise ValueError(f"{num_layers} layers are not {num_groups} equal groups")
        self._group_layers = num_layers // num_groups
        self._on_cuda = device.type == "cuda"
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # of the present forward
        self._marks = torch.zeros(num_groups, dtype=torch.int64, pin_memory=self._on_cuda)
        self._seen = self._marks.numpy()
        self._num_begun = 0

    def begin(self) -> Callable[[], int]:
        """Begins a forward; what it returns says how many groups of that forward are stored."""
        self._num_begun += 1
        number = self._num_begun
        self._number.add_(1)

        def num_stored() -> int:
            # Later forwards write larger numbers, in the same order.
            return int((self._seen >= number).sum())

        return num_stored

    def stored(self, layer: int) -> None:
        """The layer's K and V have been stored, or the kernel that stores them was queued."""
        group, rest = divmod(layer + 1, self._group_layers)
        if not rest:
            write_mark(self._number, self._marks[group - 1 : group])
