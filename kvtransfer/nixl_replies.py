"""How a NIXL receiver answers its writers: each says with its first message how it is reached.

Answers are notifications; one that cannot be sent is dropped, because the writer has a lease.
"""

from __future__ import annotations

from collections import OrderedDict

from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.messages import encode
from effuse.kvtransfer.nixl_agent import NixlAgent
from effuse.kvtransfer.nixl_peers import attempt
from effuse.kvtransfer.wire import ToSender

MAX_WRITERS = 64


class NixlReplies:
    """The writers that can be answered, by incarnation; the least recent of too many is dropped."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._writers: OrderedDict[str, str] = OrderedDict()  # incarnation: name of its agent

    def learn(self, incarnation: str, metadata: bytes) -> None:
        """Takes note of a writer. Raises HandoffRefused where its metadata is of no use."""
        if incarnation in self._writers:
            self._writers.move_to_end(incarnation)
            return
        if not metadata:
            raise HandoffRefused(Cause.MALFORMED, "the writer does not say how it is answered")
        if len(self._writers) >= MAX_WRITERS:
            _, name = self._writers.popitem(last=False)
            attempt("a writer cannot be removed", lambda: self._agent.remove_peer(name))
        added = attempt("the writer cannot be added", lambda: self._agent.add_peer(metadata))
        self._writers[incarnation] = added

    def answer(self, incarnation: str, message: ToSender) -> None:
        """Tells a writer what became of its push, if it is known and can be reached."""
        name = self._writers.get(incarnation)
        if name is None:
            return
        try:
            attempt("no answer", lambda: self._agent.notify(name, encode(message)))
        except HandoffRefused:
            del self._writers[incarnation]  # gone, or to be learnt anew
