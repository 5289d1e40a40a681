"""Prompts that several requests of an engine have in common: who reads whose KV.

Answers to one request are a group. The first of them receives or computes the prompt's KV; others
wait for it, then read its whole pages and own a copy of the page that prompt and answer both touch.
Who computes it where the first one ends before that is the next one in the order of arrival: as
after a preemption, no prefill worker is asked again. Decides; pages are moved by the engine.
"""

from collections.abc import Iterator

from effuse.decode_worker.request import DecodeRequest


class SharedPrompts:
    """The groups of an engine's requests. Requests without a group cost nothing."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, bytes], list[DecodeRequest]] = {}

    def add(self, request: DecodeRequest) -> None:
        """A request has arrived. Its siblings have its very prompt: what a group is called is
        somebody else's word."""
        if request.group:
            request.siblings = self._groups.setdefault(_key(request), [])
            request.siblings.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """A request has ended."""
        if request.group:
            request.siblings.remove(request)
            if not request.siblings:
                del self._groups[_key(request)]

    def source_of(self, request: DecodeRequest) -> DecodeRequest | None:
        """Whose pages hold the KV of its prompt, for a request that has yet to get it."""
        return next((one for one in _others(request) if one.holds_prompt), None)

    def is_coming(self, request: DecodeRequest) -> bool:
        """Whether its prompt's KV is on its way to another one, or an older one will see to it."""
        if self.source_of(request) is not None:
            return False
        return any(
            one.lacks_prompt and (one.pages or one.arrival < request.arrival)
            for one in _others(request)
        )


def _key(request: DecodeRequest) -> tuple[str, bytes]:
    return request.group, request.sequence.prompt_ids.tobytes()


def _others(request: DecodeRequest) -> Iterator[DecodeRequest]:
    """Whom a request may have its prompt from; nobody once it has it, or a writer brings it."""
    if request.siblings and request.lacks_prompt and not request.needs_remote:
        yield from (one for one in request.siblings if one is not request)
