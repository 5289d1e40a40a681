"""Products on Hopper in 16-bit types whose rows do not depend on other rows: tiles and launch.

The device code is `products_gluon`. A row's bits only depend on the row and the weight, whatever
the tile, so tiles follow the number of rows.

Work: 2 FLOP for each (row, column, input). Bytes: the weights once, mostly from memory; in the L2
cache each tile reads its columns and its rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PROCESSORS: Final = 132
COLUMNS: Final = 64
"""Of a consumer."""

DEPTH: Final = 64
_FEW_ROWS: Final = 272
_LAYOUT: Final = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_SHARED_BYTES: Final = 224_000


@dataclass(frozen=True, slots=True)
class DenseTile:
    """A tile's parts of rows, and its consumers of 64 columns each."""

    parts: tuple[int, ...]
    consumers: int

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def stages(self) -> int:
        return min(8, _SHARED_BYTES // ((self.consumers * COLUMNS + self.rows) * DEPTH * 2))


TILES: Final = (
    DenseTile((16,), 1),
    DenseTile((32,), 1),
    DenseTile((64,), 1),
    DenseTile((128, 16), 1),
    DenseTile((128, 128, 16), 1),
    DenseTile((128, 16), 2),
    DenseTile((128, 64), 2),
    DenseTile((128, 128), 2),
    DenseTile((128, 128, 16), 2),
)
"""Few, because each is a kernel to compile."""


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel covers a device and a type; rows and weights begin at 16 bytes."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device)[0] == 9
    )


@lru_cache(maxsize=4096)
def tile_of(rows: int, columns: int, inner: int, apart: int = 1) -> DenseTile:
    """The tile that should be fastest for these sizes; `apart`: shares of the sum in tiles of their
    own."""
    seconds = _seconds_of_few if rows <= _FEW_ROWS else _seconds_of_many
    return min(
        _tiles_of(rows, apart),
        key=lambda tile: seconds(tile, rows, columns, inner // apart, apart),
    )


def _tiles_of(rows: int, apart: int) -> tuple[DenseTile, ...]:
    """Those that are compiled for such a product."""
    if rows > _FEW_ROWS:
        return tuple(tile for tile in TILES if tile.rows >= 128)
    return tuple(tile for tile in TILES if apart == 1 or tile.consumers == 1)


# Estimates for an H100 by rounds of tiles, each limited by products or copies. Their constants are
# fitted to the choice of tiles for five weights: of few rows to 64, 132 and 264, of many to 4246.


def _seconds_of_few(tile: DenseTile, rows: int, columns: int, inner: int, shares: int) -> float:
    """Of at most _FEW_ROWS, where the copies of a last, smaller round are faster."""
    width = tile.consumers * COLUMNS
    products = 2 * width * tile.rows * inner / 3.85e12
    num_bytes = (width + tile.rows) * inner * 2

    def round_s(num_tiles: int) -> float:
        return max(products, num_bytes / min(75e9, 11.7e12 / num_tiles)) + 1.2e-6

    full, last = divmod(_num_tiles(tile, rows, columns) * shares, PROCESSORS)
    seconds = full * round_s(PROCESSORS) + (round_s(last) if last else 0.0)
    return max(columns * inner * shares * 2 / 2.94e12, seconds)


def _seconds_of_many(tile: DenseTile, rows: int, columns: int, inner: int, shares: int) -> float:
    width = tile.consumers * COLUMNS
    count = _num_tiles(tile, rows, columns) * shares
    products = 2 * width * tile.rows * inner / (4.0e12 if tile.consumers == 2 else 8.8e12)
    copies = (width + tile.rows) * inner * 2 / min(150e9, 7e12 / min(PROCESSORS, count))
    round_s = max(products, copies) + 3.2e-6 + tile.rows * 8e-9
    return max(columns * inner * shares * 2 / 3.2e12, -(-count // PROCESSORS) * round_s)


def _num_tiles(tile: DenseTile, rows: int, columns: int) -> int:
    return -(-columns // (tile.consumers * COLUMNS)) * -(-rows // tile.rows)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    shares: int = 1,
    tile: DenseTile | None = None,
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], and a bias [N]: [T, N] in `out_dtype`, by default x's.

    The sum over K may be cut into `shares`, for more programs if N is small. They have no bias, are
    fewer if K is too short, and come apart or added: [P, T, N] fp32. `tile` overrides `tile_of`.
    Raises ValueError if rows of x or weights do not begin at multiples of 16 bytes.
    """
    from effuse.kernels.products_gluon import product_kernel

    (rows, inner), columns = x.shape, len(weight)
    steps = -(-inner // DEPTH)
    is_cut, shares = shares > 1, min(shares, steps)
    apart = 1 if rows > _FEW_ROWS else shares
    shape = (apart, rows, columns) if is_cut else (rows, columns)
    dtype = torch.float32 if is_cut else out_dtype or x.dtype
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if not rows:
        return out
    for one in (x, weight):
        if one.stride(1) != 1 or one.stride(0) % 8 or one.data_ptr() % 16:
            raise ValueError(f"expected rows at multiples of 16 bytes, got strides {one.stride()}")
    tile = tile or tile_of(rows, columns, inner, apart)
    num_columns = -(-columns // (COLUMNS * tile.consumers))
    num_rows = -(-rows // tile.rows)
    product_kernel[(min(PROCESSORS, num_columns * num_rows * apart),)](
        _boxes(weight, COLUMNS),
        *(*(_boxes(x, part) for part in tile.parts), None, None)[:3],
        weight if bias is None else bias,
        out,
        rows,
        columns,
        num_columns,
        num_rows,
        steps,
        int(bias is not None),
        CONSUMERS=tile.consumers,
        TILE_ROWS=tile.rows,
        STAGES=tile.stages,
        SHARES=shares,
        IS_JOINED=apart < shares,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        enable_fp_fusion=True,
        launch_pdl=True,
    )
    return out


def compile_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """Compiles the kernel for every tile, so that no request waits for that."""
    x = torch.zeros(_FEW_ROWS + 1, 2 * DEPTH, dtype=dtype, device=device)
    for tile in TILES:
        launch(x, x, tile=tile)
    for rows in (1, _FEW_ROWS + 1):
        for tile in _tiles_of(rows, 2):
            launch(x[:rows], x, shares=2, tile=tile)


def _boxes(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Rows of a matrix for the bulk copy engine, DEPTH elements at a time; beyond it are zeros."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, DEPTH], _LAYOUT
    )
