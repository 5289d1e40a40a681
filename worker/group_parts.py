"""A leader's memory and runner, which have the other ranks of the group do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.models.part import Forward, Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker.rank_messages import CopyPage, Run, ZeroTail
from effuse.worker.ranks import Ranks


class PromptForward(Forward, Protocol):
    """A forward whose stored layers can be followed."""

    def progress(self) -> Callable[[], int]:
        """A function that any thread may call: how many groups of layers the next forward has
        stored."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardProgress:
    """Groups of layers that a forward has stored, by its number in the group."""

    number: int
    stored: Callable[[], int]

    def __call__(self) -> int:
        return self.stored()


class GroupRunner:
    """A `PromptForward` of all ranks; candidates are the leader's."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._number = 0  # of the next forward

    def progress(self) -> ForwardProgress:
        """How far the next forward is on the leader's device."""
        return ForwardProgress(self._number, self._runner.progress())

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results once every rank has read the same parts. Raises GroupBroken, also if
        the forward fails here: the other ranks would wait for ever."""
        if not parts:
            return []
        self._ranks.check()
        self._ranks.send(Run(self._number, list(parts)))
        self._number += 1
        try:
            results = self._runner.run(parts)
        except Exception as error:
            self._ranks.failed(error)
            raise
        self._ranks.confirm()
        return results


class GroupMemory(PageMemory):
    """The leader's pages; pages of the same ids on the other ranks change with them."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(layout, num_pages, device)
        self._ranks = ranks

    def copy_page(self, source: int, target: int) -> None:
        """Copies all of a page to another one, on every rank."""
        self._ranks.send(CopyPage(source, target))
        super().copy_page(source, target)

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Zeroes the slots of a page from `num_used` on, on every rank."""
        self._ranks.send(ZeroTail(page_id, num_used))
        super().zero_tail(page_id, num_used)
