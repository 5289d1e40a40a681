"""What a prefill worker is told at its start, beside what every worker is told."""

import math
from dataclasses import dataclass
from typing import Annotated

from effuse.config import checks
from effuse.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of a prefill worker. Raises ValueError naming the accepted form."""

    reservation_s: Annotated[float, "longest that a computed prompt waits for a reservation"] = 60.0
    min_handoff_gbps: Annotated[
        float,
        "refuse decode workers that KV reaches slower, in 10^9 bytes a second as measured at the "
        "start; 0 refuses none",
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("reservation_s", self.reservation_s)
        if not (math.isfinite(self.min_handoff_gbps) and self.min_handoff_gbps >= 0):
            raise ValueError(
                f"--min-handoff-gbps: expected 0 or more GB/s, got {self.min_handoff_gbps:g}"
            )
