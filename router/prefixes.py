"""The prefill workers that have computed beginnings of prompts, as far as this router sent them.

An estimate, so that a prompt goes to the worker that probably knows most of it. Workers drop
beginnings that they have not used for long, and other routers send prompts, too. The statistics of
an answer show the real number of tokens. Pure. Not here: the cache of a worker
(`prefill_worker/prefix_cache.py`)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from effuse.router.policy import WorkerLife

UNIT: Final = 64
"""Tokens that are looked at as one; a worker's own units are finer."""
MOST_KNOWN: Final = 1 << 15
"""Units that are remembered, the latest: 2 million tokens."""
MOST_LIVES: Final = 64
"""Workers of each, the latest; lives that are over would add up otherwise."""

Key = bytes


def keys_of(token_ids: Sequence[int], tenant: str) -> tuple[Key, ...]:
    """Of each whole unit of a prompt, by the tenant and all tokens up to its end."""
    keys, key = [], tenant.encode()
    for end in range(UNIT, len(token_ids) + 1, UNIT):
        tokens = array("I", token_ids[end - UNIT : end]).tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=16).digest()
        keys.append(key)
    return tuple(keys)


class SentPrefixes:
    """Beginnings of prompts that were sent to prefill workers, those of the longest ago forgotten
    first."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._lives: OrderedDict[Key, tuple[WorkerLife, ...]] = OrderedDict()

    def note(self, keys: Sequence[Key], life: WorkerLife) -> None:
        """A prompt of these keys goes to this worker."""
        for key in reversed(keys):  # so that beginnings are remembered for longer
            lives = self._lives.get(key, ())
            self._lives[key] = lives if life in lives else (*lives, life)[-MOST_LIVES:]
            self._lives.move_to_end(key)
        while len(self._lives) > self._most:
            self._lives.popitem(last=False)

    def cached(self, keys: Sequence[Key]) -> Mapping[WorkerLife, int]:
        """Tokens at the beginning of such a prompt that each worker has computed before."""
        found: dict[WorkerLife, int] = {}
        alive: tuple[WorkerLife, ...] | None = None
        for number, key in enumerate(keys, 1):
            lives = self._lives.get(key, ())
            alive = lives if alive is None else tuple(one for one in alive if one in lives)
            if not alive:
                break
            found |= dict.fromkeys(alive, number * UNIT)
        return found
