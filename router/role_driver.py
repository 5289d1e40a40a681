"""Carries out the plans of roles: asks workers for the changes of `role_changes.py`.

Changes begin once the last ones are over. Of several routers only one does this
(`OtherRouters.driver_of`). Two that do it for a moment ask for much the same changes, and workers'
records show both of them when a role changed last.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from effuse.placement.records import WorkerRecord
from effuse.protos.errors import EffuseError, Refused
from effuse.router.planner import Split, named
from effuse.router.policy import WorkerLife
from effuse.router.role_changes import Change, changes, why_not

if TYPE_CHECKING:
    from effuse.router.router import Router

LOG: Final = logging.getLogger(__name__)

SEEN_S: Final = 5.0
"""How long a changed worker may take to announce its role before others may change."""
RETRY_S: Final = 10.0
"""How long a worker is left as it is after it did not change."""


class RoleDriver:
    def __init__(self, router: "Router") -> None:
        self._id, self._now = router.id, router.now
        self._steering, self._others = router.steering, router.seats.others
        self._peers, self._count = router.fleet.peers, router.metrics.plans.changes
        self._under_way: dict[WorkerLife, tuple[Change, float]] = {}  # until when they are awaited
        self._failed: dict[WorkerLife, tuple[str, float]] = {}  # why, and until when they rest

    async def step(self) -> None:
        for name, one in list(self._steering.models.items()):
            plan, records = one.roles.plan, one.records
            if plan is None or one.planner is None:
                continue
            one.notes = self._why_idle(name, records)
            if not one.notes:
                await self._carry_out(plan, records)
                one.notes = self._notes(plan, records)

    def _why_idle(self, model: str, records: Sequence[WorkerRecord]) -> list[str]:
        """Why this router changes nothing for a model, in a line; empty if it may."""
        if not any(one.may_change_role for one in records):
            return ["no worker may change its role"]
        if not self._steering.carries_out:
            return ["this router changes no roles, because of --no-steering"]
        driver = self._others.driver_of(model)
        if driver != self._id:
            return [f"{driver} changes the roles" if driver else "no roles change without Redis"]
        return []

    async def _carry_out(self, plan: Split, records: Sequence[WorkerRecord]) -> None:
        now = self._now()
        self._forget(records, now)
        if any(one.life in self._under_way for one in records):
            return
        resting = [life for life, (_, until) in self._failed.items() if until > now]
        why = f"{named(plan)} bear {plan.rate:.3g} requests a second"
        asked = changes(plan, records, resting)
        await asyncio.gather(*(self._change(one, why) for one in asked))

    def _forget(self, records: Sequence[WorkerRecord], now: float) -> None:
        """Forgets changes that are over: seen, too late, or of a worker that is gone."""
        roles = {one.life: one.role for one in records}
        model = records[0].model.name if records else ""
        for life, (change, until) in list(self._under_way.items()):
            is_seen = roles.get(life) in (None, change.role)
            if change.worker.model.name == model and (is_seen or until <= now):
                del self._under_way[life]
        for life, (_, until) in list(self._failed.items()):
            if until + RETRY_S <= now:
                del self._failed[life]

    async def _change(self, change: Change, why: str) -> None:
        worker, role = change
        try:
            await self._peers.set_role(worker, role)
        except EffuseError as error:
            result = "refused" if isinstance(error, Refused) else "failed"
            self._note_failure(worker, error.message)
        else:
            result = "ok"
            self._under_way[worker.life] = change, self._now() + SEEN_S
            self._failed.pop(worker.life, None)
            LOG.info("%s is now %s, and was %s: %s", worker.worker_id, role, worker.role, why)
        self._count.labels(worker.model.name, role, result).inc()

    def _note_failure(self, worker: WorkerRecord, why: str) -> None:
        before, _ = self._failed.get(worker.life, ("", 0.0))
        if why != before:
            LOG.warning("the role of %s stays %s: %s", worker.worker_id, worker.role, why)
        self._failed[worker.life] = why, self._now() + RETRY_S

    def _notes(self, plan: Split, records: Sequence[WorkerRecord]) -> list[str]:
        lives = {one.life: one.worker_id for one in records}
        return [
            "this router changes the roles",
            *(
                f"{change.worker.worker_id} changes from {change.worker.role} to {change.role}"
                for life, (change, _) in self._under_way.items()
                if life in lives
            ),
            *why_not(plan, records),
            *(
                f"the role of {lives[life]} stays for now: {why}"
                for life, (why, _) in self._failed.items()
                if life in lives
            ),
        ]
