"""The progress of a running forward, in memory that the host reads without waiting for the device.

On a GPU the forwards themselves mark which groups of layers have stored their K and V. After each
group's last store a kernel writes the forward's number into pinned memory, with and without CUDA
graphs. On the CPU a forward counts directly, for readers in other threads. A host that launches
forwards ahead and only needs to see progress follows places in the device's queue.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


def write_mark(number: Tensor, target: Tensor) -> None:
    """Copies ``number`` [1] int64 into ``target`` [1] int64, after all work queued before.

    On a GPU ``target`` is pinned memory of the host: once the number is there, all kernels before
    this call have ended. A kernel copies it, so a CUDA graph may contain it.
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
            raise ValueError(f"{num_layers} layers cannot form {num_groups} equal groups")
        self._group_layers = num_layers // num_groups
        self._on_cuda = device.type == "cuda"
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # of the current forward
        self._marks = torch.zeros(num_groups, dtype=torch.int64, pin_memory=self._on_cuda)
        self._seen = self._marks.numpy()
        self._num_begun = 0

    def begin(self) -> Callable[[], int]:
        """Begins a forward; returns a function that counts the stored groups of that forward."""
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


class Place(Protocol):
    """A place in a device's queue, as recorded by torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work before it has ended."""
        ...

    def synchronize(self) -> None:
        """Waits for that."""
        ...


class QueuedLayers:
    """Layers that a device has not ended yet. A forward is launched long before it ends, so ended
    layers are reported when the host looks or waits.
    """

    def __init__(self, place: Callable[[], Place], on_ended: Callable[[], None]) -> None:
        """`place` returns the place after all work queued so far; `on_ended` is called for each
        layer, in the thread that looks or waits.
        """
        self._place = place
        self._on_ended = on_ended
        self._places: deque[Place] = deque()

    def add(self, _layer: int) -> None:
        """A layer was queued."""
        self.look()
        self._places.append(self._place())

    def look(self) -> None:
        """Reports those that have ended, without waiting."""
        while self._places and self._places[0].query():
            self._places.popleft()
            self._on_ended()

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Waits for one after another, for all or until `is_over`, and reports each as it ends."""
        while self._places and not is_over():
            self._places[0].synchronize()
            self.look()


def place_on_cuda() -> Place:
    """The place after all work of the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
