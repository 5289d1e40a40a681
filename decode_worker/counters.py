"""What an engine has done since it started: for its load report, and for tests of rare cases."""

from dataclasses import dataclass

from effuse.decode_worker.denoise import StepOutcome
from effuse.decode_worker.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """Sums over the engine's life."""

    steps: int = 0  # forwards
    rows: int = 0  # tokens in them
    preemptions: int = 0
    kv_bytes: int = 0  # received from prefill workers
    semi_writes: int = 0  # tokens written in blocks that were not full
    double_settles: int = 0  # steps of a request in which two blocks or more settled
    waiting_stops: int = 0  # steps with a stop id behind a block that held masks
    ragged_tails: int = 0  # requests whose prompt ended within a block
    short_prompts: int = 0  # requests whose prompt was shorter than a block

    def begin(self, sequence: Sequence) -> None:
        """Counts a request that begins."""
        self.ragged_tails += sequence.first_block_start < sequence.prompt_len
        self.short_prompts += sequence.prompt_len < sequence.block_size

    def observe(self, outcome: StepOutcome) -> None:
        """Counts one request's denoise step."""
        self.semi_writes += outcome.num_semi_writes
        self.double_settles += outcome.num_settled > 1
        self.waiting_stops += outcome.stop_is_waiting
