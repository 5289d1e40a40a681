"""Which workers change their roles next, so that a plan comes true.

Pure: a function of the plan and of the workers' records. Workers that hand pages to each other
have equal fingerprints, so each such group gets its share of the plan. Some worker of a group
always goes on with each kind of work: not all of them prefill, and those that will prefill do both
until then.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, get_args

from effuse.placement.records import Kind, Role, WorkerRecord
from effuse.router.planner import Split
from effuse.router.policy import WorkerLife

COOL_S: Final = 30.0
"""How long a worker keeps a new role: less than a phase of load that is worth a change."""
AT_ONCE: Final = 0.1
"""The share of all workers that may change at the same time; at least one may."""
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


def fixed(records: Sequence[WorkerRecord]) -> tuple[int, int]:
    """How many workers keep their roles: those that prefill, and the others. If all do, no plan can
    be carried out, and a plan for other workers is advice: 0 and 0."""
    kept = [one for one in records if not _is_free(one)]
    if len(kept) == len(records):
        return 0, 0
    num_prefill = sum(one.role == "prefill" for one in kept)
    return num_prefill, len(kept) - num_prefill


def _is_free(record: WorkerRecord) -> bool:
    return record.may_change_role and not record.role_is_pinned


def is_cooling(record: WorkerRecord) -> bool:
    """Whether its role changed so recently that it stays."""
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
    kept = [one for one in workers if not _is_free(one)]
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
        if _is_free(one) and one.life not in resting and (waits or not is_cooling(one))
    ]
    prefill = sorted((one for one in free if one.role == "prefill"), key=_load)
    others = sorted(
        (one for one in free if one.role != "prefill"),
        key=lambda one: (one.role == group.other_role, _load(one)),
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
