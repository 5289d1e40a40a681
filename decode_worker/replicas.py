"""Several decode engines in one: replicas with pages and requests of their own.

One forward has the steps of all. Requests of one call with equal prompts go to the same replica,
others to the replica with the least work.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor, Share
from effuse.models.part import Forward
from effuse.placement.records import Load
from effuse.worker import messages
from effuse.worker.messages import CoreEvent, StartDecode, ToEngine

if TYPE_CHECKING:
    from effuse.decode_worker.replica_steps import ReplicaSteps


_MOST_WRITERS: Final = 1 << 12  # whose turns are known


class JointForward:
    """One forward over the shares of several replicas, each with an executor of its own, and one
    step of their slots."""

    def __init__(self, forward: Forward, steps: "ReplicaSteps | None" = None) -> None:
        self._forward = forward
        self._steps = steps
        self._asked: list[tuple[Executor, Sequence[Share]]] = []

    def ask(self, executor: Executor, shares: Sequence[Share]) -> None:
        """The next `run` has these shares of the executor's requests."""
        self._asked.append((executor, shares))

    def run(self) -> bool:
        """Computes all shares that were asked for, gives each executor its results, and launches a
        step of the slots; False if there was nothing to do. Raises GroupBroken."""
        asked, self._asked = self._asked, []
        parts = [executor.parts_of(shares) for executor, shares in asked]
        flat = [part for of_one in parts for each in of_one for part in each]
        results = iter(self._forward.run(flat))
        for (executor, shares), own in zip(asked, parts, strict=True):
            executor.take(shares, own, results)
        has_stepped = self._steps is not None and self._steps.run()
        return bool(asked) or has_stepped


class ReplicatedEngine:
    """An EngineCore of the engines of all replicas, the leader's first."""

    def __init__(self, engines: Sequence[DecodeEngine], forward: JointForward) -> None:
        """`forward` is the one that the engines' executors ask."""
        self._engines = engines
        self._forward = forward
        self._rehearsals = Counter[str]()  # by writer

    def step(self) -> bool:
        """One iteration of every replica, and one forward over all of their shares."""
        has_changed = [engine.step() for engine in self._engines]
        has_run = self._forward.run()
        has_applied = [engine.apply() for engine in self._engines]
        return has_run or any(has_changed) or any(has_applied)

    def is_working(self) -> bool:
        return any(engine.is_working() for engine in self._engines)

    def handle(self, message: ToEngine) -> None:
        match message:
            case StartDecode():
                self._place(message).handle(message)
            case messages.StartRehearsal(writer=writer):
                if len(self._rehearsals) >= _MOST_WRITERS:
                    self._rehearsals.clear()
                turn = self._rehearsals[writer] % len(self._engines)
                self._rehearsals[writer] += 1
                self._engines[turn].handle(message)
            case messages.Abort(attempt=attempt):
                self._with(attempt.transfer_id).handle(message)
            case messages.WriterGone(transfer_id=transfer_id):
                self._with(transfer_id).handle(message)
            case _:
                self._engines[0].handle(message)

    def check(self, message: StartDecode) -> None:
        self._engines[0].check(message)

    def outbox(self) -> Sequence[CoreEvent]:
        return [event for engine in self._engines for event in engine.outbox()]

    def load(self) -> Load:
        """State and counters of all replicas together; a forward counts for each."""
        loads = [engine.load() for engine in self._engines]
        sums = {name: sum(getattr(one, name) for one in loads) for name in Load.__struct_fields__}
        return Load(**{**sums, "prompt_piece": max(one.prompt_piece for one in loads)})

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _with(self, transfer_id: str) -> DecodeEngine:
        """The replica of an attempt; the first one if none knows it."""
        found = (engine for engine in self._engines if engine.knows(transfer_id))
        return next(found, self._engines[0])

    def _place(self, message: StartDecode) -> DecodeEngine:
        """The replica for a request: one that knows it, or has its siblings, or the idlest."""
        for engine in self._engines:
            if engine.knows(message.attempt.transfer_id, message.group):
                return engine
        return min(self._engines, key=_work)


def _work(engine: DecodeEngine) -> tuple[int, int]:
    load = engine.load()
    return load.waiting, load.blocks_left
