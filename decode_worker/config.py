"""What a decode worker is told at its start, beside what every worker is told."""

from dataclasses import dataclass
from typing import Annotated

from effuse.config import checks
from effuse.config.decoding import Algorithm
from effuse.kvtransfer.messages import MAX_LEASE_S
from effuse.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode worker. Raises ValueError naming the accepted form."""

    default_algorithm: Annotated[Algorithm, "used where a request names none"] = "d2f"
    handoff_lease_s: Annotated[float, "longest that a prefill worker may take to push"] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("handoff_lease_s", self.handoff_lease_s, MAX_LEASE_S)
