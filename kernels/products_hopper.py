"""Products on Hopper in 16-bit types whose rows do not depend on other rows: tiles and launch.

The device code is `products_gluon`. A row's bits only depend on the row and the weight, whatever
the tile, so tiles follow the number of rows. `measure` finds the fastest one on this GPU.

Work: 2 FLOP for each (row, column, input). Bytes: the weights once, mostly from memory; in the L2
cache each tile reads its columns and its rows.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from effuse.kernels.rowwise_triton import launch_norm

PROCESSORS: Final = 132
COLUMNS: Final = 64
"""Of a consumer."""

DEPTH: Final = 64
MEASURED_ROWS: Final = (
    *range(16, 288, 16),
    *range(288, 704, 32),
    *range(704, 1152, 64),
    *range(1152, 2432, 128),
    *range(2560, 4352, 256),
)
"""Other numbers of rows have the tile of the next larger one, and more rows that of the last."""

_LAYOUT: Final = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_SHARED_BYTES: Final = 224_000
_REGISTERS: Final = (0, 240, 240, 160)
"""Of a consumer's thread, by the number of consumers."""

_TURNS: Final = 3
_WORTH_MORE_TURNS: Final = 1.25
_MOST_ELEMENTS: Final = 1 << 28
_DELAY_CYCLES: Final = 100_000
"""Of the device for each plan that the host queues meanwhile; doubled if that is too short."""

_MOST_DELAYS: Final = 10

_BYTES_PER_S: Final = 2e12


@dataclass(frozen=True, slots=True)
class DenseTile:
    """A tile's parts of rows, and its 64-column consumers. If it has one, two take turns."""

    parts: tuple[int, ...]
    consumers: int

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def columns(self) -> int:
        return self.consumers * COLUMNS

    @property
    def stages(self) -> int:
        return min(8, _SHARED_BYTES // ((self.columns + self.rows) * DEPTH * 2))


@dataclass(frozen=True, slots=True)
class Plan:
    """The tile of a product, and whether shares of its sum have tiles of their own."""

    tile: DenseTile
    is_apart: bool = False


TILES: Final = (
    DenseTile((32,), 1),
    DenseTile((64,), 1),
    DenseTile((64, 32), 1),
    DenseTile((128,), 1),
    DenseTile((128, 16), 1),
    DenseTile((128, 32), 1),
    DenseTile((128, 64), 1),
    DenseTile((128, 128), 1),
    DenseTile((128, 128, 16), 1),
    DenseTile((128,), 2),
    DenseTile((128, 32), 2),
    DenseTile((128, 64), 2),
    DenseTile((128, 128), 2),
    DenseTile((128, 128, 16), 2),
    DenseTile((128, 64), 3),
    DenseTile((128, 128), 3),
)
"""Few, because each is two kernels to compile. These were chosen out of 20 by measurements."""

_measured: dict[tuple[int, int, int], tuple[Plan, ...]] = {}
"""For MEASURED_ROWS by (columns, inner, shares); the last ones may be missing."""


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel covers a device and a type; rows and weights begin at 16 bytes."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device)[0] == 9
    )


def plan_of(rows: int, columns: int, inner: int, shares: int = 1) -> Plan:
    """The fastest one by `measure`, or a good guess."""
    found = _measured.get((columns, inner, shares))
    if found:
        return found[min(bisect_left(MEASURED_ROWS, rows), len(found) - 1)]
    return min(
        _plans(rows, shares, is_wide=True), key=lambda plan: _rounds(plan, rows, columns, shares)
    )


def measure(
    weights: Sequence[Tensor], *, shares: int = 1, out_dtype: torch.dtype | None = None
) -> None:
    """Measures the plans for weights of one shape [N, K] on their GPU, for later launches of this
    process. Takes them in turns, so that the L2 cache holds none. Compiles what it measures."""
    columns, inner = weights[0].shape
    if (columns, inner, shares) in _measured:
        return
    is_wide = shares > 1 or out_dtype == torch.float32
    most = max(MEASURED_ROWS[0], min(MEASURED_ROWS[-1], _MOST_ELEMENTS // (columns * shares)))
    # Zeros would take less power than what a model computes with, and so another clock.
    x = torch.randn(most, inner, dtype=weights[0].dtype, device=weights[0].device)
    fastest: list[Plan] = []
    for rows in (rows for rows in MEASURED_ROWS if rows <= most):
        run = partial(_run, x[:rows], weights, shares, out_dtype)
        parts_s = len(weights) * (shares - 1) * rows * columns * 4 * 2 / _BYTES_PER_S
        fastest.append(_fastest(list(_plans(rows, shares, is_wide=is_wide)), run, parts_s))
    _measured[columns, inner, shares] = tuple(fastest)


def _plans(rows: int, shares: int, *, is_wide: bool) -> Iterator[Plan]:
    """Those that may be fastest: neither mostly empty tiles, nor very many of them, nor sums that
    spill registers."""
    for tile in TILES:
        is_small = rows > 24 * tile.rows and tile.rows < 192
        if tile.rows >= 2 * max(rows, TILES[0].rows) or is_small:
            continue
        most_sums = 160 if tile.consumers < 3 else 96 if is_wide else 128
        for is_apart in (False, True)[: min(shares, 2)]:
            if tile.rows // 2 * (1 if is_apart else shares) <= most_sums:
                yield Plan(tile, is_apart)


def _run(
    x: Tensor, weights: Sequence[Tensor], shares: int, out_dtype: torch.dtype | None, plan: Plan
) -> None:
    """Each product follows a norm, as in a model. Programs that begin at the same moment, as after
    another product, find each other's copies in the L2 cache, and those of a model do not."""
    scale = x.new_ones(x.shape[1])
    for weight in weights:
        normed = launch_norm(x, scale, 1e-6)
        launch(normed, weight, shares=shares, out_dtype=out_dtype, plan=plan)


def _fastest(plans: list[Plan], run: Callable[[Plan], None], parts_s: float) -> Plan:
    """Each runs once, then those that seem fast in order and back, because the clock drifts.
    `parts_s` is the cost of shares apart for their reader."""
    cycles = _DELAY_CYCLES

    def seconds(plans: Sequence[Plan]) -> list[float]:
        nonlocal cycles
        for _ in range(_MOST_DELAYS):
            torch.cuda._sleep(cycles * len(plans))  # type: ignore[no-untyped-call]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(plans) + 1)]  # type: ignore[no-untyped-call]
            events[0].record()
            for plan, event in zip(plans, events[1:], strict=True):
                run(plan)
                event.record()
            has_waited = events[0].query()  # type: ignore[no-untyped-call]  # for the host, which the times would include
            events[-1].synchronize()
            if not has_waited:
                break
            cycles *= 2
        spans = zip(plans, pairwise(events), strict=True)
        return [a.elapsed_time(b) / 1e3 + parts_s * plan.is_apart for plan, (a, b) in spans]

    for plan in plans:
        run(plan)  # which may compile it
    first = seconds(plans)
    fast = [p for p, s in zip(plans, first, strict=True) if s <= _WORTH_MORE_TURNS * min(first)]
    both = (zip(seconds(fast), seconds(fast[::-1])[::-1], strict=True) for _ in range(_TURNS))
    turns = [[forth + back for forth, back in pairs] for pairs in both]
    medians = map(median, zip(*turns, strict=True))
    return min(zip(medians, range(len(fast)), fast, strict=True))[2]


def _rounds(plan: Plan, rows: int, columns: int, shares: int) -> float:
    """In proportion to the time: rounds of tiles, by what a tile copies and computes."""
    tile = plan.tile
    count = -(-columns // tile.columns) * -(-rows // tile.rows)
    rounds = -(-count * shares // PROCESSORS) if plan.is_apart else shares * -(-count // PROCESSORS)
    return rounds * (tile.rows * tile.columns + 64 * (tile.rows + tile.columns))


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    shares: int = 1,
    plan: Plan | None = None,
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], and a bias [N]: [T, N] in `out_dtype`, by default x's.

    The sum over K may be cut into `shares`, for more programs if N is small. They have no bias, are
    fewer if K is too short, and come apart or added: [P, T, N] fp32. `plan` overrides `plan_of`.
    Raises ValueError if rows of x or weights do not begin at multiples of 16 bytes.
    """
    from effuse.kernels.products_gluon import product_kernel

    (rows, inner), columns = x.shape, len(weight)
    plan = plan or plan_of(rows, columns, inner, shares)
    tile = plan.tile
    steps = -(-inner // DEPTH)
    is_cut, shares = shares > 1, min(shares, steps)
    apart = shares if plan.is_apart else 1
    shape = (apart, rows, columns) if is_cut else (rows, columns)
    dtype = torch.float32 if is_cut else out_dtype or x.dtype
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if not rows:
        return out
    for one in (x, weight):
        if one.stride(1) != 1 or one.stride(0) % 8 or one.data_ptr() % 16:
            raise ValueError(f"expected rows at multiples of 16 bytes, got strides {one.stride()}")
    num_columns = -(-columns // tile.columns)
    num_rows = -(-rows // tile.rows)
    product_kernel[(min(PROCESSORS, num_columns * num_rows * apart),)](
        _boxes(weight, COLUMNS), *(*(_boxes(x, part) for part in tile.parts), None, None)[:3],
        weight if bias is None else bias, out, rows, columns, num_columns, num_rows, steps, shares,
        int(bias is not None),
        CONSUMERS=tile.consumers, TILE_ROWS=tile.rows, TURNS=shares // apart, STAGES=tile.stages,
        CONSUMER_REGISTERS=_REGISTERS[tile.consumers], PRODUCER_REGISTERS=24, num_warps=4,
        enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return out


def _boxes(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Rows of a matrix for the bulk copy engine, DEPTH elements at a time; beyond it are zeros."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, DEPTH], _LAYOUT
    )
