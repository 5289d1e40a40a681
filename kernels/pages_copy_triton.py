# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel that copies parts of pages from one GPU's pool into another one's.

A part lies in runs of equal length and distance, with other distances in either pool. One launch
copies the parts of any pages in any order, while a copy engine needs a call for each run. Few
programs suffice to fill a link, and the others' processors stay with the forward.

Bytes: every part read once and written once, 16 bytes at a time.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.pages_digests import STRIPE_BYTES

PROGRAMS = 96  # at most
TILE_STRIPES = 256  # 16 KiB

_WORDS = tl.constexpr(STRIPE_BYTES // 8)


def launch(
    source: Tensor,
    source_ids: Tensor,
    source_sizes: tuple[int, int, int],
    target: Tensor,
    target_ids: Tensor,
    target_sizes: tuple[int, int, int],
    *,
    num_runs: int,
    run_stripes: int,
) -> None:
    """Queues copies of runs of pages ``source_ids`` [N] to pages ``target_ids`` [N], both int64.

    ``source`` [pages, words] int64 is a pool. ``target`` [at least 1] int64 begins with the address
    of a pool that this GPU has mapped. Sizes are in stripes of STRIPE_BYTES: from page to page, to
    a page's first run, and from run to run. No id is checked.
    """
    num_tiles = triton.cdiv(run_stripes, TILE_STRIPES)
    num_items = len(source_ids) * num_runs * num_tiles
    _copy_kernel[(min(PROGRAMS, num_items),)](
        source, source_ids, *source_sizes, target, target_ids, *target_sizes, num_runs, run_stripes,
        num_tiles, num_items,
        TILE=TILE_STRIPES, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "source_page",
        "source_first",
        "source_run",
        "target_page",
        "target_first",
        "target_run",
        "num_runs",
        "run_stripes",
        "num_tiles",
        "num_items",
    ],
    do_not_specialize_on_alignment=["source_ids", "target", "target_ids"],
)
def _copy_kernel(
    source, source_ids, source_page, source_first, source_run, target,
    target_ids, target_page, target_first, target_run, num_runs, run_stripes, num_tiles, num_items,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of a run of a page, then the next one that no other program copies."""
    word = tl.arange(0, _WORDS)[None, :]
    address = tl.multiple_of(tl.load(target), 16)
    pages = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        run = item // num_tiles % num_runs
        place = item // num_tiles // num_runs
        stripe = item % num_tiles * TILE + tl.arange(0, TILE)
        mask = (stripe < run_stripes)[:, None]
        page = tl.load(source_ids + place).to(tl.int64)
        first = page * source_page + source_first + run * source_run
        words = tl.load(source + (first + stripe)[:, None] * _WORDS + word, mask=mask)
        page = tl.load(target_ids + place).to(tl.int64)
        first = page * target_page + target_first + run * target_run
        tl.store(pages + (first + stripe)[:, None] * _WORDS + word, words, mask=mask)
