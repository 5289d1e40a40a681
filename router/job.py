"""One request while it runs: what was asked, what is delivered, where its time went.

Data with derived values; moved on by `relay.py` and `attempt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from effuse.router.delivery import Delivery
from effuse.router.detokenizer import AnswerText
from effuse.router.request import Life
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2 as pb


class ClientGone(Exception):
    """Nobody takes the answer any more."""


class Sink(Protocol):
    """Where an answer goes as it grows; raises `ClientGone`."""

    async def commit(self, commit: pb.BlockCommit) -> None:
        """Final text and tokens."""

    async def draft(self, draft: pb.BlockDraft) -> None:
        """A block in flight."""


@dataclass(slots=True)
class Costs:
    """What the request cost so far. Moments are on the router's clock; 0 where not reached."""

    arrived: float
    queue_s: float = 0.0
    prefilled: float = 0.0
    first_block: float = 0.0
    handoff_s: float = 0.0
    kv_bytes: int = 0
    kv_pages: int = 0
    connector: str = ""
    earlier_forwards: int = 0  # of attempts that are over
    forwards: int = 0  # of the attempt that runs
    preemptions: int = 0


@dataclass(slots=True)
class Job:
    """A request that is admitted. `deadline` is on the event loop's clock."""

    life: Life
    asked: Asked
    prompt_token_ids: list[int]
    max_tokens: int
    deadline: float
    answer: AnswerText
    costs: Costs
    delivery: Delivery = field(default_factory=Delivery)

    def usage(self) -> pb.Usage:
        """Token counts so far."""
        return pb.Usage(
            prompt_tokens=len(self.prompt_token_ids), completion_tokens=self.answer.num_tokens
        )

    def stats(self, now: float) -> pb.GenerationStats:
        """What it cost, at its end."""
        costs = self.costs
        forwards = costs.earlier_forwards + costs.forwards
        return pb.GenerationStats(
            queue_s=costs.queue_s,
            prefill_s=max(0.0, costs.prefilled - costs.arrived),
            handoff_s=costs.handoff_s,
            first_block_s=max(0.0, costs.first_block - costs.arrived),
            total_s=now - costs.arrived,
            forward_passes=forwards,
            tokens_per_forward=self.answer.num_tokens / forwards if forwards else 0.0,
            kv_bytes=costs.kv_bytes,
            kv_pages=costs.kv_pages,
            connector=costs.connector,
            prefill_worker=self.life.prefill_worker,
            decode_worker=self.life.decode_worker,
            preemptions=costs.preemptions,
        )
