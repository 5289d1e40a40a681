"""The token state of one generation: ids, the bitmap of masks, the blocks in flight, and a
forward's proposals for their masks.

Pure data on numpy: no torch, no pages, no policy. `denoise.py` decides which block is appended,
which mask is written and when a block settles. Masks are a bitmap, so no id means a mask. Positions
are always absolute.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from effuse.config.decoding import DecodeSettings, Stopping
from effuse.worker import messages

IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
PositionNoise = Callable[[IntArray, int], FloatArray]
"""A uniform number in (0, 1) for each of these positions at this step; always the same number."""

_MOST_DENOISE_COUNT = 1 << 31  # it is a 32-bit word of the counter for randomness


class RequestError(ValueError):
    """The request cannot be served as sent; the message has the expected form. `field`: the field
    that a client must change, by the client's name; empty if it is not one field."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(slots=True)
class Block:
    """One diffusion block in flight: positions [start, end).

    It is active until it and all its predecessors are final; then the coming forward stores it.
    """

    start: int
    end: int
    masks_at_birth: int
    masks_left: int
    full: bool = False  # must advance every step; sticky
    denoise_count: int = 0  # forwards that have denoised it
    edits_left: int = 0  # forwards that may still edit it once it has no mask

    @property
    def is_pending(self) -> bool:
        """Whether a further forward may write to it."""
        return self.masks_left > 0 or self.edits_left > 0

    @property
    def progress(self) -> float:
        """Share of its initial masks that are written, as float32."""
        written = self.masks_at_birth - self.masks_left
        return float(np.float32(written / self.masks_at_birth))


@dataclass(frozen=True, slots=True)
class HostCandidates:
    """Proposals for masked positions in ascending order; three arrays of one length."""

    tokens: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, indices: IndexArray | slice) -> "HostCandidates":
        """The candidates at these indices; views of a slice."""
        return HostCandidates(self.tokens[indices], self.confidences[indices], self.scores[indices])

    def best(self, count: int) -> IndexArray:
        """Indices of the `count` highest scores, ascending; ties go to the lowest position."""
        if count == 1:
            return np.asarray([self.scores.argmax()], dtype=np.intp)
        by_score = np.argsort(-self.scores, kind="stable")
        return np.sort(by_score[:count])

    def above(self, threshold: float) -> IndexArray:
        """Indices of the candidates whose confidence is strictly above, ascending."""
        return np.flatnonzero(self.confidences > threshold)

    def is_finite(self) -> bool:
        """False if the model gave NaN or infinity for any of them."""
        return bool(np.isfinite(self.confidences).all() and np.isfinite(self.scores).all())


class Sequence:
    """Prompt and answer of one request, on the block grid `origin + i * block_size`.

    token_ids [end of the last block] int64, masked [same] bool. The first block of a grid that is
    anchored at 0 has the prompt's ragged tail, which is never masked.
    """

    def __init__(
        self,
        prompt: Ids[int],
        *,
        origin: int,
        block_size: int,
        mask_token_id: int,
        stopping: Stopping,
        is_canvas: bool = False,
    ) -> None:
        """On a canvas the last block has no mask after the answer's end: all would see it."""
        if not prompt:
            raise RequestError("the prompt must have at least one token")
        self.prompt_len = len(prompt)
        self.origin = origin
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.stopping = stopping
        self.answer_end = self.prompt_len + stopping.max_tokens  # after the last possible token
        self.min_end = self.prompt_len + stopping.min_tokens  # before it no stop id is written
        in_grid = (self.prompt_len - origin) // block_size
        # Where denoising begins; everything before it is prefilled.
        self.first_block_start = origin + in_grid * block_size
        in_grid = (self.answer_end - 1 - origin) // block_size
        # The last block's KV is never stored, but everything before it may be.
        self.last_block_start = origin + in_grid * block_size
        self.last_block_end = self.last_block_start + block_size
        self.mask_end = self.answer_end if is_canvas else self.last_block_end
        self.blocks: list[Block] = []
        self.committed_len = 0  # leading tokens whose KV is stored; 0 again after a preemption
        self.final_len = self.first_block_start  # leading tokens that can no longer change
        self.stop_seen = False  # a stop id was written, settled or not
        self.step_open = False  # append and activation of the coming step are done
        self.token_ids: IntArray = np.full(self.last_block_end, mask_token_id, dtype=np.int64)
        self.token_ids[: self.prompt_len] = prompt
        self.masked: BoolArray = np.zeros(self.last_block_end, dtype=np.bool_)

    def resume(
        self, committed: Ids[int], frontier: Ids[messages.BlockState], *, is_canvas: bool = False
    ) -> Self:
        """Continues from another attempt's commit: its final tokens and its frontier.

        For a sequence that has just begun. Raises RequestError if the two do not fit the block
        grid.
        """
        self._restore_committed(committed)
        for snapshot in frontier:
            self._restore_block(snapshot)
        if self.blocks and not self.blocks[0].masks_left:
            raise RequestError(
                "the first block of the frontier has no mask, so it is not in flight"
            )
        if is_canvas and (committed or frontier) and self.may_grow:
            raise RequestError("the frontier of a canvas has all blocks that are not final")
        return self

    @property
    def prompt_ids(self) -> IntArray:
        """The prompt [prompt_len]."""
        return self.token_ids[: self.prompt_len]

    @property
    def num_blocks_left(self) -> int:
        """Blocks that are not settled yet, appended or not."""
        return (self.last_block_end - self.final_len) // self.block_size

    @property
    def in_flight_start(self) -> int:
        """First position of the coming forward; everything before it must be cached by then."""
        return self.blocks[0].start if self.blocks else self.final_len

    @property
    def in_flight_end(self) -> int:
        return self.blocks[-1].end if self.blocks else self.final_len

    @property
    def may_grow(self) -> bool:
        """Whether blocks are left to append."""
        return self.in_flight_end < self.last_block_end

    @property
    def num_settled_tokens(self) -> int:
        """Tokens of settled blocks: the coming forward stores their KV."""
        return self.final_len - self.in_flight_start

    @property
    def active(self) -> list[Block]:
        """The blocks that have masks, or wait for a predecessor."""
        return [block for block in self.blocks if block.end > self.final_len]

    @property
    def num_emitted(self) -> int:
        """Final answer tokens that were not cut off: all up to here, while it runs."""
        return min(max(self.final_len, self.prompt_len), self.answer_end) - self.prompt_len

    def append_block(self) -> Block:
        """Appends one block of masks after the last; the ragged prompt tail stays unchanged."""
        start = self.in_flight_end
        end = start + self.block_size
        assert end <= self.last_block_end, "no block is left to append"
        first, last = max(start, self.prompt_len), min(end, self.mask_end)
        num_masks = last - first
        block = Block(start, end, masks_at_birth=num_masks, masks_left=num_masks)
        self.masked[first:last] = True
        self.blocks.append(block)
        return block

    def masks(self, block: Block) -> IntArray:
        """Positions of the block's masks, ascending."""
        return np.flatnonzero(self.masked[block.start : block.end]) + block.start

    def write(self, block: Block, positions: IntArray, tokens: IntArray) -> None:
        """Replaces masks of `block` by tokens; positions are absolute and masked."""
        assert bool(self.masked[positions].all()), "only masks are written, and only once"
        self.token_ids[positions] = tokens
        self.masked[positions] = False
        block.masks_left -= len(positions)
        self.stop_seen = self.stop_seen or not self.stopping.stop_token_ids.isdisjoint(
            tokens.tolist()
        )

    def edit(self, positions: IntArray, tokens: IntArray) -> None:
        """Replaces written tokens of blocks in flight. This may remove or add a stop id."""
        assert not bool(self.masked[positions].any()), "masks are written, not edited"
        self.token_ids[positions] = tokens
        answer = slice(max(self.in_flight_start, self.prompt_len), self.in_flight_end)
        written = self.token_ids[answer][~self.masked[answer]]
        self.stop_seen = not self.stopping.stop_token_ids.isdisjoint(written.tolist())

    def store(self, num_tokens: int) -> None:
        """Records stored KV of the next `num_tokens`; blocks within leave the flight."""
        self.committed_len += num_tokens
        assert self.committed_len <= self.final_len, "only final tokens are stored"
        while self.blocks and self.blocks[0].end <= self.committed_len:
            self.blocks.pop(0)

    def frontier(self) -> tuple[messages.BlockState, ...]:
        """The active blocks; with the final tokens, they are all that resuming needs."""
        return tuple(map(self.snapshot, self.active))

    def snapshot(self, block: Block) -> messages.BlockState:
        masked = self.masked[block.start : block.end]
        return messages.BlockState(
            token_ids=tuple(self.token_ids[block.start : block.end].tolist()),
            masks=np.packbits(masked, bitorder="little").tobytes(),
            full=block.full,
            denoise_count=block.denoise_count,
        )

    def _restore_committed(self, committed: Ids[int]) -> None:
        if not committed:
            return
        final_len = self.prompt_len + len(committed)
        if (final_len - self.origin) % self.block_size or final_len > self.last_block_start:
            raise RequestError(
                f"{len(committed)} committed tokens after a prompt of {self.prompt_len} do not end "
                f"at the end of a block of {self.block_size} before position "
                f"{self.last_block_start}"
            )
        if not self.stopping.stop_token_ids.isdisjoint(committed):
            raise RequestError("the committed tokens contain a stop id, so the answer has ended")
        self.token_ids[self.prompt_len : final_len] = committed
        self.final_len = final_len

    def _restore_block(self, snapshot: messages.BlockState) -> None:
        if self.in_flight_end >= self.last_block_end:
            raise RequestError("the frontier has more blocks than the answer has left")
        num_bytes = (self.block_size + 7) // 8
        if len(snapshot.token_ids) != self.block_size or len(snapshot.masks) != num_bytes:
            raise RequestError(
                f"expected a frontier block with {self.block_size} ids and {num_bytes} bytes of "
                f"masks, got {len(snapshot.token_ids)} and {len(snapshot.masks)}"
            )
        if not 0 <= snapshot.denoise_count < _MOST_DENOISE_COUNT:
            raise RequestError(
                f"denoise_count must be in 0..{_MOST_DENOISE_COUNT - 1}, "
                f"got {snapshot.denoise_count}"
            )
        block = self.append_block()
        bits = np.unpackbits(np.frombuffer(snapshot.masks, dtype=np.uint8), bitorder="little")
        masked = bits[: self.block_size].astype(np.bool_)
        born = self.masked[block.start : block.end].copy()
        if bool((masked & ~born).any()):
            raise RequestError("a frontier block masks tokens of the prompt")
        written = np.flatnonzero(born & ~masked)
        tokens = np.asarray(snapshot.token_ids, dtype=np.int64)[written]
        self.write(block, written + block.start, tokens)
        block.full = snapshot.full
        block.denoise_count = snapshot.denoise_count


@dataclass(frozen=True, slots=True)
class CanvasStep:
    """The inputs of a canvas' step, besides the forward's proposals."""

    sequence: Sequence
    settings: DecodeSettings
    noise: PositionNoise
    shifts: bool = False  # the model predicts a position from the previous row

    @property
    def number(self) -> int:
        """Earlier steps: each block counts all, and the last one is in flight to the end."""
        return self.sequence.blocks[-1].denoise_count

    @property
    def block_start(self) -> int:
        """Start of the first generation block that has a mask; blocks divide the answer into runs
        of `block_length`."""
        prompt_len, length = self.sequence.prompt_len, self.settings.block_length
        first = int(self.sequence.masked.argmax())
        return prompt_len + (first - prompt_len) // length * length

    @property
    def block_end(self) -> int:
        return min(self.block_start + self.settings.block_length, self.sequence.mask_end)

    def masks(self) -> IntArray:
        """Positions of all remaining masks, ascending."""
        return np.flatnonzero(self.sequence.masked)

    def drawn(self, positions: IntArray) -> FloatArray:
        """This step's uniform numbers in (0, 1), one for each position."""
        return self.noise(positions, self.number)
