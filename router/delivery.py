"""The only-writer rule: which tokens of a commit are new, and what must be known to go on.

Pure. A worker's commits are taken by their offset: what was delivered is never changed, repeated or
lost, whichever worker says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from effuse.v1 import worker_pb2 as pb


class BrokenStream(Exception):
    """A worker's commits do not continue what was delivered; its attempt must end."""


@dataclass(slots=True)
class Delivery:
    """The tokens of one answer that are final, and the blocks in flight after the last of them."""

    token_ids: list[int] = field(default_factory=list)
    frontier: list[pb.BlockState] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Something is delivered: another attempt has to resume."""
        return bool(self.token_ids)

    def accept(
        self, offset: int, token_ids: Sequence[int], frontier: Iterable[pb.BlockState] = ()
    ) -> list[int]:
        """Appends a commit, with the blocks in flight after it, and returns the ids that are new.

        Raises `BrokenStream` where it leaves a gap, or where it repeats positions with other ids.
        """
        delivered = len(self.token_ids)
        if offset > delivered:
            raise BrokenStream(f"a commit begins at {offset}, but only {delivered} are delivered")
        overlap = delivered - offset
        if list(token_ids[:overlap]) != self.token_ids[offset : offset + len(token_ids)]:
            raise BrokenStream(f"a commit at {offset} changes tokens that are delivered")
        new = list(token_ids[overlap:])
        self.token_ids += new
        if offset + len(token_ids) == len(self.token_ids):
            self.frontier = list(frontier)
        return new

    def resume(self) -> pb.Resume | None:
        """What another attempt needs to go on from here; None where it begins anew."""
        if not self.has_begun:
            return None
        return pb.Resume(committed_token_ids=self.token_ids, frontier=self.frontier)
