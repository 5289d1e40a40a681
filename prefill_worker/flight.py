"""A forward that was launched and may not have ended yet: what it was for and how to wait for it.

On a device the host is a forward ahead, so that scheduling and packing cost the device no time. On
the CPU a forward has ended when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.models.part import Part
from effuse.prefill_worker.prompt import Prompt

Wait = Callable[[], None]
Mark = Callable[[], Wait]  # marks all that was queued so far; the result waits for just that


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prompt's share of a forward."""

    prompt: Prompt
    part: Part


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched forward. Its boundaries may be read once `wait` has returned."""

    chunks: Sequence[Chunk]
    boundaries: Sequence[Tensor | None]  # [hidden_size] on the host, of each chunk
    wait: Wait | None

    def land(self) -> list[tuple[Chunk, bytes | None]]:
        """Waits for the forward; each chunk with its boundary's raw bytes."""
        if self.wait is not None:
            self.wait()
        pairs = zip(self.chunks, self.boundaries, strict=True)
        return [(chunk, None if row is None else _bytes_of(row)) for chunk, row in pairs]


def launched(
    chunks: Sequence[Chunk], boundaries: Sequence[Tensor | None], mark: Mark | None
) -> Flight:
    """The flight of a forward whose call has just returned; its boundaries set out for the host."""
    copies = [None if row is None else row.to("cpu", non_blocking=True) for row in boundaries]
    return Flight(chunks, copies, None if mark is None else mark())


def mark_of(device: torch.device) -> Mark | None:
    """How to mark what was queued on a device; None where nothing is ever queued."""
    if device.type != "cuda":
        return None

    def mark() -> Wait:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done.synchronize

    return mark


def _bytes_of(hidden: Tensor) -> bytes:
    """Raw bytes of a vector [hidden_size]."""
    return hidden.contiguous().view(torch.uint8).numpy().tobytes()
