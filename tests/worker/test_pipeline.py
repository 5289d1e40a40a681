"""The leader of a pipeline: what it sends to the other stages, and when its own computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast
from unittest.mock import Mock

import torch

from effuse.kvtransfer.layout import MOST_GROUPS
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker.group_parts import GroupRunner, pipeline_of
from effuse.worker.rank_messages import Complete, ForwardProgress, RunParts
from effuse.worker.rank_process import Rank
from effuse.worker.ranks import Ranks

PROMPTS = [
    [Part(token_ids=[at], start=0, pages=[at], num_stored=1, block_origin=0)] for at in range(4)
]
PARTS = [[replace(part, candidates=[0])] for (part,) in PROMPTS]


@dataclass
class Leader:
    """A leader's own runner and its ranks, which note what happens in its order."""

    count: int = 3
    device: str = "cpu"
    size: int = 2  # ranks of a stage
    rows: int = 99  # of so many forwards the rows are on their way
    noted: list[object] = field(default_factory=list)
    num_sent: int = 0
    model: Mock = field(init=False)

    def __post_init__(self) -> None:
        stage = Mock(count=self.count, size=self.size) if self.count > 1 else None
        self.model = Mock(stage=stage, replicas=None, device=torch.device(self.device))

    def launch(self, parts: Sequence[Part]) -> Callable[[], list[PartResult]]:
        (number,) = parts[0].token_ids
        self.noted.append(("launch", number))

        def results() -> list[PartResult]:
            self.noted.append(("read", number))
            return [PartResult([number], [], [], None)]

        return results

    def progress(self) -> Callable[[], int]:
        self.noted.append("progress")
        return lambda: 2

    def check(self) -> None:
        """The group is whole."""

    def send(self, command: object) -> int:
        self.num_sent += 1
        number = getattr(command, "number", None)
        self.noted.append((type(command), number))
        return self.num_sent

    def await_rows(self, number: int, on_sign: Callable[[], None]) -> None:
        self.noted.append(("rows", number))
        on_sign()

    def sent_rows(self, number: int) -> bool:
        return number < self.rows

    def confirm(self, count: int) -> None:
        self.noted.append(("confirmed", count))

    def runner(self, on_sign: Callable[[], None] = lambda: None) -> GroupRunner:
        return GroupRunner(cast(ModelRunner, self), cast(Ranks, self), on_sign)


def test_a_forward_begins_everywhere_before_earlier_ones_have_ended() -> None:
    leader, signs = Leader(), list[str]()
    runner = leader.runner(lambda: signs.append("sign"))
    assert pipeline_of(runner) is runner and runner.most_begun == 3 == runner.num_parts(99)
    first, second = (runner.begin(parts) for parts in PARTS[:2])
    assert leader.noted == [(RunParts, 0), (RunParts, 1)]
    (found,) = runner.end(second)
    assert found.tokens == [1] and signs == ["sign"] * 2
    assert leader.noted[2:] == [
        *(("rows", 0), (Complete, None), ("launch", 0)),
        *(("rows", 1), (Complete, None), ("launch", 1)),
        *(("read", 1), ("confirmed", 2)),
    ]
    (kept,) = runner.end(first)
    assert kept.tokens == [0] and leader.noted[10:] == [("read", 0), ("confirmed", 1)]


def test_a_device_goes_on_with_the_next_forward_while_results_are_applied() -> None:
    """One more is under way than there are stages, so that the first stage does not wait either."""
    leader = Leader(device="cuda", rows=2)
    runner = leader.runner()
    assert runner.most_begun == 4
    assert [runner.num_parts(count) for count in (1, 31, 32, 99)] == [3, 3, 4, 4]
    begun = [runner.begin(parts) for parts in PARTS[:3]]
    del leader.noted[:]
    assert [one.tokens for one in runner.end(begun[0])] == [[0]]
    assert leader.noted == [
        *(("rows", 0), (Complete, None), ("launch", 0)),
        *(("rows", 1), (Complete, None), ("launch", 1)),
        *(("read", 0), ("confirmed", 1)),
    ]
    del leader.noted[:]
    assert [one.tokens for one in runner.end(begun[1])] == [[1]]
    assert leader.noted == [("read", 1), ("confirmed", 2)], "the third one's rows are not there"
    assert [one.tokens for one in runner.end(begun[2])] == [[2]]


def test_a_prompts_end_does_not_wait_for_the_next_forward() -> None:
    leader = Leader(device="cuda")
    runner = leader.runner()
    first, _ = (runner.begin(parts) for parts in (PROMPTS[0], PARTS[1]))
    runner.end(first)
    assert ("launch", 1) not in leader.noted


def test_nothing_is_sent_to_complete_a_forward_if_the_leader_is_alone_in_its_stage() -> None:
    leader = Leader(size=1)
    runner = leader.runner()
    assert [one.tokens for one in runner.run(PARTS[3])] == [[3]]
    assert leader.noted == [
        *((RunParts, 0), ("rows", 0), ("launch", 3), ("read", 3), ("confirmed", 1)),
    ]


def test_a_forward_has_stored_nothing_here_before_the_leaders_stage_computes() -> None:
    """Marks of the device have the number of the forward that runs."""
    leader = Leader()
    runner = leader.runner()
    of_first = runner.progress()
    first = runner.begin(PARTS[0])
    of_second = runner.progress()
    second = runner.begin(PARTS[1])
    assert (of_first(), of_second()) == (0, 0) and "progress" not in leader.noted
    runner.end(first)
    assert (of_first(), of_second()) == (2, 0)
    runner.end(second)
    assert of_second() == 2 and leader.noted.count("progress") == 2


def test_a_group_without_stages_computes_at_once() -> None:
    leader = Leader(count=1)
    runner = leader.runner()
    assert pipeline_of(runner) is None
    assert [one.tokens for one in runner.run(PARTS[2])] == [[2]]
    assert leader.noted == [(RunParts, 0), ("launch", 2), ("read", 2), ("confirmed", 1)]
    assert runner.run([]) == []


def test_a_stage_knows_how_far_each_forward_under_way_is() -> None:
    """A first stage queues one for each stage, of prompts and of answers, and its device is later.
    Pages that leave while nothing is known of their forward would leave before they are written."""
    runner = Mock()
    runner.progress.return_value = lambda: 0  # the device has stored nothing
    part = Mock(runner=runner, model=Mock(replicas=None))
    rank = Rank(Mock(), part, Mock(), None, pushes=True)
    under_way = 2 * max(MOST_GROUPS.values())
    for number in range(under_way):
        rank._compute(RunParts(number, PARTS[0]))
    for number in range(under_way):
        found = rank._progress_of(ForwardProgress(number))
        assert found is not None and found() == 0
