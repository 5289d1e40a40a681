"""Digests of pages, of prompts and of manifests, which detect accidents and stale bytes.

The digest of a handoff's pages is xxh3_128 over the xxh3_64 of all of their pieces
(kernels/pages_digests.py). A GPU computes it for its own pages and a CPU for its own, with the same
bits; the seed is the receiver's. It is one digest for all pages, because one for each page takes
the host ten times as long, while nothing else remains to wait for. Digests are computed beside
everything else: a job is started, and polled later. They are no defence against an attacker,
because xxh3 is not cryptographic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from xxhash import xxh3_64_digest

from effuse.kernels.pages_digests import digest_key, piece_bytes_of
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import Finish, KVPart, Manifest, encode

PieceDigests = npt.NDArray[np.int64]
DigestJob = Callable[[], PieceDigests | None]
"""Digests under computation; returns them, [pages, pieces], once they are done: then the memory is
not read any more."""

MOST_KEYS = 4096  # kept keys; each receiver has one
KEPT_BYTES = 4096  # pieces of which views are kept
MOST_VIEWS = 1 << 16  # kept ones, of 200 bytes each, which collections of garbage search
BESIDE_BYTES = 1 << 20  # less takes hardly longer than waking a thread


class Digester(Protocol):
    """Computes digests of one pool's pages, in place."""

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        """Of these groups of layers and KV heads of these pages, by default of all heads in the
        pool.
        """


@functools.cache
def pieces_in_head(layout: KVLayout) -> int:
    """Pieces of one KV head of one group of layers in a page. None spans two heads, so that
    workers which hold different heads agree on the digests of those that both hold."""
    return layout.head_bytes // piece_bytes_of(layout.head_bytes)


class PageDigests:
    """Digests of a part of a transfer's pages, computed as groups of layers leave or arrive."""

    def __init__(
        self,
        digester: Digester,
        layout: KVLayout,
        part: KVPart,
        num_pages: int,
        seed: int,
    ) -> None:
        self._digester = digester
        self._heads = part.heads
        self._first_group = part.first_group
        self._seed = seed
        self._width = len(part.heads) * pieces_in_head(layout)  # pieces of one group of a page
        shape = num_pages, len(part.groups) * self._width
        self._found: PieceDigests = np.zeros(shape, dtype=np.int64)
        self._jobs: list[tuple[int, range, DigestJob]] = []

    def __len__(self) -> int:
        """Jobs that still read memory."""
        return len(self._jobs)

    def begin(self, first: int, page_ids: Sequence[int], groups: range) -> None:
        """Starts with these groups of pages [first, first + n) of the transfer."""
        job = self._digester.begin(page_ids, groups, self._seed, self._heads)
        self._jobs.append((first, groups, job))

    def poll(self) -> bool:
        """Takes finished digests; returns whether all are."""
        if not self._jobs:
            return True
        left = []
        for first, groups, job in self._jobs:
            found = job()
            if found is None:
                left.append((first, groups, job))
                continue
            begin, end = groups.start - self._first_group, groups.stop - self._first_group
            columns = slice(begin * self._width, end * self._width)
            self._found[first : first + len(found), columns] = found
        self._jobs = left
        return not left

    def digest(self) -> bytes:
        """One digest of all pages, in order."""
        return pages_digest(self._found)


def digester_of(memory: PageMemory, stream: torch.cuda.Stream | None = None) -> Digester:
    """The object that computes digests of this memory, on a GPU on this stream or the pool's."""
    if memory.device.type != "cuda":
        return HostDigester(memory)
    return DeviceDigester(memory, stream or memory.stream)


class HostDigester:
    """Digests of pages in host memory, computed immediately, right after their bytes were moved."""

    def __init__(self, memory: PageMemory) -> None:
        self._layout = memory.layout
        self._piece_bytes = piece_bytes_of(memory.layout.head_bytes)
        self._rows: npt.NDArray[np.uint8] = memory.byte_rows().numpy()
        self._views: dict[int, list[memoryview]] = {}  # by page: its pieces

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        """Of these groups of layers and KV heads of these pages.

        Without torch and without a loop in Python, either of which took as long as the digests.
        """
        place = _place_of(self._layout, groups, heads)
        runs = [
            slice(run, run + place.run_pieces)
            for run in range(place.first, place.end, place.run_step)
        ]
        found: list[bytes] = []
        for page_id in page_ids:
            page = self._pieces(page_id)
            for run in runs:
                found += map(xxh3_64_digest, page[run], repeat(seed))
        digests = np.frombuffer(b"".join(found), dtype=">u8").astype(np.int64)
        rows = digests.reshape(len(page_ids), -1)
        return lambda: rows

    def _pieces(self, page_id: int) -> list[memoryview]:
        """Kept if they are large, because making a view takes half as long as hashing 16 KiB."""
        views = self._views.get(page_id)
        if views is None:
            row, size = memoryview(self._rows[page_id]), self._piece_bytes
            views = [row[at : at + size] for at in range(0, len(row), size)]
            if size >= KEPT_BYTES:
                if len(self._views) * len(views) >= MOST_VIEWS:
                    self._views.clear()
                self._views[page_id] = views
        return views


@dataclass(frozen=True, slots=True)
class _Place:
    """Where pieces lie in a page: in runs of equal length and distance, counted in pieces."""

    first: int
    end: int  # behind the last run
    run_pieces: int
    run_step: int


def _place_of(layout: KVLayout, groups: range, heads: range | None) -> _Place:
    in_head = pieces_in_head(layout)
    in_group = in_head * len(layout.heads)
    part = layout.place_of_groups(groups)
    first, end = part.start * in_group, part.stop * in_group
    if heads is None or len(heads) == len(layout.heads):
        return _Place(first, end, end - first, end - first)
    run = layout.place_of(heads)
    return _Place(first + run.start * in_head, end, len(run) * in_head, in_group)


class BesideCopies:
    """Another digester's digests, computed in order by a thread of its own, while the caller's
    thread copies the same pages. Few bytes are digested immediately.

    With it handoffs of 64 MiB over NIXL take 0.7 to 0.9 times as long on two processors (measured):
    0.9 if the kernel is free to run both threads on one of them.
    """

    def __init__(self, digester: Digester, layout: KVLayout) -> None:
        self._digester = digester
        self._layout = layout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests of sent pages")

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        """As of `Digester`."""
        num_bytes = len(page_ids) * self._layout.bytes_of(heads or self._layout.heads, groups)
        if num_bytes < BESIDE_BYTES:
            return self._digester.begin(page_ids, groups, seed, heads)
        begun = self._thread.submit(self._digester.begin, page_ids, groups, seed, heads)
        return lambda: begun.result()() if begun.done() else None

    def close(self) -> None:
        """Ends the thread once it has finished its job; no other begins."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class DeviceDigester:
    """Digests of pages on a GPU, on a stream, without waits.

    A job's input and output are in pinned memory of the host that is kept, and that the kernel
    itself reads and writes. A handoff waits for its host twice, and copies, new buffers and views
    of them took five times as long as the launch.
    """

    def __init__(self, memory: PageMemory, stream: torch.cuda.Stream) -> None:
        from effuse.kernels.pages_digests_triton import PoolDigests  # a CPU needs no Triton

        self._layout = memory.layout
        self._device = memory.device
        self._stream = stream
        piece_bytes = piece_bytes_of(memory.layout.head_bytes)
        self._pool = PoolDigests(memory.byte_rows(), piece_bytes, stream)
        self._keys: dict[int, Tensor] = {}  # by seed, on the device
        self._free: list[_Buffers] = []
        # Jobs without readers: their memory belongs to the kernel until it has ended.
        self._running: list[_OnDevice] = []

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        """Of these groups of layers and KV heads of these pages, after all work queued on the
        stream.
        """
        place = _place_of(self._layout, groups, heads)
        num_runs = len(range(place.first, place.end, place.run_step))
        num_ids, num_pieces = len(page_ids), num_runs * place.run_pieces
        buffers = self._buffers(num_ids, num_ids * num_pieces)
        buffers.ids_on_host[:num_ids] = page_ids
        self._pool.take(
            buffers.ids,
            self._key(seed),
            buffers.found,
            num_ids=num_ids,
            first_piece=place.first,
            num_pieces=num_pieces,
            run_pieces=place.run_pieces,
            run_step=place.run_step,
        )
        buffers.done.record(self._stream)
        job = _OnDevice(buffers, (num_ids, num_pieces), self._free)
        self._running = [job, *(one for one in self._running if not one.has_ended())]
        return job

    def _key(self, seed: int) -> Tensor:
        key = self._keys.get(seed)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            with torch.cuda.stream(self._stream):
                key = digest_key(seed).pin_memory().to(self._device, non_blocking=True)
            self._keys[seed] = key
        return key

    def _buffers(self, num_ids: int, num_found: int) -> _Buffers:
        """Free buffers that are large enough; too small ones are dropped."""
        while self._free:
            buffers = self._free.pop()
            if buffers.num_ids >= num_ids and buffers.num_found >= num_found:
                return buffers
        return _Buffers(num_ids, num_found)


class _Buffers:
    """Buffers of one job at a time: page ids [num_ids] int32 and digests [num_found] int64."""

    def __init__(self, num_ids: int, num_found: int) -> None:
        """With room for at least this many."""
        self.num_ids, self.num_found = (1 << (n - 1).bit_length() for n in (num_ids, num_found))
        self.ids = torch.empty(self.num_ids, dtype=torch.int32, pin_memory=True)
        self.found = torch.empty(self.num_found, dtype=torch.int64, pin_memory=True)
        self.ids_on_host: npt.NDArray[np.int32] = self.ids.numpy()
        self.found_on_host: PieceDigests = self.found.numpy()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _OnDevice:
    buffers: _Buffers
    shape: tuple[int, int]
    free: list[_Buffers]
    found: PieceDigests | None = None

    def has_ended(self) -> bool:
        """Whether the device neither reads nor writes its buffers any more."""
        return self.found is not None or bool(self.buffers.done.query())  # type: ignore[no-untyped-call]

    def __call__(self) -> PieceDigests | None:
        if self.found is None and self.has_ended():
            rows, columns = self.shape
            self.found = self.buffers.found_on_host[: rows * columns].reshape(self.shape).copy()
            self.free.append(self.buffers)
        return self.found


def pages_digest(pieces: PieceDigests) -> bytes:
    """One digest of all pages [pages, all of their pieces], in order."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(pieces, dtype="<i8").data)


def prompt_digest(token_ids: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Digest of a prompt's ids, which identifies the KV of a handoff."""
    return xxhash.xxh3_128_digest(np.asarray(token_ids, dtype="<i8").data)


def seal_of(manifest: Manifest, elapsed_us: int) -> bytes:
    """Digest of the end of a push: identities, pages, boundary state, time."""
    return xxhash.xxh3_128_digest(encode(manifest) + elapsed_us.to_bytes(8, "little"))


def finish_of(manifest: Manifest, elapsed_us: int) -> Finish:
    """The end of a push with its seal."""
    return Finish(manifest, elapsed_us, seal_of(manifest, elapsed_us))
