"""KV that outlives its request, for requests that begin with the same tokens.

One cache for a pool, whichever role its requests have. In block-causal models a block's KV depends
only on the tokens up to its end. So their unit is the number of tokens that fills both whole pages
and whole blocks. Its key is a digest of all tokens up to its end, for which no collision can be
found. A bidirectional prompt has one unit, which only an equal prompt finds.

Units without a user stay until others need their pages, least recently used first, and later units
of a text before earlier ones. Pure accounting like `kvtransfer/pool.py`, which owns the pages.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool

Key = bytes
"""Key of one unit: a digest of the text up to its end."""
Ids = Sequence[int] | npt.NDArray[np.int64]

KEY_BYTES: Final = 32
_GAIN: Final = 1 / 4


class Rate:
    """Measured seconds of an amount of work, of which the latest counts most."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.measured_s = -math.inf  # moment of the last measurement

    def note(self, amount: float, seconds: float, now: float) -> None:
        """So much work took so long, and has ended now."""
        keep = 1 - _GAIN
        self._amount = keep * self._amount + amount
        self._seconds = keep * self._seconds + seconds
        self.measured_s = now

    def seconds(self, amount: float) -> float:
        """Expected seconds of so much work; 0 while none was measured."""
        return self._seconds * amount / self._amount if self._amount else 0.0


@dataclass(slots=True, eq=False)
class Unit:
    """Pages of the cache, and of a whole prompt the boundary row, if the model shifts logits."""

    pages: tuple[PageRef, ...]
    boundary: Tensor | None = None  # [hidden_size]
    before: Key = b""  # the unit that comes before it; empty for the first one
    num_users: int = 0  # requests that also hold its pages


@dataclass(slots=True)
class HeldUnits:
    """One request's part of the cache."""

    salt: str = ""  # texts of different salts share nothing
    keys: list[Key] = field(default_factory=list)  # of its units so far, in order
    num_found: int = 0  # units that it did not have to compute
    num_seen: int = 0  # units that were offered to the cache, found ones included
    held: dict[Key, Unit] = field(default_factory=dict)  # those whose cached pages are its own
    num_tokens: int = 0  # of the prompt that were found, before a decode worker computed the rest
    num_pages: int = 0  # of the prompt that no writer fills, because they were found
    searches: Sequence[object] | None = None  # for units outside of the pool, once they have begun
    is_fetched: bool = False  # units that were found there have come, or are on their way


def unit_tokens_of(page_size: int, block_size: int, asked: int | None = None) -> int:
    """Tokens of a unit: those asked for, or the fewest that fill whole pages and blocks. Raises
    ValueError if others are asked for than a multiple of these."""
    least = math.lcm(page_size, block_size)
    if asked is not None and asked % least:
        raise ValueError(
            f"expected a multiple of {least} tokens, which fill pages of {page_size} and blocks of "
            f"{block_size}, got {asked}"
        )
    return asked or least


class UnitCache:
    """Gives requests the KV of their prefixes. It is the pool's `Spare`: pages that only the
    cache holds are there for all users of the pool.

    A request that holds a page of a unit holds all of them, and counts as a user of the unit.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        unit_size: int,
        is_causal: bool = True,
        is_on: bool = True,
    ) -> None:
        """`page_size` and `unit_size`, one of `unit_tokens_of`, in tokens. `is_causal`: the model
        is block-causal."""
        self.unit_size = unit_size
        self.is_causal = is_causal
        self._is_on = is_on
        self._cuts = is_on and is_causal  # texts into units
        self._page_size = page_size
        self._pages_per_unit = self.unit_size // page_size
        self._pool = pool
        self._units: dict[Key, Unit] = {}
        self._idle: OrderedDict[Key, Unit] = OrderedDict()  # without a user, oldest first
        self.held: dict[int, PageRef] = {}  # pages of all units, by their ids
        self.num_pages = 0  # that only the cache holds
        self.num_queried = 0  # tokens that were looked up, in total
        self.num_found = 0  # those of them that were found
        self.num_evicted = 0  # evicted units
        pool.spare = self

    @property
    def num_cached(self) -> int:
        """Pages of all units."""
        return len(self.held)

    def figures(self) -> dict[str, int]:
        """Fields of a worker's `Load`."""
        return {
            "prefix_queries": self.num_queried,
            "prefix_hits": self.num_found,
            "prefix_pages": self.num_cached,
            "prefix_units": len(self._units),
            "prefix_evictions": self.num_evicted,
        }

    def give_up(self) -> Sequence[PageRef]:
        """Forgets the unit that was used least recently; returns its pages."""
        key, unit = self._idle.popitem(last=False)
        del self._units[key]
        self.num_pages -= len(unit.pages)
        self.num_evicted += 1
        return self._let_go(unit)

    # Tiers outside of the pool, which `tiers.py` adds.

    @property
    def is_copying(self) -> bool:
        """Whether units are on their way from or to the pool."""
        return False

    def poll(self) -> bool:
        """Goes on with everything that moves; True if something began or ended."""
        return False

    def fetch(
        self, one: HeldUnits, num_tokens: int, rest: int, compute_s: Callable[[int], float]
    ) -> bool:
        """Whether a request should wait for units that are on their way into the pool."""
        return False

    @property
    def has_pool(self) -> bool:
        """Whether a pool of several workers takes units now."""
        return False

    def pooled(self, one: HeldUnits, since_s: float | None = None) -> bool | None:
        """Whether a pool of several workers has all units of a request. None while it is asked or,
        once this cache has them since `since_s`, while they are written."""
        return False

    def swap_out(self, one: HeldUnits, compute_s: Callable[[int], float]) -> None:
        """A request has lost its pages; they are still as it left them."""

    def close(self) -> None:
        """Nothing moves any more."""

    # Keys.

    def extend(self, one: HeldUnits, token_ids: Ids, num_tokens: int) -> None:
        """Adds the keys of the whole units among the first `num_tokens` of a block-causal text."""
        if not self._cuts:
            return
        key = one.keys[-1] if one.keys else _key(one.salt.encode())
        size = self.unit_size
        for end in range(size * (len(one.keys) + 1), num_tokens + 1, size):
            key = _key(key, token_ids[end - size : end])
            one.keys.append(key)

    def begin(self, salt: str, token_ids: Ids, num_tokens: int) -> HeldUnits:
        """A request's part, with the keys of its first `num_tokens`."""
        one = HeldUnits(salt)
        self.extend(one, token_ids, num_tokens)
        if self._is_on and not self.is_causal:
            one.keys.append(_key(_key(salt.encode()), token_ids[:num_tokens]))
        return one

    # Requests of block-causal models.

    def num_pinned(self, one: HeldUnits, num_tokens: int, rest: int = 0) -> int:
        """Pages that `take` would find, and that are not free because others use them."""
        known = self._known(one, num_tokens - rest)
        return sum(len(unit.pages) for unit in known if unit.num_users)

    def take(self, one: HeldUnits, num_tokens: int, rest: int = 0) -> tuple[PageRef, ...]:
        """Pages of the known units among a request's first `num_tokens`, which it now holds too.
        The last `rest` are not looked up, because a forward over them gives the boundary.
        """
        found = self._known(one, num_tokens - rest)
        pages = tuple(page for unit in found for page in unit.pages)
        self._pool.share(pages)
        for key, unit in zip(one.keys, found, strict=False):
            self._use(one, key, unit)
        one.num_seen = one.num_found = len(found)
        self._count(one, num_tokens, len(found) * self.unit_size)
        return pages

    def add(self, one: HeldUnits, pages: Sequence[PageRef], num_stored: int) -> None:
        """The KV of this many first tokens is stored in these pages: whole units are kept. If two
        requests stored a unit at the same time, the first one's is kept.
        """
        if not self.is_causal:
            return
        end = min(num_stored // self.unit_size, len(one.keys))
        for at in range(one.num_seen, end):
            if (key := one.keys[at]) not in self._units:
                first = at * self._pages_per_unit
                own = tuple(pages[first : first + self._pages_per_unit])
                self._keep(one, key, Unit(own, before=one.keys[at - 1] if at else b""))
        one.num_seen = max(one.num_seen, end)

    def num_joint(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` two requests may have in pages of both: whole units if
        the cache may keep them.
        """
        return num_tokens - num_tokens % self.unit_size if self._cuts else num_tokens

    def join(self, one: HeldUnits, other: HeldUnits, num_tokens: int) -> None:
        """A request now also holds the pages of another one with its first `num_joint` tokens."""
        if not self._cuts:
            return
        one.num_seen = num_tokens // self.unit_size
        for key in other.keys[: one.num_seen]:
            if key in other.held:
                self._use(one, key, other.held[key])

    # Bidirectional prompts.

    def take_whole(self, one: HeldUnits, num_tokens: int) -> Unit | None:
        """The pages of an equal prompt, which only this request holds from now on: it writes its
        answer into the rest of the last page. The cache forgets them.
        """
        unit = self._idle.pop(one.keys[0], None) if one.keys else None
        self._count(one, num_tokens, 0 if unit is None else num_tokens)
        if unit is not None:
            del self._units[one.keys[0]]
            self.num_pages -= len(unit.pages)
            self._let_go(unit)
        return unit

    def add_whole(self, one: HeldUnits, pages: Sequence[PageRef], boundary: Tensor | None) -> None:
        """A request ends: its prompt's pages are kept if no other request holds one of them."""
        if self.is_causal or not one.keys or one.keys[0] in self._units:
            return
        if self._pool.count_freed([pages]) == len(pages):
            self._keep(one, one.keys[0], Unit(tuple(pages), boundary))

    # Ends.

    def end(self, one: HeldUnits) -> None:
        """The request uses no unit any more; the pool releases its pages separately."""
        for key in reversed(one.keys):  # so that ends leave before beginnings
            if (unit := one.held.get(key)) is not None:
                self._leave(key, unit)
            elif key in self._idle:
                self._idle.move_to_end(key)
        one.held.clear()
        one.num_found = one.num_seen = 0

    def drop(self, one: HeldUnits) -> None:
        """The same, and no request finds these units any more, because they may be wrong. Nor does
        any find the units after them, because their KV was computed from it.
        """
        after: dict[Key, list[Key]] = {}
        for key, before in self._befores():
            after.setdefault(before, []).append(key)
        dropped = [key for key, unit in one.held.items() if self._units.get(key) is unit]
        if not self.is_causal:  # it has taken the pages of its whole prompt
            dropped += one.keys
        while dropped:
            dropped += after.pop(key := dropped.pop(), ())
            self._forget(key)
        self.end(one)
        one.keys.clear()

    def _befores(self) -> Iterator[tuple[Key, Key]]:
        """Each unit, and the unit before it."""
        return ((key, unit.before) for key, unit in self._units.items())

    def _forget(self, key: Key) -> None:
        """No request finds this unit any more."""
        unit = self._units.pop(key, None)
        if unit is not None and self._idle.pop(key, None) is not None:
            self.num_pages -= len(unit.pages)
            self._pool.release(self._let_go(unit))

    def _known(self, one: HeldUnits, num_tokens: int) -> list[Unit]:
        found: list[Unit] = []
        for key in one.keys[: max(0, num_tokens) // self.unit_size]:
            if (unit := self._units.get(key)) is None:
                break
            found.append(unit)
        return found

    def _count(self, one: HeldUnits, num_tokens: int, num_found: int) -> None:
        if one.keys:
            self.num_queried += num_tokens
            self.num_found += num_found

    def _keep(self, one: HeldUnits, key: Key, unit: Unit) -> None:
        self._pool.share(unit.pages)
        self.held.update((page.page_id, page) for page in unit.pages)
        self._units[key] = one.held[key] = unit
        unit.num_users = 1

    def _use(self, one: HeldUnits, key: Key, unit: Unit) -> None:
        if self._idle.get(key) is unit:  # not one that was stored after this one was dropped
            del self._idle[key]
            self.num_pages -= len(unit.pages)
        unit.num_users += 1
        one.held[key] = unit

    def _leave(self, key: Key, unit: Unit) -> None:
        unit.num_users -= 1
        if unit.num_users:
            return
        if self._units.get(key) is unit:
            self._idle[key] = unit
            self.num_pages += len(unit.pages)
        else:  # it was dropped
            self._pool.release(self._let_go(unit))

    def _let_go(self, unit: Unit) -> Sequence[PageRef]:
        for page in unit.pages:
            del self.held[page.page_id]
        return unit.pages


def _key(before: bytes, token_ids: Ids = ()) -> Key:
    tokens = np.asarray(token_ids, dtype=np.uint32).tobytes()
    return hashlib.blake2b(before + tokens, digest_size=KEY_BYTES).digest()
