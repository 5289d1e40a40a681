"""What a decode worker is told at its start, beside what every worker is told."""

from dataclasses import dataclass
from typing import Annotated

from effuse.config import checks
from effuse.config.decoding import WINDOW, Algorithm
from effuse.kvtransfer.messages import MAX_LEASE_S
from effuse.worker.config import WorkerConfig

_MOST_STOP_IDS = 128  # more than a router lets through; a GPU keeps room for them in every slot


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode worker. Raises ValueError naming the accepted form."""

    default_algorithm: Annotated[
        Algorithm | None, "used where a request names none (default: the model's)"
    ] = None
    handoff_lease_s: Annotated[
        float, "longest push of a computed prompt, and longest silence of its writer before"
    ] = 60.0
    max_window: Annotated[int, "most blocks in flight that a request may ask for"] = 8
    max_stop_ids: Annotated[int, "most stop ids of a request, end-of-sequence ids included"] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("handoff_lease_s", self.handoff_lease_s, MAX_LEASE_S)
        checks.whole("max_window", self.max_window, int(WINDOW.low), int(WINDOW.high))
        checks.whole("max_stop_ids", self.max_stop_ids, 1, _MOST_STOP_IDS)
