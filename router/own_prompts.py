"""Whether a decode worker computes a prompt itself, because a prefill worker would end it later.

Pure arithmetic on figures that workers report. Only for answers whose gaps have an objective: then
decode workers compute prompts in pieces that keep these gaps (`decode_worker/room.py`)."""

from typing import NamedTuple

from effuse.placement.records import WorkerRecord


class PromptCost(NamedTuple):
    """The prompt of an answer whose gaps have an objective."""

    tokens: int  # at least 1
    seconds: float  # of a worker without answers

    def is_sooner(self, decode: WorkerRecord, own: int, others: int) -> bool:
        """Whether `decode` is done with it before a prefill worker. `own` and `others`: tokens that
        wait at both. It computes prompts at the rate that the gaps of its answers allow. A
        bidirectional prompt has to fit into a gap as a whole."""
        load, is_whole = decode.load, decode.model.prompt_attention == "bidirectional"
        if not load.prompt_rate or (is_whole and self.tokens > load.prompt_piece):
            return False
        own_s = (own + self.tokens) / load.prompt_rate
        return own_s < (others + self.tokens) * self.seconds / self.tokens
