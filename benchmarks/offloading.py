"""KV that comes back from host memory and a store, compared with bare copies and with computing.

`python -m effuse.benchmarks.offloading --directory DIR`, with DIR on the disk to measure, and
`--pool mooncake://host:port` for a shared pool. On a GPU models of the shapes of SDAR-8B and
Dream-7B in bfloat16; on a CPU a small one. All times are of one engine and of copies of the same
bytes, in turns:

- a prompt of 2048 tokens that is computed; that the cache loads or computes by its rule, from host
  memory and from the store: files with the kernel's cache of them dropped, or the pool; and that
  the cache has to load from each of them,
- its pages out to host memory and back, and a bare copy of as many bytes each way,
- its units read from the store into host memory, and read bare: by `readv`, or by Mooncake's own
  `batch_get_into` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Protocol
from unittest.mock import patch

import numpy as np
import torch

from effuse.benchmarks.gpu_engines import Paged, paged, prefill_engine
from effuse.benchmarks.gpu_models import DREAM_7B, random_model
from effuse.benchmarks.gpu_prefill import elapsed_ms, forget
from effuse.benchmarks.gpu_timing import synchronize
from effuse.benchmarks.prefix_cache import LENGTH, PAGE_SIZE, SDAR_8B, SMALL
from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.mooncake_pool import MooncakePool
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.stores import UnitStore
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.unit_files import UnitFiles
from effuse.kvtransfer.units import Key, unit_tokens_of
from effuse.models.config import ModelConfig
from effuse.worker.messages import StartPrefill

ROUNDS, WARM_UP = 10, 2
_WAIT_S = 1e-3
PAGES = LENGTH // PAGE_SIZE


@dataclass(slots=True)
class Times:
    """Medians of these lists are reported; milliseconds."""

    computed: list[float] = field(default_factory=list)
    from_host: list[float] = field(default_factory=list)
    from_store: list[float] = field(default_factory=list)
    only_host: list[float] = field(default_factory=list)  # always loaded, against the rule too
    only_store: list[float] = field(default_factory=list)
    out: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    bare_out: list[float] = field(default_factory=list)
    bare_back: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)


class Bench:
    """A prefill engine with host memory and a store below its pool."""

    def __init__(
        self,
        config: ModelConfig,
        make_store: Callable[[HostPages], UnitStore],
        bare: BareReads,
        device: torch.device,
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(config, device, dtype)
        parts: Paged = paged(model, 2 * LENGTH, page_size=PAGE_SIZE)
        self.memory = parts.memory
        self.host = HostPages(self.memory, 2 * PAGES, is_shared=True)
        self.store = make_store(self.host)
        self.tiers = Tiers(self.host, [self.store], now=time.monotonic)
        (self._below,) = self.tiers.stores
        while not self._below.is_usable:
            self.tiers.poll()
        self.pool = PagePool(self.memory.num_pages)
        self.cache = TieredCache(
            self.pool,
            self.tiers,
            page_size=PAGE_SIZE,
            unit_size=unit_tokens_of(PAGE_SIZE, config.block_size),
            is_causal=config.prompt_attention == "causal_blocks",
        )
        self.engine = prefill_engine(
            parts, max_num_batched_tokens=LENGTH, pool=self.pool, cache=self.cache
        )
        self._bare = bare
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
                self._load_twice(prompt, turn)
                self._read()
            self._copy()
        return self.times

    def _load_twice(self, prompt: Sequence[int], turn: int) -> None:
        """By the rule, and always. The second way finds warmer memory, so each is first every other
        time."""
        times = self.times
        always = patch.object(TieredCache, "_is_faster", return_value=True)
        ways: list[tuple[AbstractContextManager[object], list[float], list[float]]] = [
            (nullcontext(), times.from_host, times.from_store),
            (always, times.only_host, times.only_store),
        ]
        for rule, host, store in ways if turn % 2 else reversed(ways):
            with rule:
                self._load(prompt, host, store)

    def _load(self, prompt: Sequence[int], host: list[float], store: list[float]) -> None:
        """The prompt from host memory, then from the store."""
        self._evict()
        host.append(self._prompt_ms(prompt))
        self._evict()
        self._leave_host()
        store.append(self._prompt_ms(prompt))
        self._evict()

    def _prompt_ms(self, prompt: Sequence[int]) -> float:
        name = str(next(self._names))
        message = StartPrefill(attempt=AttemptId(name, 1, name), prompt_token_ids=tuple(prompt))
        taken_ms = elapsed_ms(lambda: self._compute(message))
        forget(self.engine, [message])
        return taken_ms

    def _compute(self, message: StartPrefill) -> None:
        """As an engine's process does: it waits a moment if a step had nothing to do, and threads
        that read units need that."""
        self.engine.handle(message)
        while not self.engine.outbox():
            if not self.engine.step():
                time.sleep(_WAIT_S)

    def _evict(self) -> None:
        """Waits until all units are saved, and written if a store keeps each; empties the pool."""
        while self.cache.is_copying or self.cache._due:
            self.engine.step()
        while self._below.writing or self._below.due:
            self.tiers.poll()
        pages = self.pool.allocate_committed(self.pool.num_free)
        assert pages is not None
        self.pool.release(pages)

    def _leave_host(self) -> None:
        """Writes all units to the store, of which none stays in memory."""
        kept = self.tiers.kept
        while left := [key for key in kept if key not in self.store]:
            if free := [key for key in left if not kept[key].num_readers]:
                self.tiers._write(free[0])
            self.tiers.poll()
        while self._below.writing:
            self.tiers.poll()
        for key in list(kept):
            self.tiers._leave_host(key)
        self._bare.drop()

    def _read(self) -> None:
        """The latest prompt's units, by our threads and bare. The first way finds them in no cache
        of a processor, so each is first every other time."""
        keys = list(self.store._known)[-PAGES:]
        views = [self.host.views([slot]) for slot in range(len(keys))]

        def read() -> None:
            reads = [self.store.load(key, view) for key, view in zip(keys, views, strict=True)]
            for one in reads:
                one.result()

        ways: list[tuple[list[float], Callable[[], float]]] = [
            (self.times.read, lambda: elapsed_ms(read)),
            (self.times.bare_read, lambda: self._bare.read_ms(keys)),
        ]
        for kept, read_ms in ways if len(self.times.read) % 2 else reversed(ways):
            self._bare.drop()
            kept.append(read_ms() * PAGES / max(1, len(keys)))

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
    while job() is None:
        pass


class BareReads(Protocol):
    """The same units without our code."""

    def drop(self) -> None:
        """Has caches forget them."""
        ...

    def read_ms(self, keys: Sequence[Key]) -> float:
        """Milliseconds to read these."""
        ...


class BareFiles:
    """Files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def drop(self) -> None:
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_ms(self, keys: Sequence[Key]) -> float:
        found = {path.name.partition(".")[0]: path for path in self._directory.iterdir()}

        def read() -> None:
            for key in keys:
                with found[key.hex()].open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    os.readv(file.fileno(), [bytearray(size)])

        return elapsed_ms(read)


_BARE_POOL = """
import ctypes, json, mmap, sys, time
from mooncake.store import MooncakeDistributedStore
master, size = sys.argv[1], int(sys.argv[2])
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
memory = mmap.mmap(-1, size)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert not store.register_buffer(base, size)
for line in sys.stdin:
    names = json.loads(line)
    each = store.get_size(names[0])
    places = [base + each * at for at in range(len(names))]
    began = time.perf_counter()
    found = store.batch_get_into(names, places, [each] * len(names))
    taken = time.perf_counter() - began
    assert found == [each] * len(names), found
    print("took", 1e3 * taken, flush=True)
"""


class BarePool:
    """Mooncake's own client, in a process."""

    def __init__(self, address: PoolAddress, num_bytes: int) -> None:
        master = f"{address.host}:{address.port}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BARE_POOL, master, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name: Callable[[Key], str] = bytes.hex

    def drop(self) -> None:
        pass

    def read_ms(self, keys: Sequence[Key]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([self.name(key) for key in keys]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("took "):
                return float(line.split()[1])
        raise RuntimeError("Mooncake's client has ended")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def report(name: str, store: str, num_bytes: int, times: Times) -> list[str]:
    """One line for each figure, with its ratio."""
    found = {key: median(getattr(times, key) or [float("nan")]) for key in Times.__slots__}
    gbps = {key: num_bytes / ms / 1e6 for key, ms in found.items()}
    both = found["out"] + found["back"]
    rule = {
        way: found[f"from_{way}"] / min(found["computed"], found[f"only_{way}"])
        for way in ("host", "store")
    }
    lines = [
        f"{name}: {LENGTH} tokens, {num_bytes / 1e6:.1f} MB of KV; medians of {ROUNDS}",
        f"computed {found['computed']:.2f} ms; from host memory {found['from_host']:.2f} ms "
        f"({found['computed'] / found['from_host']:.2f}x as fast); from {store} "
        f"{found['from_store']:.2f} ms ({found['computed'] / found['from_store']:.2f}x)",
        f"out {found['out']:.2f} ms and back {found['back']:.2f} ms: "
        f"{found['computed'] / both:.2f}x as fast as computing again",
        f"always loaded: {found['only_host']:.2f} ms from host memory, "
        f"{found['only_store']:.2f} ms from {store}; by the rule over the better of loading and "
        f"computing: {rule['host']:.2f} and {rule['store']:.2f}",
    ]
    for ours, bare in (("out", "bare_out"), ("back", "bare_back"), ("read", "bare_read")):
        share = gbps[ours] / gbps[bare]
        lines.append(f"{ours}: {gbps[ours]:.2f} GB/s, bare {gbps[bare]:.2f}: {share:.2f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each shape."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.offloading")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--pool", type=PoolAddress.parse, help="a shared pool to measure as well")
    asked = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (
        {"sdar-8b": SDAR_8B, "dream-7b": DREAM_7B} if device.type == "cuda" else {"small": SMALL}
    )
    for name, config in shapes.items():
        with tempfile.TemporaryDirectory(dir=asked.directory) as home:
            files = Path(home) / "kv"

            def make_files(_: HostPages, files: Path = files) -> UnitStore:
                return UnitFiles(files, 1 << 40)

            measure(name, config, make_files, BareFiles(files), device)
        if asked.pool is not None:
            bare = BarePool(asked.pool, 1 << 30)

            def make_pool(host: HostPages, bare: BarePool = bare) -> UnitStore:
                pool = MooncakePool(asked.pool, uuid.uuid4().hex, host)
                bare.name = pool._name
                return pool

            measure(name, config, make_pool, bare, device)
            bare.close()
    return 0


def measure(
    name: str,
    config: ModelConfig,
    make_store: Callable[[HostPages], UnitStore],
    bare: BareReads,
    device: torch.device,
) -> None:
    """Measures one store, and prints the figures."""
    bench = Bench(replace(config), make_store, bare, device)
    times = bench.run()
    num_bytes = PAGES * bench.memory.page_bytes
    print("\n".join(report(name, bench.store.name, num_bytes, times)), flush=True)
    bench.engine.close()


if __name__ == "__main__":
    sys.exit(main())
