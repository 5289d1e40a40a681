"""How a row chooses among experts, according to published configurations.

Separate from the operators, because configurations are read without torch.
"""

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule of `experts.route`. Raises ValueError for numbers that fit no expert.

    A row goes to the `top_k` experts of the highest score (Shazeer et al., arXiv 1701.06538) and to
    every shared one. With more than one group only experts of the `top_groups` best groups are
    candidates; the two best experts of a group are its score (DeepSeek-V3, arXiv 2412.19437).
    """

    num_experts: int  # routed ones
    top_k: int
    scores: Scores
    renormalises: bool  # the chosen scores are divided by their sum
    scale: float = 1.0  # of the weights, afterwards
    num_groups: int = 1
    top_groups: int = 1
    num_shared: int = 0  # after the routed ones, of the same width; their weight is 1

    def __post_init__(self) -> None:
        group, left_over = divmod(self.num_experts, self.num_groups)
        if left_over:
            raise ValueError(
                f"{self.num_experts} experts cannot form {self.num_groups} equal groups"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"cannot choose {self.top_groups} of {self.num_groups} groups")
        if not 1 <= self.top_k <= self.top_groups * group:
            raise ValueError(
                f"cannot choose {self.top_k} experts from {self.top_groups} groups of {group}"
            )
        if self.num_groups > 1 and (group < 2 or self.num_experts & (self.num_experts - 1)):
            raise ValueError(
                f"{self.num_experts} experts in {self.num_groups} groups: expected at least two "
                "experts in each group and a power of two as the number of groups"
            )

    @property
    def num_picks(self) -> int:
        """Experts that a row goes to, the shared ones included."""
        return self.top_k + self.num_shared

    @property
    def num_weights(self) -> int:
        """All experts, the shared ones included."""
        return self.num_experts + self.num_shared
