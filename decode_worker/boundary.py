"""What a prefill worker hands over beside pages, checked against the request it is for.

The prompt must be the request's, by its length, digest and tail; shifting models need one hidden
vector. All of it is looked at on the host: a look at the device would wait for queued steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.decode_worker.sequence import Sequence
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import BoundaryState


class BoundaryError(ValueError):
    """The boundary state is not that of this request."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What boundary states must look like for one model."""

    hidden_size: int | None  # None where logits are not shifted: no vector is needed
    dtype: torch.dtype
    device: torch.device

    def accept(self, state: BoundaryState, sequence: Sequence) -> Tensor | None:
        """The hidden vector [hidden_size] on the host, pinned where it goes to a GPU, or None.

        Raises BoundaryError naming what differs.
        """
        if state.prompt_len != sequence.prompt_len:
            raise BoundaryError(
                f"a prompt of {state.prompt_len} tokens was handed over, "
                f"the request's has {sequence.prompt_len}"
            )
        if state.prompt_digest != prompt_digest(sequence.prompt_ids):
            raise BoundaryError("the KV of another prompt was handed over")
        tail = sequence.token_ids[sequence.first_block_start : sequence.prompt_len].tolist()
        if list(state.tail_token_ids) != tail:
            raise BoundaryError("the prompt's last tokens differ from those that were handed over")
        if self.hidden_size is None or sequence.first_block_start == 0:
            return None  # nothing is stored that a block could follow
        return self._vector(state.hidden, self.hidden_size)

    def _vector(self, data: bytes | None, size: int) -> Tensor:
        expected = size * self.dtype.itemsize
        if data is None or len(data) != expected:
            found = "none" if data is None else f"{len(data)} bytes"
            raise BoundaryError(f"a hidden vector of {expected} bytes is needed, got {found}")
        vector = torch.frombuffer(bytearray(data), dtype=self.dtype)
        if not bool(torch.isfinite(vector).all()):
            raise BoundaryError("the hidden vector is not finite")
        return vector.pin_memory() if self.device.type == "cuda" else vector
