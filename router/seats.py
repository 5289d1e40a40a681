"""Seats of the fleet for this router: the queue keeps step with the workers that are live.

Not here: the queue (`admission.py`), the choice of a worker (`policy.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from effuse.protos.errors import Unavailable
from effuse.router.admission import Admission
from effuse.router.catalogue import Catalogue
from effuse.router.fleet import RoutedFleet
from effuse.router.policy import Condition, Prospect
from effuse.router.request import Request

RETRY_AFTER_S: Final = 1.0
"""When clients should ask again after no worker could answer: about as long as a lease takes to
show."""


class Seats:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        fleet: RoutedFleet,
        catalogue: Catalogue,
        admission: Admission,
        now: Callable[[], float],
        recovery_s: float,
    ) -> None:
        """recovery_s: longest that a request waits for a worker."""
        self._fleet = fleet
        self._catalogue = catalogue
        self._admission = admission
        self._now = now
        self._recovery_s = recovery_s
        self._lacking_since: dict[str, float] = {}  # by model that requests in the queue ask for

    def count(self) -> bool:
        """Brings the queue in step with the decode workers that are live now. Returns whether there
        are other seats than before."""
        seats: dict[str, list[int]] = {}
        for one in self._fleet.candidates():
            if one.condition is Condition.READY and one.record.role == "decode":
                seats.setdefault(one.record.model.name, []).append(one.num_seats)
        return self._admission.fit_seats(seats)

    def can_serve(self, model: str | None = None) -> bool:
        """Whether a decode worker is live that can take some request, or one for `model`, with a
        prefill worker if those are required."""
        need, prospect = self._fleet.need, self._fleet.prospect
        models = [name for name in self._catalogue.live() if model in (None, name)]
        return any(prospect(need(name)) in (Prospect.NOW, Prospect.SEAT) for name in models)

    def give_up_waiting(self) -> None:
        """Refuses requests in the queue that no worker could take for `recovery_s`."""
        now = self._now()
        waiting = [name for name, num in self._admission.waiting_by_model().items() if num]
        lacking = [name for name in waiting if not self.can_serve(name)]
        self._lacking_since = {name: self._lacking_since.get(name, now) for name in lacking}
        for name, since in self._lacking_since.items():
            if now - since > self._recovery_s:
                missing = self._fleet.what_is_missing(self._fleet.need(name))
                text = f"no worker could begin within {self._recovery_s:.3g} s: {missing}"
                error = partial(Unavailable, text, retry_after_s=RETRY_AFTER_S)
                self._admission.give_up(name, now - self._recovery_s, error)

    def stalled_since(self, request: Request) -> float:
        """Returns since when a request that no worker can take now has waited for one."""
        now = self._now()
        if request.attempts.count:
            return now
        return max(request.arrived, self._lacking_since.get(request.asked.model.name, now))
