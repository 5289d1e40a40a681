"""Which transfers were aborted a while ago, so that what comes late of them is refused. Pure."""

from collections import OrderedDict


class Aborted:
    """Transfer ids with the time they were aborted; each is remembered for `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._since: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._since

    def add(self, transfer_id: str, now: float) -> None:
        """Remembers an aborted transfer and forgets those of long ago."""
        self._since[transfer_id] = now
        self._since.move_to_end(transfer_id)
        while next(iter(self._since.values())) < now - self._keep_s:
            self._since.popitem(last=False)
