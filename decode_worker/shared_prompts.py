"""Prompts that several requests of an engine have in common: who reads whose KV.

Answers to one request are a group. The first of them receives or computes the prompt's KV; others
wait for it, then read its whole pages and own a copy of the page that prompt and answer both touch.
Who computes it where the first one ends before that is the next one in the order of arrival: as
after a preemption, no prefill worker is asked again. Decides; pages are moved by the engine.
"""

from collections.abc import Iterator

import numpy as np

from effuse.decode_worker.request import DecodeRequest


class SharedPrompts:
    """The groups of an engine's requests. Requests without a group cost nothing."""

    def __init__(self) -> None:
        self._groups: dict[str, list[DecodeRequest]] = {}

    def add(self, request: DecodeRequest) -> None:
        """A request has arrived."""
        if request.group:
            self._groups.setdefault(request.group, []).append(request)

    def remove(self, request: DecodeRequest) -> None:
        """A request has ended."""
        if request.group:
            members = self._groups[request.group]
            members.remove(request)
            if not members:
                del self._groups[request.group]

    def source_of(self, request: DecodeRequest) -> DecodeRequest | None:
        """Whose pages hold the KV of its prompt, for a request that has yet to get it."""
        sources = (one for one in self._others(request) if one.holds_prompt)
        return next(sources, None)

    def is_coming(self, request: DecodeRequest) -> bool:
        """Whether its prompt's KV is on its way to another one, or an older one will see to it."""
        if not request.group or self.source_of(request) is not None:
            return False
        return any(
            one.lacks_prompt and (one.pages or one.arrival < request.arrival)
            for one in self._others(request)
        )

    def _others(self, request: DecodeRequest) -> Iterator[DecodeRequest]:
        """Of its group, with the very same prompt: a group is what somebody else calls it."""
        if not request.group or request.needs_remote or not request.lacks_prompt:
            return
        for other in self._groups[request.group]:
            if other is not request and np.array_equal(
                other.sequence.prompt_ids, request.sequence.prompt_ids
            ):
                yield other
