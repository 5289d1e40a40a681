"""Tenants of a router: the owners of calls, their limits, and their turns.

Keys are a file of hashes, read again when it changes. A line is `tenant sha256 [requests=N]
[tokens_per_minute=N]`, written by `effuse token`. A tenant may have several lines, and the first
one with limits sets them. A hash of a token of 256 random bits cannot be guessed back, so a reader
of the file gains no access.

Tokens are counted once a request has ended, however it ended. So a request that begins within the
limit is never cut off, and the next ones wait until the minute has made up for it. A request counts
as often as it has answers that have not ended.

Turns among tenants go by tokens, too. Not here: how long the queue may be, and which requests need
not wait in it (`admission.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import secrets
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Final

from effuse.protos.errors import InvalidRequest, Overloaded, Unauthenticated
from effuse.protos.gate import CALLER, NEEDS_CREDENTIALS
from effuse.protos.tls import Renewal

LOG: Final = logging.getLogger(__name__)
AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer "
LONGEST_TOKEN: Final = 512
_LINE: Final = re.compile(
    r"(?P<tenant>[A-Za-z0-9][A-Za-z0-9._-]{0,63})\s+(?P<digest>[0-9a-f]{64})"
    r"(?:\s+requests=(?P<requests>[1-9]\d{0,8}))?"
    r"(?:\s+tokens_per_minute=(?P<tokens>[1-9]\d{0,11}))?"
)
MINUTE_S = 60.0
AGAIN_S = 1.0
QUOTA: Final = "quota"
"""Label of an error: the caller's own limits refuse it, and not the load of the fleet."""
QUANTUM: Final = 256
"""Tokens that a tenant may spend in a turn: an answer of the length that is usual."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of keys, and its limits at any time; None is no limit of its own."""

    name: str
    max_requests: int | None = None  # queued or on workers
    tokens_per_minute: int | None = None  # of prompts and answers


NOBODY: Final = Tenant("")
"""The caller of a router that knows no keys."""


def make_token() -> str:
    return f"effuse-{secrets.token_urlsafe(32)}"


def line_of(token: str, tenant: Tenant) -> str:
    """The line by which a router knows a token. Raises ValueError for a tenant's name that is
    none."""
    limits = (("requests", tenant.max_requests), ("tokens_per_minute", tenant.tokens_per_minute))
    fields = [f" {name}={limit}" for name, limit in limits if limit is not None]
    line = f"{tenant.name} {_digest(token).hex()}{''.join(fields)}"
    parse_keys(line)
    return line


def parse_keys(text: str) -> dict[bytes, Tenant]:
    """Tenants by the digests of their tokens. Raises ValueError naming the line at fault."""
    found: dict[bytes, Tenant] = {}
    tenants: dict[str, Tenant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (entry := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"line {number}: expected `tenant sha256 [requests=N] [tokens_per_minute=N]`"
            )
        limits = [None if one is None else int(one) for one in match.group("requests", "tokens")]
        name = match["tenant"]
        before = tenants.get(name, Tenant(name))
        if before == Tenant(name):
            tenants[name] = Tenant(name, *limits)
        found[bytes.fromhex(match["digest"])] = tenants[name]
    return {digest: tenants[tenant.name] for digest, tenant in found.items()}


class KeyRing:
    """The keys in one file; accepts calls with a token of one. Implements `gate.Doorkeeper`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be used."""

        def stamp() -> tuple[tuple[int, int, int], ...]:
            state = path.stat()
            return ((state.st_ino, state.st_size, state.st_mtime_ns),)

        kept = "keeping the previous keys: %s"
        try:
            self._keys = Renewal(path, stamp, lambda: parse_keys(path.read_text()), kept)
        except ValueError as error:
            raise OSError(f"--keys: {path}: {error}") from error

    def tenant(self, name: str) -> Tenant:
        """The limits of a tenant; one that is gone from the file has none."""
        return next((one for one in self._keys.found.values() if one.name == name), Tenant(name))

    def admit(self, shown: dict[str, str | bytes]) -> None:
        """Notes whose call it is; raises `Unauthenticated`."""
        given = shown.get(AUTHORIZATION)
        if not (isinstance(given, str) and given[: len(SCHEME)].lower() == SCHEME):
            raise Unauthenticated(NEEDS_CREDENTIALS)
        tenant = self.find(given[len(SCHEME) :].strip())
        if tenant is None:
            raise Unauthenticated(NEEDS_CREDENTIALS)
        CALLER.set(tenant.name)

    def find(self, token: str) -> Tenant | None:
        """The owner of a token. Takes the same time for any unknown token."""
        if len(token) > LONGEST_TOKEN:
            return None
        self._keys.look()
        digest, found = _digest(token), None
        for known, tenant in self._keys.found.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _beyond_quota(text: str, wait_s: float) -> Overloaded:
    return Overloaded(text, retry_after_s=wait_s, labels={QUOTA: "true"})


@dataclass(slots=True)
class Account:
    """Of one tenant. `spent` is of this minute: it falls by the limit in each minute, to 0."""

    num_requests: int = 0  # that have not ended; all of their answers may have
    running: int = 0
    spent: float = 0.0
    counted_at: float = 0.0


class QuotaShare:
    """The part of a tenant's account that a request uses."""

    __slots__ = ("_account", "_quotas", "_tenant", "num_answers", "num_tokens")

    def __init__(self, quotas: Quotas, tenant: Tenant, num_answers: int) -> None:
        self._quotas, self._tenant = quotas, tenant
        self._account = Account()
        self.num_answers = num_answers  # that have not ended
        self.num_tokens = 0  # of its prompt and its answers, which count once it has ended

    def __enter__(self) -> QuotaShare:
        self._account = self._quotas.account(self._tenant)
        self._account.num_requests += 1
        self._account.running += self.num_answers
        return self

    def __exit__(self, *error: object) -> None:
        self.end_answers(self.num_answers)
        self._quotas.end_request(self._tenant, self._account, self.num_tokens)

    def check(self) -> None:
        """Raises `Overloaded` if others that were let in at the same moment leave no room."""
        self._quotas.check_room(self._tenant, self._account, 0, self.num_answers)

    def end_answers(self, count: int) -> None:
        self.num_answers -= count
        self._account.running -= count


class Quotas:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._accounts: dict[str, Account] = {}

    def check(self, tenant: Tenant, num_answers: int = 1, field: str = "n") -> None:
        """Raises `Overloaded` if a tenant may not begin another request for so many answers now,
        and `InvalidRequest`, which names `field`, if it never may."""
        most = tenant.max_requests
        if most is not None and num_answers > most:
            found = f"expected at most {most} answers, the limit of requests for this key, got"
            raise InvalidRequest.of(field, f"{found} {num_answers}")
        account = self._accounts.get(tenant.name)
        if account is None:
            return
        self._let_time_pass(account, tenant)
        rate = tenant.tokens_per_minute
        self.check_room(tenant, account, num_answers, num_answers)
        if rate is not None and account.spent >= rate:
            wait_s = (account.spent - rate) * MINUTE_S / rate + AGAIN_S
            text = f"this key's tenant has used its {rate} tokens a minute"
            raise _beyond_quota(text, math.ceil(wait_s))

    def check_room(self, tenant: Tenant, account: Account, more: int, num_answers: int) -> None:
        """Raises `Overloaded` if `more` answers beside those that are counted are too many for a
        tenant, because of a request for `num_answers`."""
        most, running = tenant.max_requests, account.running + more
        if most is not None and running > most:
            own = "" if num_answers == 1 else f", and this request counts as {num_answers}"
            others = f"{running - num_answers} requests of this key's tenant run or wait{own}"
            raise _beyond_quota(f"{others}; its limit is {most}", AGAIN_S)

    def running(self, tenant: Tenant, num_answers: int = 1) -> QuotaShare:
        """Counts a request within `with`, by its answers."""
        return QuotaShare(self, tenant, num_answers)

    def account(self, tenant: Tenant) -> Account:
        return self._accounts.setdefault(tenant.name, Account(counted_at=self._now()))

    def end_request(self, tenant: Tenant, account: Account, num_tokens: int) -> None:
        account.num_requests -= 1
        self._let_time_pass(account, tenant)
        if tenant.tokens_per_minute is not None:
            account.spent += num_tokens
        if not account.num_requests and not account.spent:
            del self._accounts[tenant.name]

    def _let_time_pass(self, account: Account, tenant: Tenant) -> None:
        now = self._now()
        if tenant.tokens_per_minute is None:
            account.spent = 0.0
        else:
            gained = (now - account.counted_at) * tenant.tokens_per_minute / MINUTE_S
            account.spent = max(0.0, account.spent - gained)
        account.counted_at = now


@dataclass(slots=True, eq=False)
class Turn:
    """One request in the queue of a model."""

    tenant: str
    cost: int  # tokens of its answers at most
    comes: asyncio.Future[None]
    place: float = 0.0  # of the same tenant those of smaller places go first
    num_answers: int = 1  # what it counts as
    since: float = 0.0  # when it began to wait


@dataclass(slots=True)
class _Line:
    """What one tenant waits with, the next one first, what that counts as, and tokens that it has
    saved."""

    waiting: list[Turn] = field(default_factory=list)
    length: int = 0
    saved: int = 0


class FairQueue:
    """Turns of tenants, each with a cost in tokens, and counted as one or several.

    Each tenant in turn may spend `QUANTUM` tokens, and saves the rest of them while it waits. So
    all get the same share of tokens, however many requests each has, and however long they are. M.
    Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", 1996."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}  # none is empty
        self._turns: deque[str] = deque()  # the tenant whose turn it is stands first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def turns(self) -> list[Turn]:
        return [one for line in self._lines.values() for one in line.waiting]

    def length_of(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else line.length

    def count_beyond(self, most: int) -> int:
        return sum(max(0, line.length - most) for line in self._lines.values())

    def ahead_of(self, tenant: str, place: float, count: int = 1) -> int:
        """The count of the items that would be taken out before another one, if the cost of each is
        its count: those of its tenant with no larger place, and of each other tenant as many as of
        its own and the other one's count together."""
        line = self._lines.get(tenant)
        before = () if line is None else line.waiting
        own = sum(one.num_answers for one in before if one.place <= place)
        others = (one.length for name, one in self._lines.items() if name != tenant)
        return own + sum(min(length, own + count) for length in others)

    def longest(self) -> str:
        """The tenant with most in it; of an empty queue there is none (ValueError)."""
        return max(self._lines, key=self.length_of)

    def push(self, turn: Turn) -> None:
        """Adds a turn behind those of its tenant that have no larger place; one that costs less
        than a token costs one."""
        line = self._lines.get(turn.tenant)
        if line is None:
            line = self._lines[turn.tenant] = _Line()
            self._turns.append(turn.tenant)
        turn.cost = max(1, turn.cost)
        insort(line.waiting, turn, key=attrgetter("place"))  # behind its equals
        line.length += turn.num_answers
        self._size += turn.num_answers

    def pop(self) -> Turn:
        """Takes out the next turn. Raises IndexError if there is none."""
        while True:
            tenant = self._turns[0]
            line = self._lines[tenant]
            first = line.waiting[0]
            if first.cost <= line.saved:
                line.saved -= first.cost
                del line.waiting[0]
                self._forget(first)
                return first
            line.saved += QUANTUM
            self._turns.rotate(-1)

    def pop_last(self, tenant: str) -> Turn:
        """Takes out the last turn of a tenant. Raises KeyError if it has none."""
        last = self._lines[tenant].waiting.pop()
        self._forget(last)
        return last

    def remove(self, turn: Turn) -> bool:
        try:
            self._lines[turn.tenant].waiting.remove(turn)
        except (KeyError, ValueError):
            return False
        self._forget(turn)
        return True

    def _forget(self, turn: Turn) -> None:
        """A turn has gone. A tenant without turns saves nothing."""
        line = self._lines[turn.tenant]
        self._size -= turn.num_answers
        line.length -= turn.num_answers
        if not line.waiting:
            del self._lines[turn.tenant]
            self._turns.remove(turn.tenant)
