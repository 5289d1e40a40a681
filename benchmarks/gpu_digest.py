"""`python -m effuse.benchmarks.gpu_digest`: digests of pages compared with one read of the same
bytes.

Pages lie scattered in a pool; every call takes others, so that all come from the device's memory.
The read is of a kernel that does nothing else: each program loads one part of a page, 16 bytes a
load, and leaves the sum of its words. It runs at the best of several parts and numbers of warps,
found for each row of the table by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.gpu_timing import median_us
from effuse.kernels.pages_digests import digest_key, piece_bytes_of
from effuse.kernels.pages_digests_triton import launch

# Parts of a page of 32 tokens in bf16, each a KV head of a group of layers, and bytes of one.
PAGES = {"dream": (28, 64 << 10), "llada": (256, 64 << 10)}
CASES = (
    *(("dream", count) for count in (1, 4, 16, 64, 256)),
    *(("llada", count) for count in (1, 4, 16)),
)
POOL_BYTES = 2 << 30
# What the calls of a measurement read together; the L2 cache of an H200 holds 60 MB.
ROTATED_BYTES = 600 << 20
MOST_CALLS = 256
# Bytes of a program's part of a page, and its warps.
READS = tuple((part, warps) for part in (8192, 16384, 32768) for warps in (2, 4, 8))


@dataclass(frozen=True, slots=True)
class Result:
    """Microseconds for the pages of one call."""

    model: str
    pages: int
    num_bytes: int
    digest_us: float
    read_us: float
    read_by: str

    @property
    def ratio(self) -> float:
        return self.digest_us / self.read_us


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(words, page_ids, sums, page_words, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    page = tl.load(page_ids + tl.program_id(1)).to(tl.int64)
    place = page * page_words + tl.program_id(0) * PART + tl.arange(0, PART)
    total = tl.sum(tl.load(words + place), 0)
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


def read(pages: Tensor, page_ids: Tensor, part_bytes: int, num_warps: int) -> Tensor:
    """Sums [N, page / part_bytes] of the words of parts of pages [num_pages, words] int64."""
    parts = pages.shape[1] * 8 // part_bytes
    sums = torch.empty(len(page_ids), parts, dtype=torch.int64, device=pages.device)
    grid = parts, len(page_ids)
    _read_kernel[grid](
        pages, page_ids, sums, pages.shape[1], PART=part_bytes // 8, num_warps=num_warps
    )
    return sums


def measure(model: str, count: int) -> Result:
    """One row of the table; a pool of its own."""
    parts, part_bytes = PAGES[model]
    page_bytes = parts * part_bytes
    pool = torch.empty(POOL_BYTES // page_bytes, page_bytes // 8, dtype=torch.int64, device="cuda")
    pool.random_()
    chosen = list(_rotated(len(pool), count, page_bytes))
    key, piece_bytes = digest_key(1).to("cuda"), piece_bytes_of(part_bytes)
    _check(pool, chosen[0])

    def timed(one: Callable[[Tensor], Tensor]) -> float:
        return median_us([partial(one, ids) for ids in chosen])

    num_pieces, stripes = page_bytes // piece_bytes, piece_bytes // 64
    found = torch.empty(count * num_pieces, dtype=torch.int64, device="cuda")
    grid, sizes = (len(found), 1, 1), (page_bytes // 64, 0, num_pieces, num_pieces, num_pieces)
    digest = timed(lambda ids: launch(pool, ids, key, found, grid, sizes, stripes))
    reads = {
        f"{part >> 10} KiB, {warps} warps": timed(partial(_read_of, pool, part, warps))
        for part, warps in READS
    }
    best = min(reads, key=lambda name: reads[name])
    return Result(model, count, count * page_bytes, digest, reads[best], best)


def _read_of(pool: Tensor, part_bytes: int, num_warps: int, ids: Tensor) -> Tensor:
    return read(pool, ids, part_bytes, num_warps)


def _rotated(num_pages: int, count: int, page_bytes: int) -> Iterator[Tensor]:
    """Ids for the calls of one measurement, disjoint as long as the pool lasts."""
    calls = min(MOST_CALLS, num_pages // count, -(-ROTATED_BYTES // (count * page_bytes)))
    shuffled = torch.randperm(num_pages)[: calls * count].to("cuda")
    return iter(shuffled.view(calls, count).unbind(0))


def _check(pool: Tensor, ids: Tensor) -> None:
    """Checks that the read reads the right bytes."""
    part_bytes, num_warps = READS[0]
    assert int(read(pool, ids, part_bytes, num_warps).sum()) == int(pool[ids].sum())


def table(results: Sequence[Result]) -> str:
    """One line for each case."""
    lines = ["model  pages       MB  digest us    read us  ratio  digest TB/s  read by"]
    for r in results:
        times = f"{r.digest_us:10.2f} {r.read_us:10.2f} {r.ratio:6.3f}"
        rate = r.num_bytes / r.digest_us / 1e6
        lines.append(
            f"{r.model:6} {r.pages:5} {r.num_bytes / 1e6:8.1f} {times} {rate:12.2f}  {r.read_by}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_digest")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_digest.json"))
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    results = [measure(model, count) for model, count in CASES]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(table(results))
    write_record(asked.json, [asdict(r) | {"ratio": r.ratio} for r in results], [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
