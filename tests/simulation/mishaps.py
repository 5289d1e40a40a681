"""Faults of single messages and writes: spoilt bytes, confused peers.

A message of a confused peer has one wrong identity. Whatever that is, its transfer must not be
accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from effuse.kvtransfer.digest import finish_of
from effuse.kvtransfer.messages import (
    AttemptId,
    Begin,
    Finish,
    Manifest,
    PageRef,
    Pages,
    ToReceiver,
    envelope_of,
)

from .clock import Clock, Violation

STRANGER = "another-life"


@dataclass(slots=True)
class Mishaps:
    """How often they happen, as a share of messages or writes, and which have happened."""

    clock: Clock
    damaged: float = 0.0
    confused: float = 0.0
    failed: float = 0.0  # forwards
    mixed_up: float = 0.0  # prompts that are sent in the place of another
    deadly: float = 0.0  # writes whose writer dies a moment after their bytes have left
    num_damaged: int = 0
    num_failed: int = 0
    num_dead: int = 0
    wrong: dict[str, str] = field(default_factory=dict)  # by transfer id: a peer's message about it

    @property
    def are_any(self) -> bool:
        """Whether anything was made to go wrong."""
        return bool(self.num_damaged or self.num_failed or self.num_dead or self.wrong)

    def fails(self) -> bool:
        """Whether this forward does."""
        has_failed = self._happens(self.failed)
        self.num_failed += has_failed
        return has_failed

    def damage(self, pages: list[list[int]]) -> list[list[int]]:
        """A write's bytes as they arrive."""
        if not self._happens(self.damaged):
            return pages
        self.num_damaged += 1
        self.clock.note("a write is damaged")
        return [[tag + 1 for tag in page] for page in pages]

    def kills(self) -> bool:
        """Whether the writer of this write dies."""
        is_dead = self._happens(self.deadly)
        self.num_dead += is_dead
        return is_dead

    def confuse(self, message: ToReceiver) -> ToReceiver:
        """A writer's message as it is sent."""
        if not self._happens(self.confused):
            return message
        what = self.clock.draw.choice(("attempt", "source", "destination", "generation"))
        transfer_id = envelope_of(message).attempt.transfer_id
        self.mark(transfer_id, f"{what} in {type(message).__name__}")
        return _mistaken(message, what)

    def mixes_up(self, transfer_id: str) -> bool:
        """Whether a prefill worker is given another prompt than decode."""
        if not self._happens(self.mixed_up):
            return False
        self.mark(transfer_id, "the prompt")
        return True

    def mark(self, transfer_id: str, what: str) -> None:
        """This transfer must never count as good."""
        self.clock.note(f"{transfer_id}: a peer is wrong about {what}")
        self.wrong[transfer_id] = what

    def check_verified(self, transfer_id: str) -> None:
        """Raises Violation if a transfer with a fault was accepted."""
        if transfer_id in self.wrong:
            raise Violation(
                f"{transfer_id} is verified although {self.wrong[transfer_id]} is wrong"
            )

    def _happens(self, share: float) -> bool:
        return share > 0 and self.clock.draw.random() < share


def _mistaken(message: ToReceiver, what: str) -> ToReceiver:
    """The message with one wrong field; the attempt if it has no such field."""
    if isinstance(message, Finish):
        manifest = message.manifest
        told = replace(manifest, **_wrong(manifest, what))
        return finish_of(told, message.elapsed_us)
    return replace(message, **_wrong(message, what))


def _wrong(spoken: Begin | Pages | Manifest, what: str) -> dict[str, object]:
    if what == "generation" and isinstance(spoken, Pages) and spoken.pages:
        older = [PageRef(page.page_id, page.generation - 1) for page in spoken.pages]
        return {"pages": tuple(older)}
    if what in ("attempt", "generation"):
        ours = spoken.attempt
        return {"attempt": AttemptId(ours.request_id, ours.attempt + 1, ours.transfer_id)}
    return {what: STRANGER}
