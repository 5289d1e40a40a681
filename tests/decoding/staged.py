"""Forwards of a pipeline in one process, and a decode engine over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from decoding.engines import Rig
from effuse.decode_worker.executor import Executor
from effuse.models.part import Forward, Part, PartResult

Event = tuple[Literal["begin", "end"], int]


@dataclass
class Stages:
    """A `Pipeline` whose first stage writes at the begin of a forward, and its last one at the end:
    here both write all layers. So pages that change hands between would spoil others."""

    forward: Forward
    most_begun: int = 2
    events: list[Event] = field(default_factory=list)
    parts: list[Sequence[Part]] = field(default_factory=list)  # of all forwards

    def num_parts(self, _num_requests: int) -> int:
        return self.most_begun

    def begin(self, parts: Sequence[Part]) -> int:
        self.forward.run(parts)
        self.parts.append(parts)
        self.events.append(("begin", len(self.parts) - 1))
        return len(self.parts) - 1

    def end(self, begun: int) -> list[PartResult]:
        self.events.append(("end", begun))
        return self.forward.run(self.parts[begun])

    def under_way(self) -> list[list[int]]:
        """The forwards that had begun and not ended, after each event."""
        found: list[list[int]] = []
        for kind, number in self.events:
            before = found[-1] if found else []
            if kind == "end":
                assert before[0] == number, "they end in their order"
            found.append([*before, number] if kind == "begin" else before[1:])
        return found


class StagedRig(Rig):
    """A decode engine over two stages."""

    count = 2

    def make_executor(self) -> Executor:
        self.stages = Stages(self.forward, self.count)
        return Executor(self.forward, self.memory.copy_page, pipeline=self.stages)
