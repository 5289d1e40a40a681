"""Copies of parts of pages into pools on other GPUs of this host that are mapped here.

UCX calls the driver for each contiguous piece, which takes the connector's thread about 5 us, and a
part of a page has a piece for each group of layers. Here one kernel copies a whole chunk. It is a
write of this process like UCX's own, so it ends with the process, and nothing else can stop it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kernels.pages import Place, place_on_cuda
from effuse.kernels.pages_digests import STRIPE_BYTES
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.nixl_peers import Cut
from effuse.kvtransfer.transport import Chunk, Delivery

Cuts = tuple[Cut, Cut]
"""Where some heads lie in our pool and in a peer's."""


@dataclass(slots=True, eq=False)
class PeerCopy(Delivery):
    """A chunk that is being copied; the receiver is notified of its end."""

    done: Place
    order: Tensor  # pinned, so it must outlive the copy
    notify: Callable[[], None]

    def is_over(self) -> bool:
        """Whether it has ended, for one caller that stops asking then. Raises HandoffRefused if the
        receiver could not be notified."""
        if not self.done.query():
            return False
        self.notify()
        return True


class PeerCopies:
    """Copies from one pool on a GPU, on a stream of their own beside all computing."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device, priority=-1)  # type: ignore[no-untyped-call]

    def begin(self, chunk: Chunk, cuts: Cuts, address: int, notify: Callable[[], None]) -> PeerCopy:
        """Starts to copy a chunk to the pool at an address."""
        order = order_of(chunk, address).pin_memory()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            queue(self._memory, chunk, cuts, order.to(self._memory.device, non_blocking=True))
            return PeerCopy(place_on_cuda(), order, notify)


def copies_of(memory: PageMemory) -> PeerCopies | None:
    """The object that copies from this memory; None for a host's, which no peer maps."""
    return PeerCopies(memory) if memory.device.type == "cuda" else None


def order_of(chunk: Chunk, address: int) -> Tensor:
    """The peer's address, the ids of our pages and those of the peer's: [1 + 2 * pages] int64."""
    targets = [page.page_id for page in chunk.targets]
    return torch.tensor([address, *chunk.source_pages, *targets], dtype=torch.int64)


def queue(memory: PageMemory, chunk: Chunk, cuts: Cuts, order: Tensor) -> None:
    """Queues the copies of a chunk; `order` is on the device of the memory."""
    from effuse.kernels import pages_copy_triton  # a CPU needs no Triton

    ours, theirs = cuts
    unit = memory.layout.group_bytes // ours.per_group // STRIPE_BYTES
    count = len(chunk.targets)
    pages_copy_triton.launch(
        memory.byte_rows().view(torch.int64),
        order[1 : 1 + count],
        _stripes(ours, chunk.groups, unit),
        order,
        order[1 + count :],
        _stripes(theirs, chunk.groups, unit),
        num_runs=len(chunk.groups),
        run_stripes=ours.count * unit,
    )


def _stripes(cut: Cut, groups: range, unit: int) -> tuple[int, int, int]:
    """From page to page, to a page's first run, and from run to run."""
    group = cut.per_group * unit
    first = (groups.start - cut.first_group) * group + cut.first * unit
    return cut.groups * group, first, group
