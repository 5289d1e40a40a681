"""A pool that expects pages, a writer that sends a test's messages, and a fake transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from kvtransfer.fixtures import (
    SMALL,
    WHOLE,
    boundary,
    digest_of,
    filled,
    print_of,
    reservation,
)
from kvtransfer.scene import FakeTransport

from effuse.kvtransfer.connector import ArrivalRefused, Cause, ConnectorEvent
from effuse.kvtransfer.digest import DigestJob, HostDigester, finish_of
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import (
    Begin,
    Manifest,
    PageRef,
    Pages,
    ReceiverAddress,
    Rejected,
    Reservation,
    ToReceiver,
)
from effuse.kvtransfer.reception import Receptions
from effuse.kvtransfer.transport import FromWriter

FINGERPRINT = print_of(SMALL)
PAGES = (PageRef(3, 1), PageRef(4, 5), PageRef(1, 2))
ALL = range(SMALL.num_groups)
WRITER = b"the writer's connection"


@dataclass
class Slow:
    """Takes digests at once, but shows them only when a test lets it."""

    digester: HostDigester
    may_show: bool = False

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        job, slow = self.digester.begin(page_ids, groups, seed, heads), self

        return lambda: job() if slow.may_show else None

    def close(self) -> None: ...


@dataclass
class Scene:
    """A source, a pool that expects three pages of it, and the honest messages between them."""

    is_two_sided: bool = True
    slow: bool = False
    time: float = 10.0
    events: list[ConnectorEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source, self.memory = filled(SMALL, 3), PageMemory(SMALL, 6)
        self.transport = FakeTransport(self.memory, is_two_sided=self.is_two_sided)
        self.digester = Slow(HostDigester(self.memory), may_show=not self.slow)
        self.receptions = Receptions(
            self.transport,
            self.digester,
            Identity("decode-1", FINGERPRINT, SMALL),
            self.events.append,
            lambda: self.time,
        )
        self.reserved = self.expect(PAGES)

    def expect(self, pages: Sequence[PageRef], number: int = 1, port: int = 1) -> Reservation:
        address = ReceiverAddress(connector="zmq", endpoint=f"tcp://decode:{port}")
        reserved = reservation(self.memory, address, pages, number=number)
        self.receptions.expect(reserved, "prefill-1")
        return reserved

    def say(self, message: ToReceiver, payload: Sequence[memoryview] = ()) -> None:
        self.receptions.take(FromWriter(message, payload, WRITER))
        self.receptions.turn()

    def begin(self, **changes: Any) -> None:
        words: dict[str, Any] = {
            "attempt": self.reserved.attempt,
            "source": "prefill-1",
            "destination": "decode-1",
            "part": WHOLE,
            "fingerprint": FINGERPRINT,
        }
        self.say(Begin(**(words | changes)))

    def send(self, first: int = 0, count: int = 3, groups: range = ALL, **changes: Any) -> None:
        """Pages with their bytes; over a one-sided transport the bytes are written first."""
        words: dict[str, Any] = {
            "attempt": self.reserved.attempt,
            "source": "prefill-1",
            "destination": "decode-1",
            "part": WHOLE,
            "first": first,
            "pages": self.reserved.pages[first : first + count],
            "group": groups.start,
            "end_group": groups.stop,
        }
        payload = changes.pop("payload", None)
        if payload is None:
            sent = range(first, first + count)
            payload = self.source.views(sent, groups, self.source.layout.heads)
        if not self.is_two_sided:
            ids = [p.page_id for p in words["pages"]]
            self.memory.write(ids, groups, payload, self.memory.layout.heads)
            payload = ()
        self.say(Pages(**(words | changes)), payload)

    def finish(self, **changes: Any) -> None:
        self.say(finish_of(self.manifest(**changes), 250_000))

    def manifest(self, **changes: Any) -> Manifest:
        honest = Manifest(
            attempt=self.reserved.attempt,
            source="prefill-1",
            destination="decode-1",
            part=WHOLE,
            fingerprint=FINGERPRINT,
            digest=digest_of(self.source, range(3)),
            num_bytes=3 * self.source.page_bytes,
            boundary=boundary(20, tail_token_ids=(7, 8)),
        )
        return msgspec.structs.replace(honest, **changes)

    def refusal(self) -> tuple[Cause, str]:
        """The engine's event; the writer must have received the same."""
        (refused,) = [event for event in self.events if isinstance(event, ArrivalRefused)]
        (rejected,) = [one for one in self.transport.answers if isinstance(one, Rejected)]
        assert (rejected.transfer_id, rejected.cause) == ("transfer-1", refused.cause.value)
        assert refused.message.startswith(rejected.message[:100])
        assert len(self.receptions) == 0
        return refused.cause, refused.message
