"""Digests of pages, of prompts and of manifests: what catches accidents and stale bytes.

A page's digest is xxh3_128 over the xxh3_64 of its pieces (kernels/pages_digests.py), which a GPU
takes of its own pages and a CPU of its own, to the same bits; the seed is the receiver's. Digests
are taken beside everything else: a job is begun, and asked later whether it is done. Not a defence
against an attacker: xxh3 is not cryptographic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from effuse.kernels.pages_digests import digest_key, piece_bytes_of, piece_digests
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import Manifest, encode

PieceDigests = npt.NDArray[np.int64]

MOST_KEYS = 4096  # kept; each receiver has one


class DigestJob(Protocol):
    """Digests that are being taken."""

    def poll(self) -> PieceDigests | None:
        """[pages, pieces], once they are there; the memory is not read any more then."""
        ...


class Digester(Protocol):
    """Takes digests of one pool's pages, where they lie."""

    def begin(self, page_ids: Sequence[int], groups: range, seed: int) -> DigestJob:
        """Of these groups of layers of these pages."""
        ...


@functools.cache
def pieces_in_group(layout: KVLayout) -> int:
    """Pieces of one group of layers in a page."""
    return layout.group_bytes // piece_bytes_of(layout.layer_bytes)


def digester_of(memory: PageMemory) -> Digester:
    """What takes digests of this memory."""
    return DeviceDigester(memory) if memory.device.type == "cuda" else HostDigester(memory)


class HostDigester:
    """Digests of pages in host memory, taken by whoever asks for them first.

    Not on a thread of their own: beside the connector's they would hold the interpreter and a
    second processor (measured: handoffs of 64 MiB took 1.6 times as long on two processors).
    """

    def __init__(self, memory: PageMemory) -> None:
        self._pages = memory.byte_rows()
        self._layout = memory.layout

    def begin(self, page_ids: Sequence[int], groups: range, seed: int) -> DigestJob:
        """Of these groups of layers of these pages."""
        return _OnHost(lambda: self._take(page_ids, groups, seed))

    def _take(self, page_ids: Sequence[int], groups: range, seed: int) -> PieceDigests:
        found = _piece_digests(
            self._pages,
            torch.tensor(page_ids, dtype=torch.int64),
            _key_of(seed),
            self._layout,
            groups,
        )
        return found.numpy()


@dataclass(frozen=True, slots=True)
class _OnHost:
    take: Callable[[], PieceDigests]

    def poll(self) -> PieceDigests | None:
        return self.take()


class DeviceDigester:
    """Digests of pages on a GPU, on the pool's stream for transfers, which waits for nobody.

    Its buffers are kept: while each job made its own, beginning one took the host of an H200 0.3 to
    0.4 ms.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._pages = memory.byte_rows()
        self._layout = memory.layout
        self._device = memory.device
        self._stream = memory.stream
        self._keys: dict[int, Tensor] = {}  # by seed, on the device
        self._free: list[_Buffers] = []

    def begin(self, page_ids: Sequence[int], groups: range, seed: int) -> DigestJob:
        """Of these groups of layers of these pages, behind what was queued on the stream."""
        shape = len(page_ids), len(groups) * pieces_in_group(self._layout)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            buffers = self._buffers(shape[0], shape[0] * shape[1])
            ids, found = buffers.device_ids[: shape[0]], buffers.device_found[: shape[0] * shape[1]]
            buffers.ids.numpy()[: shape[0]] = page_ids
            ids.copy_(buffers.ids[: shape[0]], non_blocking=True)
            out = found.view(shape)
            _piece_digests(self._pages, ids, self._key(seed), self._layout, groups, out)
            buffers.found[: found.numel()].copy_(found, non_blocking=True)
            buffers.done.record(self._stream)
        return _OnDevice(buffers, shape, self._free)

    def _key(self, seed: int) -> Tensor:
        key = self._keys.get(seed)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            key = self._keys[seed] = _key_of(seed).pin_memory().to(self._device, non_blocking=True)
        return key

    def _buffers(self, num_ids: int, num_found: int) -> _Buffers:
        """Free ones that are large enough; too small ones are given up."""
        while self._free:
            buffers = self._free.pop()
            if len(buffers.ids) >= num_ids and len(buffers.found) >= num_found:
                return buffers
        return _Buffers.empty(num_ids, num_found, self._device)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What one job at a time needs, on the host pinned."""

    ids: Tensor  # int32
    device_ids: Tensor
    found: Tensor  # int64
    device_found: Tensor
    done: torch.cuda.Event

    @classmethod
    def empty(cls, num_ids: int, num_found: int, device: torch.device) -> _Buffers:
        """With room for at least so many. Made on the stream that uses them."""
        num_ids, num_found = (1 << (count - 1).bit_length() for count in (num_ids, num_found))
        return cls(
            ids=torch.empty(num_ids, dtype=torch.int32, pin_memory=True),
            device_ids=torch.empty(num_ids, dtype=torch.int32, device=device),
            found=torch.empty(num_found, dtype=torch.int64, pin_memory=True),
            device_found=torch.empty(num_found, dtype=torch.int64, device=device),
            done=torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )


@dataclass(slots=True)
class _OnDevice:
    buffers: _Buffers
    shape: tuple[int, int]
    free: list[_Buffers]
    found: PieceDigests | None = None

    def poll(self) -> PieceDigests | None:
        if self.found is None and self.buffers.done.query():  # type: ignore[no-untyped-call]
            rows, columns = self.shape
            self.found = self.buffers.found.numpy()[: rows * columns].reshape(self.shape).copy()
            self.free.append(self.buffers)
        return self.found


@functools.lru_cache(maxsize=MOST_KEYS)
def _key_of(seed: int) -> Tensor:
    return digest_key(seed)


def _piece_digests(
    pages: Tensor,
    page_ids: Tensor,
    key: Tensor,
    layout: KVLayout,
    groups: range,
    out: Tensor | None = None,
) -> Tensor:
    return piece_digests(
        pages,
        page_ids,
        key,
        piece_bytes=piece_bytes_of(layout.layer_bytes),
        first_byte=groups.start * layout.group_bytes,
        num_bytes=len(groups) * layout.group_bytes,
        out=out,
    )


def page_digests(pieces: PieceDigests) -> tuple[bytes, ...]:
    """One digest for each page [pages, all of its pieces], in order."""
    rows = np.ascontiguousarray(pieces, dtype="<i8")
    return tuple(xxhash.xxh3_128_digest(row.data) for row in rows)


def prompt_digest(token_ids: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """Digest of a prompt's ids: whose KV a handoff brings."""
    return xxhash.xxh3_128_digest(np.asarray(token_ids, dtype="<i8").data)


def seal_of(manifest: Manifest) -> bytes:
    """Digest of all that a manifest says but its own seal: identities, pages, boundary state."""
    return xxhash.xxh3_128_digest(encode(msgspec.structs.replace(manifest, seal=b"")))


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its seal."""
    return msgspec.structs.replace(manifest, seal=seal_of(manifest))
