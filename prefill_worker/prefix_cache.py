"""KV pages of ended prompts, for prompts that begin with the same tokens.

Only for block-causal models: their KV of a block depends only on the tokens up to its end. A unit
is the number of tokens that fills both whole pages and whole blocks. Its key is a digest of all
tokens up to its end, for which no other text can be found. Units without a prompt stay until others
need their pages, least recently used first, and ends of prompts before their beginnings. Pure
accounting like `kvtransfer/pool.py`, with which it shares the pages.
"""

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool

Key = bytes
"""Key of one unit: a digest of the prompt up to its end."""

_KEY_BYTES: Final = 32


@dataclass(slots=True)
class _Unit:
    pages: tuple[PageRef, ...]
    num_users: int = 1  # prompts that also hold its pages


@dataclass(slots=True)
class HeldPrefix:
    """One prompt's part of the cache."""

    keys: Sequence[Key] = ()  # of its whole units, in order
    num_found: int = 0  # units that it did not have to compute
    num_seen: int = 0  # units that are computed, found ones included
    held: set[Key] = field(default_factory=set)  # those whose cached pages are its own


class PrefixCache:
    """Gives prompts their pages: cached ones for the beginning, and free ones. It is the pool's
    `Spare`: pages that only the cache holds are there for all users of the pool.
    """

    def __init__(self, pool: PagePool, *, page_size: int, block_size: int) -> None:
        """`page_size` and `block_size` in tokens."""
        self.unit_size = math.lcm(page_size, block_size)  # tokens
        self._pages_per_unit = self.unit_size // page_size
        self._pool = pool
        self._units: dict[Key, _Unit] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()  # held only by the cache, oldest first
        self.num_queried = 0  # tokens of prompts that were looked up, in total
        self.num_found = 0  # those of them that were found
        pool.spare = self

    @property
    def num_pages(self) -> int:
        """Pages that only the cache holds."""
        return len(self._idle) * self._pages_per_unit

    def give_up(self) -> Sequence[PageRef]:
        """Forgets the unit that was used least recently; returns its pages."""
        key, _ = self._idle.popitem(last=False)
        return self._units.pop(key).pages

    def keys_of(self, token_ids: Sequence[int], num_paged: int, salt: str = "") -> tuple[Key, ...]:
        """Keys of the whole units among a prompt's first `num_paged` tokens, by its salt."""
        keys, key = [], hashlib.blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()
        for end in range(self.unit_size, num_paged + 1, self.unit_size):
            tokens = array("I", token_ids[end - self.unit_size : end]).tobytes()
            key = hashlib.blake2b(key + tokens, digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return tuple(keys)

    def begin(
        self, keys: Sequence[Key], num_paged: int, num_pages: int, num_kept: int = 0
    ) -> tuple[HeldPrefix, tuple[PageRef, ...]] | None:
        """All pages of a new prompt, beginning with the known units; None if too few are free, of
        which `num_kept` stay free. At least one token remains to be computed, because the boundary
        comes from it.
        """
        found: list[Key] = []
        for key in keys[: max(0, num_paged - 1) // self.unit_size]:
            if key not in self._units:
                break
            found.append(key)
        num_new = num_pages - len(found) * self._pages_per_unit
        num_idle = sum(key in self._idle for key in found) * self._pages_per_unit
        if num_new > self._pool.num_free - num_idle - num_kept:
            return None
        known = tuple(page for key in found for page in self._units[key].pages)
        self._pool.share(known)
        for key in found:
            self._units[key].num_users += 1
            self._idle.pop(key, None)
        new = self._pool.allocate_committed(num_new)
        assert new is not None, "counted above"
        if keys:
            self.num_queried += num_paged
            self.num_found += len(found) * self.unit_size
        return HeldPrefix(keys, len(found), len(found), set(found)), known + new

    def add(self, prefix: HeldPrefix, pages: Sequence[PageRef], num_computed: int) -> None:
        """This many tokens of a prompt are computed, into these pages: whole units are kept. If two
        prompts computed a unit at the same time, the first one's is kept.
        """
        end = min(num_computed // self.unit_size, len(prefix.keys))
        for at in range(prefix.num_seen, end):
            key = prefix.keys[at]
            if key not in self._units:
                first = at * self._pages_per_unit
                unit = _Unit(tuple(pages[first : first + self._pages_per_unit]))
                self._pool.share(unit.pages)
                self._units[key] = unit
                prefix.held.add(key)
        prefix.num_seen = max(prefix.num_seen, end)

    def end(self, prefix: HeldPrefix) -> None:
        """The prompt's hold on cached units ends; the pool releases its pages separately."""
        for key in reversed(prefix.keys):  # so that ends leave before beginnings
            if key in prefix.held:
                unit = self._units[key]
                unit.num_users -= 1
                if not unit.num_users:
                    self._idle[key] = None
            elif key in self._idle:
                self._idle.move_to_end(key)
        prefix.held.clear()
