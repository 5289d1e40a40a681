"""Transfers that were aborted, so that whatever still comes of them is refused. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """Aborted transfer ids, each kept for `keep_s` seconds, the `most` newest of them at most."""

    def __init__(self, keep_s: float, most: int = 1 << 16) -> None:
        self._keep_s = keep_s
        self._most = most
        self._since: OrderedDict[str, float] = OrderedDict()  # oldest first

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._since

    def __len__(self) -> int:
        return len(self._since)

    def add(self, transfer_id: str, now: float) -> None:
        """Remembers an aborted transfer, and forgets those of long ago."""
        self._since[transfer_id] = now
        self._since.move_to_end(transfer_id)
        while len(self._since) > self._most or self._oldest() < now - self._keep_s:
            self._since.popitem(last=False)

    def _oldest(self) -> float:
        return next(iter(self._since.values()))
