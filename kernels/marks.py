"""How far a running forward is, as numbers in memory that the host reads without
waiting for the device.

On a GPU the forwards themselves say which groups of layers have stored their K and V: behind each
group's last store a kernel writes the forward's number into pinned memory, in a CUDA graph as well
as outside. On the CPU a forward counts as it goes, for readers on other threads. Who launches
forwards ahead and only wants to know that they go on follows places in the device's queue.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

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


class Place(Protocol):
    """A place in a device's queue, as torch.cuda.Event records it."""

    def query(self) -> bool:
        """Whether all before it has ended."""
        ...

    def synchronize(self) -> None:
        """Waits for that."""
        ...


class QueuedLayers:
    """Layers that a device is yet to end. Tells of each that has ended where its host looks or
    waits: a forward is launched long before it ends."""

    def __init__(self, place: Callable[[], Place], on_ended: Callable[[], None]) -> None:
        """`place` is that behind all that was queued so far; `on_ended` is called for each layer,
        by who looks or waits."""
        self._place = place
        self._on_ended = on_ended
        self._places: deque[Place] = deque()

    def add(self, _layer: int) -> None:
        """A layer was queued."""
        self.look()
        self._places.append(self._place())

    def look(self) -> None:
        """Tells of those that have ended; waits for none."""
        while self._places and self._places[0].query():
            self._places.popleft()
            self._on_ended()

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Waits for one after the other, for all or until `is_over`, and tells of each as it
        ends."""
        while self._places and not is_over():
            self._places[0].synchronize()
            self.look()


def place_on_cuda() -> Place:
    """The place behind all that the current stream holds."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
