"""Device steps of replicas: each has slots of its own, and a step advances those of all."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from effuse.decode_worker.device_buckets import Forecast, Integers, Need
from effuse.decode_worker.device_stepper import DeviceStepper, Launched
from effuse.worker.rank_messages import ForReplica, GrowSlot, JoinSlot, LeaveSlot, Slots
from effuse.worker.ranks import Ranks


class ReplicaStepper:
    """One replica's slots, with the methods of a `DeviceStepper`. `launch` only asks for a step,
    which `ReplicaSteps.run` launches for all replicas."""

    num_sharing = 0

    def __init__(self, device: DeviceStepper, ranks: Ranks, replica: int) -> None:
        """`device` is replica 0's, in this process; other replicas are `ranks`."""
        self.layout, self.step = device.layout, device.step
        self.forecast = Forecast(device.layout)
        self.asks = False
        self._device = device
        self._ranks = ranks
        self._replica = replica
        self._taken: set[int] = set()  # slots with a request
        self._unread: deque[Launched] = deque()

    @property
    def num_ahead(self) -> int:
        return len(self._unread)

    @property
    def is_full(self) -> bool:
        """Whether a step must be launched that was asked for, or read, before the next one."""
        return self.asks or self.num_ahead > 1

    @property
    def is_empty(self) -> bool:
        return not self._taken

    def join(self, slot: int, row: Integers, boundary: Tensor | None = None) -> None:
        """`DeviceStepper.join`; replicas have no boundary vectors."""
        assert boundary is None, "models whose logits are shifted have no replicas"
        self._execute(JoinSlot(slot, row.tobytes(), has_boundary=False))
        self.forecast.join(slot, row)
        self._taken.add(slot)

    def leave(self, slot: int) -> None:
        self._execute(LeaveSlot(slot))
        self.forecast.leave(slot)
        self._taken.discard(slot)

    def grow(self, slot: int, first: int, pages: Integers, storable: int) -> None:
        self._execute(GrowSlot(slot, first, pages.tobytes(), storable))

    def launch(self) -> None:
        self.asks = True

    def take(self, launched: Launched) -> None:
        """A step was launched that advances this replica's slots."""
        self._unread.append(launched)
        self.forecast.launched()

    def has_ended(self) -> bool:
        """Whether the oldest launched step has ended, so that `read` does not wait."""
        return self._unread[0].has_ended()

    def read(self) -> Integers:
        """Records [S, record_width] of the oldest launched step; waits only for that step."""
        self._ranks.confirm()
        records: Integers = self._unread.popleft().read()[self._replica]
        self.forecast.read(records, is_last=not self._unread)
        return records

    def _execute(self, command: Slots) -> None:
        if self._replica:
            self._ranks.send(ForReplica(self._replica, command))
        else:
            self._device.execute(command)


class ReplicaSteps:
    """The slots of all replicas. A step is as large on each as the fullest one needs, so that all
    of them replay graphs of the same sizes."""

    def __init__(self, device: DeviceStepper, ranks: Ranks, num_replicas: int) -> None:
        self.of = [ReplicaStepper(device, ranks, number) for number in range(num_replicas)]
        self._device = device
        self._ranks = ranks

    def run(self) -> bool:
        """Launches a step if a replica has asked for one, and none has two steps to read; False if
        it did not. Replicas that have not asked advance as well."""
        busy = [one for one in self.of if not one.is_empty]
        if not any(one.asks for one in self.of) or any(one.num_ahead > 1 for one in busy):
            return False
        for one in self.of:
            one.asks = False
        if not busy:
            return False
        launched = self._device.enqueue(_most([one.forecast.need() for one in busy]), self._ranks)
        for one in busy:
            one.take(launched)
        return True


def _most(needs: Sequence[Need]) -> Need:
    """A need that covers each of these."""
    return Need(
        rows=max(need.rows for need in needs),
        candidates=max(need.candidates for need in needs),
        context=max(need.context for need in needs),
        least_rows=max(need.least_rows for need in needs),
        least_candidates=max(need.least_candidates for need in needs),
        filters=any(need.filters for need in needs),
    )
