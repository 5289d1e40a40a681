"""The plans of a router: they follow the load, and do not oscillate.

Two plans for each model. *Roles* is the best split of the present workers. *Desired* is the fewest
workers that sustain the load with room, for a scaler. A plan changes only if another is better by
`GAIN` for a while; so noise in a steady load changes nothing. Pure: no I/O; `now` is a monotonic
clock in seconds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Final

from msgspec.structs import replace

from effuse.config.decoding import WITHIN
from effuse.placement.records import WorkerRecord
from effuse.router.measures import Goals, LoadLog, Measured
from effuse.router.planner import (
    HEADROOM,
    MOST_WORKERS,
    Objectives,
    Planner,
    Split,
    Workload,
)
from effuse.router.policy import Candidate, Condition, PrefillMode
from effuse.router.reasons import needed, reasons

LOOK_S: Final = 1.0
"""How often plans are made."""
GAIN: Final = 0.1
"""Share by which a plan has to be better."""
AFTER_S: Final = 10.0
"""How long it has to be better: for other roles, and for more workers."""
SHRINK_S: Final = 20.0
"""The same for fewer workers."""
FULL: Final = 0.95
FULL_GAIN: Final = 0.05
FULL_AFTER_S: Final = 120.0
"""The share of its rate at which a fleet is full, and by how much and how long a plan has to be
better then. Requests that other roles would sustain are late, so less is enough."""
BUSY: Final = 0.6
"""Share of the load that present roles sustain, below which they stay: others would gain nothing.
"""
ENDED_S: Final = 600.0
"""How long a model has no worker and no request before it counts as one that is not served any
more. Then a scaler gets no figure of it."""
LEAST_RATE: Final = 1e-6
"""Requests a second for which a fleet without load is planned."""


@dataclass(slots=True)
class HeldPlan:
    """A plan that waits before it changes."""

    plan: Split | None = None
    better_since: float | None = None
    towards: int = 0  # 1: what has been better has more workers, or more of them prefill; -1: fewer

    def follow(self, wanted: Split, now: float, after_s: float | None) -> None:
        """Takes `wanted` once it, or others in its direction, have been better for `after_s`
        seconds; None: it is not better."""
        if after_s is None:
            self.better_since = None
            return
        towards = self._direction(wanted)
        if self.better_since is None or towards != self.towards:
            self.better_since, self.towards = now, towards
        if now - self.better_since >= after_s:
            self.plan, self.better_since = wanted, None

    def _direction(self, wanted: Split) -> int:
        if (held := self.plan) is None:
            return 0
        more = wanted.workers - held.workers or wanted.prefill - held.prefill
        return (more > 0) - (more < 0)


@dataclass(slots=True)
class ModelPlan:
    """One model: its measurements, and its plans once there are enough of them."""

    mode: PrefillMode = "auto"
    load: LoadLog = field(default_factory=LoadLog)
    measured: Measured = field(default_factory=Measured)
    workload: Workload | None = None  # of this router
    planner: Planner | None = None
    roles: HeldPlan = field(default_factory=HeldPlan)
    desired: HeldPlan = field(default_factory=HeldPlan)
    records: Sequence[WorkerRecord] = ()  # of its ready workers
    notes: Sequence[str] = ()  # how its roles are carried out, for operators
    used_s: float = 0.0  # when it last had a worker or a request

    @property
    def due(self) -> Split | None:
        """The roles to carry out. Before there is a plan only one worker for a kind of work that
        requests lack: without answers nothing is measured, so no plan would ever be made."""
        if self.planner is not None:
            return self.roles.plan
        records, rest = self.records, len(self.records) - 1
        if records and not any(one.does("decode") for one in records):
            return Split(rest, 1)
        needs_prefill = self.mode == "remote" and rest > 0
        if needs_prefill and not any(one.does("prefill") for one in records):
            return Split(1, rest)
        return None

    def follow(self, present: tuple[int, int], now: float, fixed: tuple[int, int] = (0, 0)) -> None:
        """Moves both plans on. `present`: the prefill and decode workers that there are; `fixed`:
        how many of each keep their roles."""
        if self.planner is None:
            return
        self._follow_roles(self.planner.within_reach(sum(present)), present, now, fixed)
        self._follow_desired(self.planner, now)

    def _follow_roles(
        self, planner: Planner, present: tuple[int, int], now: float, fixed: tuple[int, int]
    ) -> None:
        held, total = self.roles, sum(present)
        plan = held.plan or Split(*present)
        if plan.workers != total or any(map(gt, fixed, plan.roles)):
            plan = _carried_over(planner, plan, present, fixed)
        held.plan = planner.split(*plan.roles)
        if not total:
            return
        wanted = planner.best(total, fixed=fixed)
        rate = planner.workload.rate
        is_busy = rate > BUSY * held.plan.rate
        is_full = rate > FULL * held.plan.rate
        gain = wanted.rate / max(LEAST_RATE, held.plan.rate) - 1
        after_s = None
        if is_busy and gain > GAIN:
            after_s = AFTER_S
        elif is_full and gain > FULL_GAIN:
            after_s = FULL_AFTER_S
        held.follow(wanted, now, after_s)

    def _follow_desired(self, planner: Planner, now: float) -> None:
        held, rate = self.desired, max(LEAST_RATE, planner.workload.rate) / HEADROOM
        rate = min(rate, planner.within_reach().best(MOST_WORKERS).rate)  # what workers sustain
        planner = planner.within_cost(rate)
        if held.plan is None:
            held.plan = planner.least(rate)
        held.plan = planner.split(*held.plan.roles)
        after_s, roomy = None, (1 + GAIN) * rate
        if rate > (1 + GAIN) * held.plan.rate:
            after_s = AFTER_S
        elif held.plan.workers > 1 and planner.best(held.plan.workers - 1, roomy).rate >= roomy:
            after_s = SHRINK_S
        held.follow(held.plan if after_s is None else planner.least(rate), now, after_s)

    def lines(self) -> list[str]:
        if self.planner is None or self.roles.plan is None or self.desired.plan is None:
            return ["no plan yet: too few prompts or gaps have been measured", *self.notes]
        return [
            *reasons(self.planner, self.roles.plan),
            needed(self.desired.plan),
            *self.notes,
        ]


def _carried_over(
    planner: Planner, plan: Split, present: tuple[int, int], fixed: tuple[int, int]
) -> Split:
    """The plan once workers have come or gone: the present roles, or those of the same ratio if
    these sustain clearly more. So a host that ends or is back takes no new decision."""
    total = sum(present)
    prefill = round(plan.prefill * total / max(1, plan.workers))
    prefill = max(fixed[0], min(prefill, total - max(fixed[1], 1)))
    if (
        total < 2
        or planner.split(prefill, total - prefill).rate
        <= (1 + GAIN / 2) * planner.split(*present).rate
    ):
        return Split(*present)
    return Split(prefill, total - prefill)


class Steering:
    """One per router. `others` returns the workload of a model at other routers."""

    def __init__(
        self,
        objectives: Objectives,
        mode: PrefillMode,
        now: Callable[[], float],
        others: Callable[[str], Iterable[Workload]] = lambda model: (),
        *,
        carries_out: bool = True,
    ) -> None:
        """carries_out: whether this router may change the roles of workers."""
        self.models: dict[str, ModelPlan] = {}
        self.carries_out = carries_out
        self._objectives = objectives
        self._gap_limit_s = objectives.gap_limit_s(())  # before any gap is measured
        self._mode: PrefillMode = mode
        self._now = now
        self._others = others
        self._looked_at = float("-inf")

    def of(self, model: str) -> ModelPlan:
        """The plan of a model that a request names."""
        one = self.models.setdefault(model, ModelPlan(self._mode))
        one.used_s = self._now()
        return one

    def goals(self, model: str) -> Goals:
        """The router's objectives for one request: a relative gap is of those measured so far. One
        that no request may ask for counts as none."""
        planner = self.of(model).planner
        limit_s = self._gap_limit_s if planner is None else planner.gap_limit_s
        limit_s = limit_s if limit_s in WITHIN else math.inf
        return Goals(self._objectives.first_block_s or math.inf, limit_s)

    def prompt_s(self, model: str, tokens: int) -> float | None:
        """Seconds in which a worker without answers computes a prompt, once that is known."""
        planner = self.of(model).planner
        return None if planner is None else planner.times.prompt_s(tokens)

    def workloads(self) -> dict[str, Workload]:
        return {name: one.workload for name, one in self.models.items() if one.workload is not None}

    def steered(self) -> tuple[str, ...]:
        """The models for which this router has roles to carry out."""
        named = self.models.items() if self.carries_out else ()
        return tuple(name for name, one in named if one.due is not None)

    def look(self, candidates: Sequence[Candidate], waiting: Mapping[str, int]) -> bool:
        """Reads the loads of workers, and makes plans if it is time. Returns whether it was."""
        now = self._now()
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        ready = [c.record for c in candidates if c.condition is Condition.READY]
        for name, one in list(self.models.items()):
            records = [record for record in ready if record.model.name == name]
            if records or waiting.get(name):
                one.used_s = now
            elif now - one.used_s > ENDED_S:
                del self.models[name]
                continue
            one.measured.keep_lives([record.life for record in records])
            one.workload = one.load.workload(
                now, hits=one.measured.hits, waiting=waiting.get(name, 0)
            )
            one.planner = self._planner(name, one, records)
            one.records = records
            num_prefill = sum(record.role == "prefill" for record in records)
            one.follow((num_prefill, len(records) - num_prefill), now, fixed(records))
        return True

    def _planner(
        self, name: str, one: ModelPlan, records: Sequence[WorkerRecord]
    ) -> Planner | None:
        workload = _sum_of([*([one.workload] if one.workload else ()), *self._others(name)])
        times = one.measured.times(_piece(records), _link_rate(records))
        if workload is None or not times.are_known:
            return None
        return Planner(times, workload, self._objectives, self._mode)


def fixed(records: Sequence[WorkerRecord]) -> tuple[int, int]:
    """How many workers keep their roles: those that prefill, and the others. If all do, no plan can
    be carried out, and a plan for other workers is advice: 0 and 0."""
    kept = [one for one in records if not is_free(one)]
    if len(kept) == len(records):
        return 0, 0
    num_prefill = sum(one.role == "prefill" for one in kept)
    return num_prefill, len(kept) - num_prefill


def is_free(record: WorkerRecord) -> bool:
    """Whether plans may change its role."""
    return record.may_change_role and not record.role_is_pinned


def _sum_of(workloads: Sequence[Workload]) -> Workload | None:
    """The load of several routers together."""
    if not workloads:
        return None
    weights = [max(LEAST_RATE, one.rate) for one in workloads]

    def mean(values: Iterable[float]) -> float:
        return sum(w * one for w, one in zip(weights, values, strict=True)) / sum(weights)

    return replace(
        workloads[0],
        rate=sum(one.rate for one in workloads),
        prompt=mean(one.prompt for one in workloads),
        answer=mean(one.answer for one in workloads),
    )


def _piece(records: Sequence[WorkerRecord]) -> float:
    """Most prompt tokens in a forward of a decode worker; 0 if prompts cannot be cut."""
    decoders = [one for one in records if one.may_ever_decode]
    if any(one.model.prompt_attention == "bidirectional" for one in decoders):
        return 0.0
    return float(max((one.capacity.max_num_batched_tokens for one in decoders), default=0))


def _link_rate(records: Sequence[WorkerRecord]) -> float:
    """The mean rate of measured links, in bytes a second; 0 if there is none."""
    rates = [link.bytes_per_second for one in records for link in one.links]
    rates = [rate for rate in rates if rate > 0]
    return sum(rates) / len(rates) if rates else 0.0
