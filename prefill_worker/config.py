"""What a prefill worker is told at its start, beside what every worker is told."""

from dataclasses import dataclass
from typing import Annotated

from effuse.config import checks
from effuse.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of a prefill worker. Raises ValueError naming the accepted form."""

    reservation_s: Annotated[float, "longest that a computed prompt waits for a reservation"] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("reservation_s", self.reservation_s)
