"""A decode and a prefill engine in one process, over one model, page pool and connector.

Each message goes to the engine that it is for. A decode step comes first, then at most one
forward over prompts, which waits until another decode step has been launched. So a step waits
for at most one of these forwards, and prompts go on while answers do. Single-threaded.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.room import FIRST_PIECE, PATIENCE_S
from effuse.kvtransfer.connector import Connector, ConnectorEvent, PushCancelled, Pushed, PushFailed
from effuse.placement.records import Load
from effuse.prefill_worker.engine import PrefillEngine, PromptTurn
from effuse.worker import messages
from effuse.worker.messages import CoreEvent, ToEngine

GIVE_WAY_S: Final = 0.5
"""How long answers lack pages before a prompt without a destination gives up its own. A destination
usually follows a computed prompt within milliseconds."""
_OF_PUSHES: Final = (Pushed, PushFailed, PushCancelled)
_COMMON: Final = ("prefix_", "offload_")  # of the cache of both
_SUMMED: Final = [
    name
    for name in Load.__struct_fields__
    if not (name.endswith("_pages") or name.startswith(_COMMON))
]


class BothEngine:
    """An EngineCore. `receiving` is the connector of `decode`."""

    def __init__(
        self,
        decode: DecodeEngine,
        prefill: PrefillEngine,
        receiving: "ConnectorHalf",
        *,
        now: Callable[[], float],
    ) -> None:
        self._decode = decode
        self.close = decode.close  # stops the connector
        self._prefill = prefill
        self._receiving = receiving
        self._now = now
        self._steps_before = 0  # of answers, before the last forward over prompts
        self._oldest: tuple[str, int] | None = None  # prompt, and its tokens that are left
        self._moved_s = -math.inf  # the last time that it was another one, or got a piece
        self._short_since: float | None = None

    def step(self) -> bool:
        has_changed = self._decode.step()
        before, began_s = self._prefill.num_tokens, self._now()
        has_changed |= self._prefill.step(self._turn())
        if tokens := self._prefill.num_tokens - before:
            self._steps_before = self._decode.counters.steps
            self._decode.room.add_prompts(tokens, began_s)
        self._follow_oldest(began_s, is_over=tokens > 0 and self._is_overdue(began_s))
        return has_changed | self._make_room() | self._receiving.has_events

    def is_working(self) -> bool:
        return self._decode.is_working() or self._prefill.is_working()

    def handle(self, message: ToEngine) -> None:
        match message:
            case (
                messages.StartPrefill()
                | messages.PushTo()
                | messages.PushRehearsal()
                | messages.ReceiverGone()
            ):
                self._prefill.handle(message)
            case messages.Abort(attempt=attempt) if self._prefill.knows(attempt.transfer_id):
                self._prefill.handle(message)
            case _:
                self._decode.handle(message)

    def outbox(self) -> Sequence[CoreEvent]:
        return [*self._decode.outbox(), *self._prefill.outbox()]

    def load(self) -> Load:
        """State and counters of both together. They share the pages."""
        decode, prefill = self._decode.load(), self._prefill.load()
        sums = {name: getattr(decode, name) + getattr(prefill, name) for name in _SUMMED}
        return replace(decode, **sums)

    def _turn(self) -> PromptTurn:
        """The room that answers leave to prompts now. A prompt gets no pages before an older
        answer, and leaves each answer a block's. It takes no longer than their gaps allow."""
        decode = self._decode
        is_next = decode.counters.steps > self._steps_before and not self._prefill.is_computing
        is_overdue = self._is_overdue(self._now())
        least = max(FIRST_PIECE, self._prefill.table.least_tokens) if is_overdue else 0
        return PromptTurn(
            may_launch=is_next or not decode.can_step,
            begin_before=decode.roster.oldest_waiting_s,
            pages_kept=decode.roster.pages_kept,
            most_tokens=max(decode.room.fits, least),
            may_push_known=not decode.is_writing,
        )

    def _is_overdue(self, now: float) -> bool:
        return now - self._moved_s > PATIENCE_S

    def _follow_oldest(self, now: float, *, is_over: bool) -> None:
        """Notes which prompt is the oldest, which shorter ones do not pass for ever. `is_over`: one
        that did not have to fit has begun."""
        oldest = self._prefill.table.oldest
        if is_over or oldest is None or oldest != self._oldest:
            self._oldest, self._moved_s = oldest, now

    def _make_room(self) -> bool:
        """Takes pages from prompts if no answer can go on. Two workers could otherwise wait for
        each other for ever: each one's pages have prompts for the other."""
        if not self._decode.is_short_of_pages:
            self._short_since = None
            return False
        if self._short_since is None:
            self._short_since = self._now()
        if self._now() - self._short_since < GIVE_WAY_S or not self._prefill.give_way():
            return False
        self._short_since = None
        return True


class ConnectorHalf:
    """A `Connector` for one of its two users, which gets only its own events."""

    def __init__(self, whole: Connector, *, pushes: bool) -> None:
        """`pushes`: its user pushes pages, and receives none."""
        self.name = whole.name
        self.close, self.describe = whole.close, whole.describe
        self.send, self.fileno = whole.send, whole.fileno
        self.other = self
        self._whole = whole
        self._pushes = pushes
        self._events: list[ConnectorEvent] = []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the connector's thread has ended."""
        for event in self._whole.poll():
            is_own = isinstance(event, _OF_PUSHES) is self._pushes
            (self if is_own else self.other)._events.append(event)
        events, self._events = self._events, []
        return events


def split(whole: Connector) -> tuple[ConnectorHalf, ConnectorHalf]:
    """The connector for the user that pushes pages, and for the one that receives them."""
    sending, receiving = ConnectorHalf(whole, pushes=True), ConnectorHalf(whole, pushes=False)
    sending.other, receiving.other = receiving, sending
    return sending, receiving
