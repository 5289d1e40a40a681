"""Which request is where: waiting for pages, receiving them, or running. Order is by arrival.

Bookkeeping only; who moves is the scheduler's decision, pages are the pool's.
"""

from bisect import insort

from effuse.decode_worker.request import Request


class Seats:
    """Every request of an engine, by transfer id and in exactly one of three places."""

    def __init__(self) -> None:
        self.by_transfer: dict[str, Request] = {}  # in order of arrival
        self.waiting: list[Request] = []  # hold no pages
        self.receiving: dict[str, Request] = {}  # a remote writer fills their pages
        self.running: list[Request] = []  # oldest first

    @property
    def num_holding(self) -> int:
        """Requests that hold pages."""
        return len(self.receiving) + len(self.running)

    def join(self, request: Request) -> None:
        """A request arrives, behind all others."""
        self.by_transfer[request.attempt.transfer_id] = request
        self.waiting.append(request)

    def receive(self, request: Request) -> None:
        """A waiting request's pages are open to its writer."""
        self.waiting.remove(request)
        self.receiving[request.attempt.transfer_id] = request

    def run(self, request: Request) -> None:
        """A request has what it needs to take part in steps."""
        if self.receiving.pop(request.attempt.transfer_id, None) is None:
            self.waiting.remove(request)
        insort(self.running, request, key=_arrival)

    def preempt(self, request: Request) -> None:
        """A running request goes back, before all younger ones."""
        self.running.remove(request)
        insort(self.waiting, request, key=_arrival)

    def leave(self, request: Request) -> None:
        """A request has ended."""
        transfer_id = request.attempt.transfer_id
        del self.by_transfer[transfer_id]
        if self.receiving.pop(transfer_id, None) is None:
            place = self.running if request in self.running else self.waiting
            place.remove(request)


def _arrival(request: Request) -> int:
    return request.arrival
