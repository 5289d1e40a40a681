# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What kernels call to overlap with their neighbours: fetching ahead, and waiting for predecessors.

Programmatic dependent launch (Hopper and later) starts a kernel while its predecessor ends; what
precedes `await_predecessor` must not touch what the predecessor writes.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from effuse.kernels.ahead import Ahead, can_overlap


class Overlap(TypedDict, total=False):
    """Launch arguments beside a kernel's own."""

    launch_pdl: bool


def launch_options(device: torch.device) -> Overlap:
    """For a kernel that calls `await_predecessor` first; nothing where it cannot overlap."""
    return {"launch_pdl": True} if can_overlap(device) else {}


def fetch_arguments(ahead: Ahead | None, other: Tensor) -> tuple[Tensor, int, int, int]:
    """Arguments of `fetch_ahead` but the last: `other` stands in where nothing is fetched."""
    if ahead is None:
        return other, 0, 0, 0
    return ahead.matrix, ahead.matrix.stride(0), ahead.num_rows, ahead.row_bytes


@triton.jit
def await_predecessor(OVERLAPS: tl.constexpr):
    """All that earlier kernels wrote is visible afterwards."""
    if OVERLAPS:
        cuda.gdc_wait()


@triton.jit
def fetch_ahead(matrix, row_stride, num_rows, row_bytes, FETCHES: tl.constexpr):
    """Asks for the beginnings of rows, dealt over all programs; nothing waits for them."""
    if FETCHES:
        programs = tl.num_programs(0) * tl.num_programs(1)
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        lane = tl.arange(0, 128)
        for first in range(0, num_rows, programs * 128):
            row = first + lane * programs + program
            wanted = (row < num_rows).to(tl.int32)
            address = (matrix + row.to(tl.int64) * row_stride).to(tl.int64)
            tl.inline_asm_elementwise(
                """
                {
                .reg .pred wanted;
                setp.ne.s32 wanted, $3, 0;
                @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }
                """,
                "=r,l,r,r",
                [address, tl.zeros_like(row) + row_bytes, wanted],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
