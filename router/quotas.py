"""What tenants have now, held against what they may have: requests at once, tokens a minute. A
request counts as often as it has answers.

Tokens are counted once a request has ended, whatever it came to, so one that begins within the
limit is never cut off, and the next ones wait until the minute has made up for it. No I/O; the
clock is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from effuse.protos.errors import InvalidRequest, Overloaded
from effuse.router.keys import Tenant

MINUTE_S = 60.0
AGAIN_S = 1.0


@dataclass(slots=True)
class Account:
    """Of one tenant. `spent` is of this minute: it falls by the limit in each minute, to 0."""

    running: int = 0
    spent: float = 0.0
    counted_at: float = 0.0


class Quotas:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._accounts: dict[str, Account] = {}

    def check(self, tenant: Tenant, num_answers: int = 1) -> None:
        """Raises `Overloaded` where a tenant may not begin another request for so many answers now,
        and `InvalidRequest` where it never may."""
        most = tenant.max_requests
        if most is not None and num_answers > most:
            found = f"expected at most {most}, as many requests as this key may have, got"
            raise InvalidRequest.of("n", f"{found} {num_answers}")
        account = self._accounts.get(tenant.name)
        if account is None:
            return
        self._let_time_pass(account, tenant)
        rate = tenant.tokens_per_minute
        if most is not None and account.running + num_answers > most:
            text = (
                f"{account.running} requests of this key's tenant run or wait, which is its limit"
            )
            raise Overloaded(text, retry_after_s=AGAIN_S)
        if rate is not None and account.spent >= rate:
            wait_s = (account.spent - rate) * MINUTE_S / rate + AGAIN_S
            text = f"the {rate} tokens a minute of this key's tenant are used up"
            raise Overloaded(text, retry_after_s=math.ceil(wait_s))

    @contextmanager
    def running(self, tenant: Tenant, num_answers: int = 1) -> Iterator[Callable[[int], None]]:
        """Counts a request, by its answers; gives what to tell its tokens to."""
        account = self._accounts.setdefault(tenant.name, Account(counted_at=self._now()))
        account.running += num_answers

        def spend(num_tokens: int) -> None:
            self._let_time_pass(account, tenant)
            account.spent += num_tokens

        try:
            yield spend
        finally:
            account.running -= num_answers
            self._let_time_pass(account, tenant)
            if not account.running and not account.spent:
                del self._accounts[tenant.name]

    def _let_time_pass(self, account: Account, tenant: Tenant) -> None:
        now = self._now()
        if tenant.tokens_per_minute is None:
            account.spent = 0.0
        else:
            gained = (now - account.counted_at) * tenant.tokens_per_minute / MINUTE_S
            account.spent = max(0.0, account.spent - gained)
        account.counted_at = now
