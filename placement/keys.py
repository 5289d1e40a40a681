"""Names of the Redis keys of one fleet.

All keys of a fleet share a hash tag, so that a script uses one slot and fleets never share keys.
"""

import re

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(kind: str, name: str) -> str:
    """Returns `name` if it may be part of a key; otherwise raises ValueError with the form."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} is not a valid name: expected 1 to 128 letters, digits, dots, "
            "underscores or hyphens, beginning with a letter or digit"
        )
    return name


class Keys:
    """Key names of one fleet."""

    def __init__(self, fleet: str) -> None:
        tag = f"effuse:{{{check_name('fleet', fleet)}}}:"
        self.worker_prefix = f"{tag}worker:"
        self.workers = f"{tag}workers"  # a set of ids, with dead ones until a reader prunes them
        self.router_prefix = f"{tag}router:"
        self.routers = f"{tag}routers"  # the same, which another router prunes
        self.request_prefix = f"{tag}request:"
        self.running = f"{tag}running-until"  # ids sorted by when their placements expire
        self.ended = f"{tag}ended-until"  # the same for ended requests, as many as are kept
        self.answer_prefix = f"{tag}answer:"
        self.answers = f"{tag}answers-until"  # ids of kept answers, sorted by their expiry
        self.answer_sizes = f"{tag}answer-bytes"  # a hash by id; the empty id has the sum
        # Digests of requests under which engines died, sorted by expiry in ms of Redis's clock.
        self.refused = f"{tag}refused"

    def worker(self, worker_id: str) -> str:
        """Key of a worker's lease: a hash of the process that holds it and the worker's record."""
        return f"{self.worker_prefix}{check_name('worker id', worker_id)}"

    def router(self, router_id: str) -> str:
        """Key of a router's lease: its record."""
        return f"{self.router_prefix}{check_name('router id', router_id)}"

    def request(self, request_id: str) -> str:
        """Key of a request's placement: a hash of attempt, router, state and record."""
        return f"{self.request_prefix}{request_id}"

    def answer(self, request_id: str) -> str:
        """Key of a request's answer: a hash of the request's digest and the response."""
        return f"{self.answer_prefix}{request_id}"
