"""Names of the Redis keys of one fleet.

All keys of a fleet share a hash tag, so that a script uses one slot and fleets never share keys.
"""

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(kind: str, name: str) -> str:
    """Returns `name` if it may be part of a key; otherwise raises ValueError with the form."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} is not a valid name: expected 1 to 128 letters, digits, dots, "
            "underscores or hyphens, beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one fleet."""

    fleet: str

    def __post_init__(self) -> None:
        check_name("fleet", self.fleet)

    def worker(self, worker_id: str) -> str:
        """Key of a worker's lease: a hash of the process that holds it and the worker's record."""
        return f"{self.worker_prefix}{check_name('worker id', worker_id)}"

    @property
    def worker_prefix(self) -> str:
        """Prefix of all worker keys."""
        return f"effuse:{{{self.fleet}}}:worker:"

    @property
    def workers(self) -> str:
        """Key of the set of worker ids, with dead ones until a reader prunes them."""
        return f"effuse:{{{self.fleet}}}:workers"

    def request(self, request_id: str) -> str:
        """Key of a request's placement: a hash of attempt, router, state and record."""
        return f"{self.request_prefix}{request_id}"

    @property
    def request_prefix(self) -> str:
        """Prefix of all placement keys."""
        return f"effuse:{{{self.fleet}}}:request:"

    def router(self, router_id: str) -> str:
        """Key of a router's lease: its record."""
        return f"{self.router_prefix}{check_name('router id', router_id)}"

    @property
    def router_prefix(self) -> str:
        """Prefix of all router keys."""
        return f"effuse:{{{self.fleet}}}:router:"

    @property
    def routers(self) -> str:
        """Key of the set of router ids, with dead ones until another router prunes them."""
        return f"effuse:{{{self.fleet}}}:routers"

    def answer(self, request_id: str) -> str:
        """Key of a request's answer: a hash of the request's digest and the response."""
        return f"{self.answer_prefix}{request_id}"

    @property
    def answer_prefix(self) -> str:
        """Prefix of all answer keys."""
        return f"effuse:{{{self.fleet}}}:answer:"

    @property
    def answers(self) -> str:
        """Key of the sorted set of ids of kept answers, by their expiry."""
        return f"effuse:{{{self.fleet}}}:answers-until"

    @property
    def answer_sizes(self) -> str:
        """Key of the hash of their bytes by id; the empty id has the sum."""
        return f"effuse:{{{self.fleet}}}:answer-bytes"

    @property
    def refused(self) -> str:
        """Key of the digests of requests under which engines died: a set sorted by expiry, in ms of
        Redis's clock.
        """
        return f"effuse:{{{self.fleet}}}:refused"

    @property
    def running(self) -> str:
        """Key of the sorted set of running request ids, by when their placements expire."""
        return f"effuse:{{{self.fleet}}}:running-until"

    @property
    def ended(self) -> str:
        """The same for ended requests, as many as are kept."""
        return f"effuse:{{{self.fleet}}}:ended-until"
