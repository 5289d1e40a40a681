"""What a forward proposes for the masks of a sequence: one token, confidence and score a mask.

Pure data on numpy. How candidates are drawn is the runner's matter; which are written, the
algorithm's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class HostCandidates:
    """Proposals for masked positions in ascending order; three arrays of one length."""

    tokens: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> "HostCandidates":
        """The candidates [start, end) of these, as views."""
        return HostCandidates(
            self.tokens[start:end], self.confidences[start:end], self.scores[start:end]
        )

    def best(self, count: int) -> IndexArray:
        """Indices of the `count` highest scores, ascending; ties go to the lowest position."""
        if count == 1:
            return np.asarray([self.scores.argmax()], dtype=np.intp)
        by_score = np.argsort(-self.scores, kind="stable")
        return np.sort(by_score[:count])

    def is_finite(self) -> bool:
        """False where the model gave NaN or infinity for any of them."""
        return bool(np.isfinite(self.confidences).all() and np.isfinite(self.scores).all())
