"""A worker's role as a value: the kinds of work that it accepts, and how that changes.

No I/O; the clock is an argument. A change takes effect at once. Work of a kind that the worker has
ceased to accept goes on to its end, or until it is handed over to other workers.
"""

import math
from dataclasses import dataclass
from typing import Final, get_args

from effuse.placement.records import Kind, Role
from effuse.protos.errors import InvalidRequest, OtherRole, Refused

ROLES: Final[tuple[Role, ...]] = get_args(Role)
AUTO: Final = "auto"
"""Leaves the role as it is, to the plans of routers."""
_RETRY_AFTER_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Duty:
    """The role of a worker at one moment."""

    role: Role
    may_change: bool = False
    hand_over_at: float = math.inf  # until when work of other kinds goes on
    is_pinned: bool = False  # an operator has set the role, and plans leave it
    changed_at: float = -math.inf  # when the role last became another one

    def does(self, kind: Kind) -> bool:
        """Whether the worker accepts work of this kind."""
        return self.role in (kind, "both")

    def check(self, kind: Kind | None) -> None:
        """Raises `OtherRole` for new work of a kind that it does not accept; None is accepted in
        every role.
        """
        if kind is not None and not self.does(kind):
            raise self.refusal(f"this worker accepts no {kind} requests now")

    def refusal(self, why: str) -> OtherRole:
        """The error on which a router chooses another worker."""
        text = f"{why}, because its role is {self.role}"
        return OtherRole(text, retry_after_s=_RETRY_AFTER_S, labels={"role": self.role})

    def changed(
        self, role: str, now: float, hand_over_s: float | None, *, is_planned: bool = False
    ) -> "Duty":
        """The role after a request for a change, by an operator or by a router's plan
        (`is_planned`). Work of other kinds goes on for `hand_over_s` seconds, or to its end if that
        is None. Raises `InvalidRequest`; `Refused` for a fixed role, and for a plan that would
        change an operator's role.
        """
        known = {one: one for one in ROLES} | ({} if is_planned else {AUTO: self.role})
        if (found := known.get(role)) is None:
            raise InvalidRequest.of(
                "role", f"expected one of {', '.join(known)}, got {role[:40]!r}"
            )
        if hand_over_s is not None and not hand_over_s >= 0:  # also NaN
            raise InvalidRequest.of("hand_over_s", f"expected 0 seconds or more, got {hand_over_s}")
        if found != self.role and not self.may_change:
            raise Refused(
                f"this worker is always a {self.role} worker; effuse-worker starts workers whose "
                "role may change",
                retryable=False,
            )
        if is_planned and self.is_pinned:
            raise Refused("an operator has set this worker's role", retryable=False)
        return Duty(
            found,
            self.may_change,
            hand_over_at=math.inf if hand_over_s is None else now + hand_over_s,
            is_pinned=self.may_change and not is_planned and role != AUTO,
            changed_at=self.changed_at if found == self.role else now,
        )

    def age_s(self, now: float) -> float | None:
        """Seconds since the role became another one; None if it never did."""
        return None if math.isinf(self.changed_at) else now - self.changed_at

    def wait_s(self, now: float) -> float | None:
        """Seconds until work of other kinds is handed over; None if it goes on to its end."""
        return None if math.isinf(self.hand_over_at) else max(0.0, self.hand_over_at - now)
