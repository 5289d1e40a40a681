"""xxh3_128 digests of pages and the seal of a manifest: what catches accidents and stale bytes.

Not a defence against an attacker: xxh3 is not cryptographic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from effuse.kvtransfer.messages import Manifest, encode


class ReadablePages(Protocol):
    """The part of PageMemory that digests need."""

    page_bytes: int

    def read_pages(self, page_id: int, count: int = 1) -> memoryview:
        """Raw bytes of consecutive pages."""
        ...


def page_digest(data: memoryview) -> bytes:
    """Digest of one page's bytes."""
    return xxhash.xxh3_128_digest(data)


def page_digests(memory: ReadablePages, page_ids: Sequence[int]) -> list[bytes]:
    """One digest per page, in order, over the memory that holds it."""
    return [page_digest(memory.read_pages(page_id)) for page_id in page_ids]


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Digest of a prompt's ids: whose KV a handoff brings."""
    return xxhash.xxh3_128_digest(np.asarray(token_ids, dtype="<i8").data)


def seal_of(manifest: Manifest) -> bytes:
    """Digest of all that a manifest says but its own seal: identities, pages, boundary state."""
    return xxhash.xxh3_128_digest(encode(msgspec.structs.replace(manifest, seal=b"")))


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its seal."""
    return msgspec.structs.replace(manifest, seal=seal_of(manifest))
