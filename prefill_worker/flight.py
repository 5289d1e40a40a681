"""A forward that was launched and may not have ended yet: what it was for, and whether it has.

On a device the host is a forward ahead, so that scheduling and packing cost the device no time. On
the CPU a forward has ended when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kvtransfer.connector import Pending
from effuse.kvtransfer.messages import BoundaryState
from effuse.models.part import Part
from effuse.prefill_worker.prompt import Prompt

IsOver = Callable[[], bool]
Mark = Callable[[], IsOver]  # marks all that was queued so far; the result asks for just that


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One prompt's share of a forward."""

    prompt: Prompt
    part: Part


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched forward. Its boundaries may be read once it is over."""

    chunks: Sequence[PromptChunk]
    boundaries: Sequence[Tensor | None]  # [hidden_size] on the host, of each chunk
    is_over: IsOver

    def boundary(self, index: int) -> Pending[BoundaryState]:
        """What goes with the pages of a chunk that ends its prompt, once the forward is over.

        It may be asked for from any thread.
        """
        prompt, row = self.chunks[index].prompt, self.boundaries[index]

        def state() -> BoundaryState | None:
            if not self.is_over():
                return None
            return prompt.boundary(None if row is None else _bytes_of(row))

        return state


def launched(
    chunks: Sequence[PromptChunk], boundaries: Sequence[Tensor | None], mark: Mark | None
) -> Flight:
    """The flight of a forward whose call has just returned; its boundaries set out for the host."""
    copies = [None if row is None else _to_host(row) for row in boundaries]
    return Flight(chunks, copies, _always if mark is None else mark())


def mark_of(device: torch.device) -> Mark | None:
    """How to mark what was queued on a device; None where nothing is ever queued."""
    if device.type != "cuda":
        return None

    def mark() -> IsOver:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done.query

    return mark


def _always() -> bool:
    return True


def _to_host(row: Tensor) -> Tensor:
    """A copy [hidden_size] on its way; into memory that is not pinned it would be awaited."""
    copy = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda)
    return copy.copy_(row, non_blocking=True)


def _bytes_of(hidden: Tensor) -> bytes:
    """Raw bytes of a vector [hidden_size]."""
    return hidden.contiguous().view(torch.uint8).numpy().tobytes()
