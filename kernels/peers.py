"""Sums of the rows of ranks on the GPUs of one host, over memory that all of them have mapped.

One kernel sums, adds the residual and normalises. Ranks exchange through a buffer on each GPU,
which its peers write to; the protocol is in `peers_triton`. A GPU never waits for a host here. If a
rank ends, the kernels of its peers wait for ever, as those of NCCL do. The leader, which watches
the ranks, then ends their processes, and with a process the driver ends its kernels.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from effuse.kernels import cuda_ipc
from effuse.kernels.values import WeightedParts

MOST_BYTES: Final = 8 << 20
"""Of the rows of one kernel; sums of more rows are several."""

_MOST_SENT: Final = 1 << 20
"""Bytes that a rank sends, up to which each rank adds up all rows: one trip and not two."""

Exchange = Callable[[Tensor], Tensor]
"""From a tensor on this rank's GPU to those of all ranks, in their order."""


class PeerSums:
    """The buffers of all ranks, for sums of rows of one width and dtype."""

    def __init__(
        self, rank: int, num_rows: int, buffers: Tensor, release: Callable[[], None]
    ) -> None:
        """num_rows: of one kernel. buffers: addresses [N] int64 of all ranks' buffers, each of
        `buffer_bytes(N)` in which every bit is set. `release` is called by `close`."""
        self._rank = rank
        self._buffers = buffers
        self._release = release
        self._turns = torch.zeros(num_rows, dtype=torch.int32, device=buffers.device)

    def sum_norm(
        self,
        x: Tensor | WeightedParts,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        shares: bool | None = None,
        is_alike: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum) of all ranks' x [T, H], which may be in parts, and the residual
        [T, H] that all of them have; the same bits on all ranks. It is queued on the current
        stream. With `shares` one rank adds up a row for all; None chooses the faster way. With
        `is_alike` a row's bits depend neither on that nor on the number of rows."""
        from effuse.kernels import peers_triton

        size = len(self._buffers)
        if shares is None:
            shares = size > 2 and (size - 1) * residual.nbytes > _MOST_SENT
        return peers_triton.launch(
            x if isinstance(x, WeightedParts) else x.contiguous(), residual.contiguous(), weight,
            eps, self._buffers, self._turns,
            rank=self._rank, size=size, shares=shares, is_alike=is_alike,
        )  # fmt: skip

    def close(self) -> None:
        """Releases the buffers, unless a kernel still waits for a rank that has ended."""
        if not self._buffers.is_cuda or torch.cuda.current_stream(self._buffers.device).query():
            self._release()


def buffer_bytes(size: int) -> int:
    """Of a rank's buffer: two places for each row of each rank."""
    return 2 * size * MOST_BYTES


def map_peers(
    rank: int, size: int, width: int, dtype: torch.dtype, device: torch.device, exchange: Exchange
) -> PeerSums:
    """Buffers on the GPUs of all ranks, which call it together.

    Raises OSError on all ranks if one of them cannot map another one's memory.
    """
    handle = bytearray(cuda_ipc.HANDLE_BYTES)
    own = cuda_ipc.allocate(buffer_bytes(size))
    if own:
        bytes_at(own, buffer_bytes(size), device).fill_(-1)
        handle[:] = cuda_ipc.handle_of(own).ljust(len(handle), b"\0")
    gathered = exchange(torch.frombuffer(handle, dtype=torch.uint8).to(device))
    handles = [bytes(one.tolist()) for one in gathered]
    # By rank; 0 if a peer has no memory or it cannot be mapped.
    mapped = {
        at: cuda_ipc.open_handle(one) if any(one) else 0
        for at, one in enumerate(handles)
        if at != rank
    }

    def release() -> None:
        for address in filter(None, mapped.values()):
            cuda_ipc.close_handle(address)
        if own:
            cuda_ipc.free(own)

    # Nothing is sent before all buffers are filled and mapped.
    can_map = torch.tensor([int(all((own, *mapped.values())))], device=device)
    if not all(exchange(can_map)):
        release()
        raise OSError("a GPU cannot map the memory of another one")
    addresses = [mapped.get(at, own) for at in range(size)]
    buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
    return PeerSums(rank, MOST_BYTES // (width * dtype.itemsize), buffers, release)


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Memory of this device as a tensor [num_bytes] int8."""
    return torch.as_tensor(_Memory(address, num_bytes), device=device)


class _Memory:
    """Memory in the form in which torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }
