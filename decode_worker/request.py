"""One attempt at a request inside the engine: its sequence, its pages, its counters.

Data with derived properties; what happens to it is decided by the scheduler and done by the engine.
"""

from dataclasses import dataclass, field

from torch import Tensor

from effuse.config.decoding import DecodeSettings, Sampling
from effuse.decode_worker import denoise
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.scheduler import DecodeLimits, Demand, Footprint
from effuse.decode_worker.sequence import Sequence
from effuse.kvtransfer.messages import AttemptId, PageRef


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """An attempt from its arrival to its end. Pages cover the sequence's stored tokens."""

    attempt: AttemptId
    arrival: int  # order of arrival; the scheduler's age
    arrived_s: float  # on the engine's clock
    sequence: Sequence
    settings: DecodeSettings
    sampling: Sampling
    writer: str | None  # incarnation of the prefill worker; None prefills here
    drafts: bool
    pages: list[PageRef] = field(default_factory=list)
    boundary: Tensor | None = None  # [H] hidden row of the last stored position (shifting models)
    plan: StepPlan | None = None  # of the step that is opened and not yet applied
    is_verified: bool = False  # the prompt's KV was complete once
    forward_passes: int = 0
    preemptions: int = 0

    @property
    def page_ids(self) -> list[int]:
        return [page.page_id for page in self.pages]

    @property
    def num_to_prefill(self) -> int:
        """Tokens before the blocks in flight whose KV is not stored: prompt and settled text."""
        return self.sequence.in_flight_start - self.sequence.committed_len

    @property
    def needs_remote(self) -> bool:
        """True until the pages of its prefill worker have arrived."""
        return self.writer is not None and not self.is_verified

    def open_step(self) -> StepPlan:
        """The plan of the coming denoise step; the same one until it is applied."""
        if self.plan is None:
            self.plan = denoise.open_step(self.sequence, self.settings)
        return self.plan

    def pages_to_begin(self, limits: DecodeLimits) -> int:
        """Pages it needs before its first forward here, or before its writer may push."""
        if self.needs_remote:
            return limits.pages_for(self.sequence.first_block_start)
        return limits.pages_for(self.sequence.in_flight_start)

    def demand(self, limits: DecodeLimits) -> Demand:
        """What it wants of the next step; opens its denoise step."""
        to_prefill = self.num_to_prefill
        if to_prefill:
            return Demand(
                rows=to_prefill,
                whole=False,
                least=self._smallest_chunk(),
                pages_held=len(self.pages),
                pages_wanted=limits.pages_for(self.sequence.in_flight_start),
            )
        plan = self.open_step()
        return Demand(
            rows=plan.end - plan.start,
            whole=True,
            least=0,
            pages_held=len(self.pages),
            pages_wanted=limits.pages_for(plan.start + plan.num_stored),
        )

    def preempt(self) -> None:
        """Forgets the stored KV; tokens, flags and counters stay."""
        self.pages.clear()
        self.boundary = None
        self.sequence.drop_kv()
        self.preemptions += 1

    def footprint(self) -> Footprint:
        """The most it can ever need."""
        sequence = self.sequence
        num_blocks = (sequence.last_block_end - sequence.first_block_start) // sequence.block_size
        return Footprint(
            prompt_len=sequence.prompt_len,
            max_tokens=sequence.stopping.max_tokens,
            most_cached=sequence.last_block_start,
            # All of a full window may settle in one step and ride along with one new block.
            most_rows=min(self.settings.most_active + 1, num_blocks) * sequence.block_size,
            first_chunk=sequence.origin,
        )

    def _smallest_chunk(self) -> int:
        """A bidirectional prompt goes in one piece; what follows it, block by block."""
        sequence = self.sequence
        unsplittable = max(0, sequence.origin - sequence.committed_len)
        return unsplittable or sequence.block_size
