"""Prompts that several requests of an engine share: which request reads whose KV.

Answers to one request are a group. Their first one receives or computes the prompt's KV; the others
wait for it, then read its whole pages and own a copy of the page that has both prompt and answer.
If the first one ends before that, the next one in the order of arrival computes it: as after a
preemption, no prefill worker is involved again. This file decides; the engine moves pages.
"""

import math
from collections.abc import Iterable, Sequence

from effuse.decode_worker.request import DecodeRequest


class SharedPrompts:
    """The groups of an engine's requests. Requests without a group cost nothing."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, bytes], list[DecodeRequest]] = {}

    def add(self, request: DecodeRequest) -> None:
        """A request has arrived. Only an equal prompt makes it a sibling."""
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
        """The request with the KV of its prompt, for a request that does not have it yet."""
        if not _may_share(request):
            return None
        return next((one for one in request.siblings if one.holds_prompt), None)

    def not_coming(self, waiting: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        """Those of `waiting`, which hold no pages, whose prompt's KV is not on its way to a
        sibling, and that have no older sibling that will get it.
        """
        last_to_begin: dict[int, float] = {}  # arrivals, by the identity of a group
        left = []
        for request in waiting:
            group = id(request.siblings)
            if _may_share(request) and group not in last_to_begin:
                last_to_begin[group] = _last_to_begin(request.siblings)
            if not _may_share(request) or request.arrival <= last_to_begin[group]:
                left.append(request)
        return left


def _key(request: DecodeRequest) -> tuple[str, bytes]:
    return request.group, request.sequence.prompt_ids.tobytes()


def _may_share(request: DecodeRequest) -> bool:
    """Whether a request may get its prompt from another one; not once it has it, and not if a
    writer brings it.
    """
    return bool(request.siblings) and request.lacks_prompt and not request.needs_remote


def _last_to_begin(siblings: Sequence[DecodeRequest]) -> float:
    """The last arrival among the sharing requests that can begin: all if one has the KV, none while
    it is on its way to one, otherwise the oldest.
    """
    if any(one.holds_prompt for one in siblings):
        return math.inf
    lacking = [one for one in siblings if one.lacks_prompt]
    return -math.inf if any(one.pages for one in lacking) else min(one.arrival for one in lacking)
