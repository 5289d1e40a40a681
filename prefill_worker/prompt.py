"""A prompt on its way through a prefill engine: what is computed, and what will be handed over.

Pure data; when it is computed is scheduler.py, how it leaves is kvtransfer's sender.
"""

from __future__ import annotations

from dataclasses import dataclass

from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import AttemptId, BoundaryState, PageRef


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """One attempt's prompt. Positions [0, num_paged) get KV in pages; the rest travels as ids."""

    attempt: AttemptId
    token_ids: tuple[int, ...]
    block_origin: int
    num_paged: int
    can_split: bool  # into chunks that end with a block; a bidirectional prompt cannot
    arrived_s: float
    started_s: float = 0.0
    num_launched: int = 0  # tokens in forwards that were launched, the present one included
    num_computed: int = 0  # tokens whose KV is there
    num_ready: int = 0  # pages that the sender knows of
    pages: tuple[PageRef, ...] = ()
    is_unread: bool = False  # its handoff is over: only a running forward may touch its pages

    @property
    def num_left(self) -> int:
        """Tokens that no forward has taken yet."""
        return self.num_paged - self.num_launched

    @property
    def is_being_written(self) -> bool:
        """Whether a forward that has not ended writes its pages."""
        return self.num_launched > self.num_computed

    @property
    def page_ids(self) -> list[int]:
        """Its pages, in the order of the prompt."""
        return [page.page_id for page in self.pages]

    def take_final_pages(self, end: int, page_size: int) -> list[int]:
        """Further pages that no forward will touch again once tokens up to `end` are computed."""
        final = len(self.pages) if end == self.num_paged else end // page_size
        pages = self.page_ids[self.num_ready : final]
        self.num_ready = final
        return pages

    def boundary(self, hidden: bytes | None = None) -> BoundaryState:
        """What goes with the pages; `hidden` is the boundary row, for models that need it."""
        return BoundaryState(
            prompt_len=len(self.token_ids),
            prompt_digest=prompt_digest(self.token_ids),
            tail_token_ids=self.token_ids[self.num_paged :],
            hidden=hidden,
        )
