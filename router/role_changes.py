"""Which workers change their roles next, so that a plan comes true; `RoleDriver` asks them for it.

The choice is a pure function of the plan and of the workers' records. Workers that hand pages to
each other have equal fingerprints, so each such group gets its share of the plan. Some worker of a
group always goes on with each kind of work: not all of them prefill, and those that will prefill do
both until then.

Changes begin once the last ones are over. Of several routers only one asks for them
(`OtherRouters.driver_of`). Two that do it for a moment ask for much the same changes, and workers'
records show both of them when a role changed last.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from effuse.placement.records import Kind, Role, WorkerRecord
from effuse.protos.errors import EffuseError, Refused
from effuse.router.planner import Split
from effuse.router.policy import WorkerLife
from effuse.router.reasons import sustaining
from effuse.router.sizes import room_of
from effuse.router.steering import is_free

if TYPE_CHECKING:
    from effuse.router.router import Router

LOG: Final = logging.getLogger(__name__)

COOL_S: Final = 30.0
"""How long a worker keeps a new role: less than a phase of load that is worth a change."""
AT_ONCE: Final = 0.1
"""The share of all workers that may change at the same time; at least one may."""
SEEN_S: Final = 5.0
"""How long a changed worker may take to announce its role before others may change."""
RETRY_S: Final = 10.0
"""How long a worker is left as it is after it did not change."""
_MOST_NAMED: Final = 4


class Change(NamedTuple):
    """A worker, and the role that it should take."""

    worker: WorkerRecord
    role: Role


class RoleGroup(NamedTuple):
    """Workers with equal fingerprints, and how many of them should prefill for others."""

    workers: list[WorkerRecord]
    prefill: int

    @property
    def other_role(self) -> Role:
        """The role of those that do not: without prefill workers each does both."""
        return "decode" if self.prefill else "both"


def changes(
    plan: Split, records: Sequence[WorkerRecord], resting: Collection[WorkerLife] = ()
) -> list[Change]:
    """The next changes among the ready workers of one model, those of idle workers first.
    `resting`: workers that are left as they are for now."""
    found = [change for group in groups(plan, records) for change in _wanted(group, resting)]
    return sorted(found, key=_turn)[: max(1, int(AT_ONCE * len(records)))]


def groups(plan: Split, records: Sequence[WorkerRecord]) -> Iterator[RoleGroup]:
    """The workers by fingerprint, each group with its share of the plan's prefill workers."""
    by_text: dict[str, list[WorkerRecord]] = {}
    for record in records:
        by_text.setdefault(record.fingerprint_text, []).append(record)
    seen = given = 0
    for _, workers in sorted(by_text.items()):
        seen += len(workers)
        share = round(plan.prefill * seen / len(records)) - given
        given += share
        yield RoleGroup(workers, _within_reach(workers, share))


def is_cooling(record: WorkerRecord) -> bool:
    return record.role_age_s is not None and record.role_age_s < COOL_S


def why_not(plan: Split, records: Sequence[WorkerRecord]) -> list[str]:
    """The workers that the plan leaves as they are, with the reasons, as lines for an operator."""
    pinned = [one.worker_id for one in records if one.role_is_pinned]
    wanted = [one for group in groups(plan, records) for one in _wanted(group, (), waits=True)]
    cooling = [one.worker.worker_id for one in wanted if is_cooling(one.worker)]
    lines = []
    if cooling:
        lines.append(f"a role stays for {COOL_S:.0f} s before it changes again: {_named(cooling)}")
    if pinned:
        name = pinned[0]
        lines.append(
            f"an operator set the role of {_named(pinned)}; `effuse role {name} auto` frees it"
        )
    return lines


def _within_reach(workers: Sequence[WorkerRecord], prefill: int) -> int:
    """The number of prefill workers next to `prefill` that fixed roles allow, with one worker left
    for answers."""
    kept = [one for one in workers if not is_free(one)]
    least = sum(one.role == "prefill" for one in kept)
    most = len(workers) - max(1, len(kept) - least)
    return max(least, min(prefill, most))


def _wanted(
    group: RoleGroup, resting: Collection[WorkerLife], *, waits: bool = False
) -> Iterator[Change]:
    """All changes that a group lacks, the fewest; with `waits` also those of workers that cool.
    These do not wait either while no worker of the group does some kind of work."""
    kinds = {kind for kind in get_args(Kind) for one in group.workers if one.does(kind)}
    waits = waits or len(kinds) < len(get_args(Kind))
    free = [
        one
        for one in group.workers
        if is_free(one) and one.life not in resting and (waits or not is_cooling(one))
    ]
    most = max(map(room_of, group.workers))
    # If one has more room than all others, it goes on with answers: a request may need it.
    largest = [one for one in group.workers if room_of(one) == most]
    prefill = sorted(
        (one for one in free if one.role == "prefill"),
        key=lambda one: ([one] != largest, _load(one)),
    )
    others = sorted(
        (one for one in free if one.role != "prefill"),
        key=lambda one: ([one] == largest, one.role == group.other_role, _load(one)),
    )
    lacking = group.prefill - sum(one.role == "prefill" for one in group.workers)
    yield from (Change(one, "prefill") for one in others[: max(0, lacking)])
    yield from (Change(one, group.other_role) for one in prefill[: max(0, -lacking)])
    for one in others[max(0, lacking) :]:
        if one.role != group.other_role:
            yield Change(one, group.other_role)


def _turn(change: Change) -> tuple[bool, tuple[int, str]]:
    """Changes of the number of prefill workers first, and idle workers first."""
    return "prefill" not in (change.worker.role, change.role), _load(change.worker)


def _load(record: WorkerRecord) -> tuple[int, str]:
    load = record.load
    return load.running + load.waiting + record.num_leaving, record.worker_id


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    more = f" and {rest} others" if rest > 0 else ""
    return ", ".join(names[:_MOST_NAMED]) + more


class RoleDriver:
    def __init__(self, router: "Router") -> None:
        self._id, self._now = router.id, router.now
        self._steering, self._others = router.steering, router.seats.others
        self._peers, self._count = router.fleet.peers, router.metrics.plans.changes
        self._under_way: dict[WorkerLife, tuple[Change, float]] = {}  # until when they are awaited
        self._failed: dict[WorkerLife, tuple[str, float]] = {}  # why, and until when they rest

    async def step(self) -> None:
        for name, one in list(self._steering.models.items()):
            plan, records, one.notes = one.due, one.records, ()
            if plan is None:
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
        why = sustaining(plan) if plan.rate else "no worker does some kind of work"
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
