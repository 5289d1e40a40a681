"""KV that comes back from host memory and from files, compared with bare copies and with computing.

`python -m effuse.benchmarks.offloading --directory DIR`, with DIR on the disk to measure. On a GPU
models of the shapes of SDAR-8B and Dream-7B in bfloat16; on a CPU a small one. All times are of one
engine and of copies of the same bytes, in turns:

- a prompt of 2048 tokens that is computed; that comes from host memory; that comes from files, with
  the kernel's cache of them dropped,
- its pages out to host memory and back, and a bare copy of as many bytes each way,
- its files read into host memory, and read bare.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch

from effuse.benchmarks.gpu_engines import Paged, paged, prefill_engine
from effuse.benchmarks.gpu_models import DREAM_7B, random_model
from effuse.benchmarks.gpu_prefill import elapsed_ms, forget
from effuse.benchmarks.gpu_timing import synchronize
from effuse.benchmarks.prefix_cache import LENGTH, PAGE_SIZE, SDAR_8B, SMALL
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.unit_files import UnitFiles
from effuse.models.config import ModelConfig
from effuse.worker.messages import StartPrefill

ROUNDS, WARM_UP = 9, 2
_WAIT_S = 1e-3
PAGES = LENGTH // PAGE_SIZE


@dataclass(slots=True)
class Times:
    """Medians of these lists are reported; milliseconds."""

    computed: list[float] = field(default_factory=list)
    from_host: list[float] = field(default_factory=list)
    from_files: list[float] = field(default_factory=list)
    out: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    bare_out: list[float] = field(default_factory=list)
    bare_back: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)


class Bench:
    """A prefill engine with host memory and files below its pool."""

    def __init__(self, config: ModelConfig, directory: Path, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(config, device, dtype)
        parts: Paged = paged(model, 2 * LENGTH, page_size=PAGE_SIZE)
        self.memory = parts.memory
        self.host = HostPages(self.memory, 2 * PAGES)
        self.files = UnitFiles(directory, 1 << 40)
        self.tiers = Tiers(self.host, self.files, now=time.monotonic)
        self.pool = PagePool(self.memory.num_pages)
        self.cache = TieredCache(
            self.pool,
            self.tiers,
            page_size=PAGE_SIZE,
            block_size=config.block_size,
            is_causal=config.prompt_attention == "causal_blocks",
        )
        self.engine = prefill_engine(
            parts, max_num_batched_tokens=LENGTH, pool=self.pool, cache=self.cache
        )
        self.directory = directory
        self.times = Times()
        self._device = device
        self._draw = np.random.default_rng(1)
        self._names = count()
        self._most = config.mask_token_id

    def run(self) -> Times:
        """All times in turns. Without kept units only the copies."""
        keeps = self.cache.is_causal
        for turn in range(-WARM_UP, ROUNDS):
            if turn == 0:
                self.times = Times()
            prompt = tuple(self._draw.integers(0, self._most, LENGTH).tolist())
            self.times.computed.append(self._prompt_ms(prompt))
            if keeps:
                self._evict()
                self.times.from_host.append(self._prompt_ms(prompt))
                self._evict()
                self._leave_host()
                self.times.from_files.append(self._prompt_ms(prompt))
                self._evict()
                self._read_files()
            self._copy()
        return self.times

    def _prompt_ms(self, prompt: Sequence[int]) -> float:
        name = str(next(self._names))
        message = StartPrefill(attempt=AttemptId(name, 1, name), prompt_token_ids=tuple(prompt))
        taken_ms = elapsed_ms(lambda: self._compute(message))
        forget(self.engine, [message])
        return taken_ms

    def _compute(self, message: StartPrefill) -> None:
        """As an engine's process does: it waits a moment if a step had nothing to do, and threads
        that read files need that."""
        self.engine.handle(message)
        while not self.engine.outbox():
            if not self.engine.step():
                time.sleep(_WAIT_S)

    def _evict(self) -> None:
        """Waits until all units are saved, and empties the pool."""
        while self.cache.is_copying or self.cache._due:
            self.engine.step()
        pages = self.pool.allocate_committed(self.pool.num_free)
        assert pages is not None
        self.pool.release(pages)

    def _leave_host(self) -> None:
        """Writes all units to files, of which nothing stays in memory."""
        kept = self.tiers.kept
        while left := [key for key in kept if key not in self.files]:
            if free := [key for key in left if not kept[key].num_readers]:
                self.tiers._write(free[0])
            self.tiers.poll()
        while self.tiers._writing:
            self.tiers.poll()
        for key in list(kept):
            self.tiers._leave_host(key)
        drop_cache(self.directory)

    def _read_files(self) -> None:
        """The latest prompt's files, by our threads and bare."""
        keys = list(self.files._known)[-PAGES:]
        drop_cache(self.directory)
        views = [self.host.views([slot]) for slot in range(len(keys))]

        def read() -> None:
            reads = [
                self.files.begin_read(key, view) for key, view in zip(keys, views, strict=True)
            ]
            for one in reads:
                one.result()

        def read_bare() -> None:
            for key in keys:
                with self.files._path(key, self.files.before(key)).open("rb", buffering=0) as file:
                    os.readv(file.fileno(), [bytearray(self.files.size_of(key))])

        self.times.read.append(elapsed_ms(read))
        drop_cache(self.directory)
        self.times.bare_read.append(elapsed_ms(read_bare))
        self.times.read[-1] /= max(1, len(keys)) / PAGES
        self.times.bare_read[-1] /= max(1, len(keys)) / PAGES

    def _copy(self) -> None:
        """A prompt's pages out and back, and as many bytes bare."""
        pages = list(range(PAGES))
        rows, slots = self.memory.byte_rows()[:PAGES], self.host._slots[:PAGES]
        for kept, run in (
            (self.times.out, lambda: wait(self.host.save(pages, pages))),
            (self.times.bare_out, lambda: slots.copy_(rows, non_blocking=True)),
            (self.times.back, lambda: wait(self.host.load(pages, pages))),
            (self.times.bare_back, lambda: rows.copy_(slots, non_blocking=True)),
        ):
            synchronize(self._device)
            kept.append(elapsed_ms(lambda run=run: self._timed(run)))  # type: ignore[misc]

    def _timed(self, run: Callable[[], object]) -> None:
        run()
        synchronize(self._device)


def wait(job: DigestJob) -> None:
    """Returns once the job is over."""
    while job.poll() is None:
        pass


def drop_cache(directory: Path) -> None:
    """Has the kernel forget the files' content."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(name: str, num_bytes: int, times: Times) -> list[str]:
    """One line for each figure, with its ratio."""
    found = {key: median(getattr(times, key) or [float("nan")]) for key in Times.__slots__}
    gbps = {key: num_bytes / ms / 1e6 for key, ms in found.items()}
    both, best = found["out"] + found["back"], min(found["computed"], found["back"])
    lines = [
        f"{name}: {LENGTH} tokens, {num_bytes / 1e6:.1f} MB of KV; medians of {ROUNDS}",
        f"computed {found['computed']:.2f} ms; from host memory {found['from_host']:.2f} ms "
        f"({found['computed'] / found['from_host']:.2f}x as fast); from files "
        f"{found['from_files']:.2f} ms ({found['computed'] / found['from_files']:.2f}x)",
        f"out {found['out']:.2f} ms and back {found['back']:.2f} ms: "
        f"{found['computed'] / both:.2f}x as fast as computing again",
        f"from host memory over the better of copying and computing: "
        f"{found['from_host'] / best:.2f}",
    ]
    for ours, bare in (("out", "bare_out"), ("back", "bare_back"), ("read", "bare_read")):
        share = gbps[ours] / gbps[bare]
        lines.append(f"{ours}: {gbps[ours]:.2f} GB/s, bare {gbps[bare]:.2f}: {share:.2f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each shape."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.offloading")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to measure")
    asked = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (
        {"sdar-8b": SDAR_8B, "dream-7b": DREAM_7B} if device.type == "cuda" else {"small": SMALL}
    )
    for name, config in shapes.items():
        with tempfile.TemporaryDirectory(dir=asked.directory) as home:
            bench = Bench(replace(config), Path(home) / "kv", device)
            times = bench.run()
            num_bytes = PAGES * bench.memory.page_bytes
            print("\n".join(report(name, num_bytes, times)), flush=True)
            bench.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
