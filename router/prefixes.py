"""Which worker has cached which prefixes, by the prompts of this router and of others.

An estimate, so that a prompt goes to the worker that probably has most of it. Without Redis it
covers only this router's own prompts. Not here: its weight in a choice (`policy.py`)."""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

from effuse.placement.records import (
    KEY_BYTES,
    MOST_HOLDERS,
    MalformedRecord,
    PrefixGroup,
    PrefixHolder,
    PrefixNews,
    PrefixNotes,
    decode,
    encode,
)
from effuse.placement.store import Store, StoreUnavailable
from effuse.router.policy import WorkerLife

LOG: Final = logging.getLogger(__name__)

UNIT: Final = 64
"""Tokens that are looked at as one."""
NO_TOKEN: Final = (1 << 32) - 1
"""Fills the last unit of a prompt that is looked at as a whole."""
MOST_UNIT: Final = 512
"""Tokens in a worker's largest units. Of the last one it may have nothing."""
MOST_KNOWN: Final = 1 << 16
"""Units that are remembered, the latest: 4 million tokens."""

EXCHANGE_S: Final = 0.25
"""How often routers exchange notes."""
CATCH_UP_S: Final = 0.02
"""The same, while more than fits into one exchange is to be read or written."""
RETRY_S: Final = 1.0
"""The same, after Redis did not answer."""
REFRESH_S: Final = 30.0
"""A note that is younger is not made again, so times of notes may be so much too early."""
REFUTED_S: Final = 60.0
"""Age from which on a wrong note shows that the worker has evicted its older prefixes."""
REBUILD_S: Final = 3.0
"""Once Redis has lost all notes, the router that finds it writes its own at once. After so long the
others write those that are still missing."""
MOST_TOGETHER: Final = 1024
"""Units in one exchange."""
MOST_BYTES: Final = 2 << 20
"""Most bytes of all routers' notes in Redis, at 22 for a unit and 60 for a worker of a group."""


class Note(NamedTuple):
    """A worker's last use of a unit, on this router's clock."""

    used_at: float
    is_own: bool  # this router sent it
    is_over: bool = False  # the request has ended


class KnownPrefix(NamedTuple):
    """Tokens of a prompt that a worker should have, by notes of this router and of others."""

    own: int = 0
    shared: int = 0
    used_at: float = 0.0  # the last use of the last unit of these
    is_over: bool = False  # as in its note
    claimed_at: float = 0.0
    is_whole: bool = False  # the worker has all of these or none

    def is_refuted(self, found: int, now: float) -> bool:
        """Whether the worker had so few tokens that it has dropped the rest. A younger claim may
        be of a prompt that is still computed, unless the request is over."""
        is_complete = self.is_over or now - self.used_at > REFUTED_S
        unseen = 0 if self.is_whole else MOST_UNIT / 2
        return is_complete and 2 * (found + unseen) < self.own + self.shared


NOTHING_KNOWN: Final = KnownPrefix()


def keys_of(
    token_ids: Sequence[int], tenant: str, begun: Sequence[bytes] = ()
) -> tuple[bytes, ...]:
    """Of each whole unit of a prompt, by the tenant and all tokens up to its end; `begun`: those of
    the units before these tokens."""
    keys = list(begun)
    key = keys[-1] if keys else tenant.encode()
    for end in range(UNIT, len(token_ids) + 1, UNIT):
        tokens = array("I", token_ids[end - UNIT : end]).tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


def key_of_whole(token_ids: Sequence[int], tenant: str) -> tuple[bytes, ...]:
    """The one key of a prompt that workers reuse only as a whole."""
    return keys_of([*token_ids, *[NO_TOKEN] * (-len(token_ids) % UNIT)], tenant)[-1:]


class SentPrefixes:
    """Beginnings of prompts that were sent to workers; those that were sent longest ago are
    forgotten first.

    Workers evict prefixes that they have not used for long. The statistics of an answer show the
    real number of tokens. Ended incarnations match no worker."""

    def __init__(self, now: Callable[[], float], most: int = MOST_KNOWN) -> None:
        self._now = now
        self._most = most
        self._notes: OrderedDict[bytes, dict[WorkerLife, Note]] = OrderedDict()
        self._unshared: dict[bytes, tuple[WorkerLife, ...]] = {}  # that Redis lacks
        self._dropped: dict[WorkerLife, tuple[float, float]] = {}
        """Of the youngest wrong claims: the last uses, and the times of the claims."""
        self.num_refuted = 0  # claims

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def num_unshared(self) -> int:
        return len(self._unshared)

    def note(
        self, keys: Sequence[bytes], lives: Sequence[WorkerLife], *, is_over: bool = False
    ) -> None:
        """A prompt of these keys goes to these workers or, if `is_over`, has been there."""
        note, lives = Note(self._now(), is_own=True, is_over=is_over), tuple(lives)
        stale_at = {one: max(note.used_at - REFRESH_S, self._kept_since(one)) for one in lives}
        for key in reversed(keys):  # so that shorter prefixes are remembered for longer
            new, notes = lives, self._notes.get(key)
            if notes is None:
                self._notes[key] = dict.fromkeys(lives, note)
            else:
                self._notes.move_to_end(key)
                new = tuple(
                    one for one in lives if one not in notes or notes[one].used_at <= stale_at[one]
                )
                _renew(notes, new, note)
            if new:
                before = self._unshared.get(key)
                self._unshared[key] = new if before is None else (*before, *new)[-MOST_HOLDERS:]
        self._forget_oldest()

    def cached(self, keys: Sequence[bytes], whole: int = 0) -> Mapping[WorkerLife, int]:
        """Tokens of such a prompt's prefix that each worker has computed before; `whole`: those of
        a prompt with one key for all."""
        return {life: number * (whole or UNIT) for life, number in self._units(keys).items()}

    def _units(self, keys: Sequence[bytes]) -> Mapping[WorkerLife, int]:
        """The same in keys."""
        found: dict[WorkerLife, int] = {}
        alive, number = set(self._notes.get(keys[0], ())) if keys else set(), 0
        for number, key in enumerate(keys):
            notes = self._notes.get(key, {}).keys()
            if not alive <= notes:
                found |= dict.fromkeys(alive - notes, number)
                alive &= notes
            if not alive:
                break
        else:
            found |= dict.fromkeys(alive, number + 1)
        for life in found.keys() & self._dropped.keys():
            last, since = found[life], self._kept_since(life)
            while last and self._notes[keys[last - 1]][life].used_at <= since:
                last -= 1
            found[life] = last
        return found

    def claim(self, keys: Sequence[bytes], life: WorkerLife, whole: int = 0) -> KnownPrefix:
        """Tokens of such a prompt that this worker should have; `whole` as for `cached`."""
        number, unit = self._units(keys).get(life, 0), whole or UNIT
        notes = [self._notes[key][life] for key in keys[:number]]
        if not notes:
            return NOTHING_KNOWN
        own, last = sum(one.is_own for one in notes), notes[-1]
        times = last.used_at, last.is_over, self._now()
        return KnownPrefix(own * unit, (number - own) * unit, *times, is_whole=whole > 0)

    def check(self, claim: KnownPrefix, life: WorkerLife, found: int) -> None:
        """A worker had so many tokens of a prompt. If a claim was wrong, so are older ones, because
        workers drop the least recently used ones first. For a while others of its age are, too."""
        if claim.is_refuted(found, self._now()):
            self.num_refuted += 1
            if claim.used_at > self._kept_since(life):
                self._dropped[life] = claim.used_at, claim.claimed_at
            while len(self._dropped) > self._most:
                del self._dropped[next(iter(self._dropped))]

    def _kept_since(self, life: WorkerLife) -> float:
        """The worker has dropped what it had used by then."""
        if (dropped := self._dropped.get(life)) is None:
            return -math.inf
        used_at, claimed_at = dropped
        return used_at + min(self._now() - claimed_at, REFUTED_S)

    # Of several routers.

    def take_unshared(self) -> PrefixNotes:
        """Notes for other routers, which count as shared from now on."""
        taken = list(islice(self._unshared.items(), MOST_TOGETHER))
        groups, now = [], self._now()
        for key, _ in taken:
            del self._unshared[key]

        def holders(one: tuple[bytes, tuple[WorkerLife, ...]]) -> list[tuple[WorkerLife, Note]]:
            notes = self._notes[one[0]]
            return [(life, notes[life]) for life in one[1] if life in notes]

        for held, units in groupby(taken, holders):
            workers = tuple(PrefixHolder(*life, round(now - one.used_at, 3)) for life, one in held)
            groups.append(PrefixGroup(b"".join([key for key, _ in units]), workers))
        return PrefixNotes(tuple(groups))

    def give_back(self, notes: PrefixNotes) -> None:
        for group in notes.groups:
            lives = _lives_of(group)
            for key in _split(group.keys):
                if key in self._notes:
                    self._unshared[key] = (*lives, *self._unshared.get(key, ()))[-MOST_HOLDERS:]

    def share_all(self, but: PrefixNotes) -> None:
        """Redis lacks all notes except these. It gets those first that were made last."""
        self._unshared = {key: tuple(self._notes[key]) for key in reversed(self._notes)}
        for group in but.groups:
            self._mark_shared(group)

    def merge(self, notes: PrefixNotes, age_s: float) -> None:
        """Another router's notes, which it wrote so many seconds ago."""
        then = self._now() - age_s
        for group in notes.groups:
            lives = _lives_of(group)
            news = [Note(then - one.age_s, is_own=False) for one in group.holders]
            for key in _split(group.keys):
                if (known := self._notes.get(key)) is None:
                    self._notes[key] = dict(zip(lives, news, strict=True))
                    continue
                self._notes.move_to_end(key)
                for life, note in zip(lives, news, strict=True):
                    if life not in known or known[life].used_at < note.used_at:
                        _renew(known, (life,), note)
            self._mark_shared(group)
        self._forget_oldest()

    def _mark_shared(self, group: PrefixGroup) -> None:
        lives = _lives_of(group) if self._unshared else ()
        for key in _split(group.keys) if lives else ():
            if left := [one for one in self._unshared.pop(key, ()) if one not in lives]:
                self._unshared[key] = tuple(left)

    def _forget_oldest(self) -> None:
        while len(self._notes) > self._most:
            key, _ = self._notes.popitem(last=False)
            self._unshared.pop(key, None)


def _renew(notes: dict[WorkerLife, Note], lives: Sequence[WorkerLife], note: Note) -> None:
    """The note of these lives, as the latest of at most `MOST_HOLDERS`."""
    for life in lives:
        notes.pop(life, None)
        notes[life] = note
    while len(notes) > MOST_HOLDERS:
        del notes[next(iter(notes))]


def _lives_of(group: PrefixGroup) -> tuple[WorkerLife, ...]:
    return tuple((one.worker_id, one.incarnation) for one in group.holders)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class SharedPrefixes:
    """Exchanges notes with other routers through Redis. One per router; `now` is a monotonic clock
    in seconds."""

    def __init__(
        self, store: Store, router_id: str, sent: SentPrefixes, now: Callable[[], float]
    ) -> None:
        self.num_failures = 0  # exchanges without an answer
        self._store = store
        self._id = router_id
        self._sent = sent
        self._now = now
        self._last = PrefixNews()
        self._may_write_at = 0.0
        self._is_cut_off = False
        self._faults: set[str] = set()  # of notes that could not be read, already logged

    @property
    def pause_s(self) -> float:
        if self._is_cut_off:
            return RETRY_S
        is_behind = self._last.has_more or self._sent.num_unshared > MOST_TOGETHER
        return CATCH_UP_S if is_behind else EXCHANGE_S

    async def catch_up(self) -> None:
        """Reads all notes of others, as long as Redis answers."""
        while await self.exchange():
            pass  # the caller brings the deadline

    async def exchange(self) -> bool:
        """Writes our latest notes, and reads others'. Returns whether there is more to read;
        without Redis both stay for the next exchange."""
        may_write = self._now() >= self._may_write_at
        notes = self._sent.take_unshared() if may_write else PrefixNotes(())
        try:
            news = await self._store.share_prefixes(
                self._id, self._last, encode(notes) if notes.groups else b"", MOST_BYTES
            )
        except StoreUnavailable as error:
            LOG.debug("known prefixes are not shared: %s", error)
            self.num_failures += 1
            self._sent.give_back(notes)
            self._is_cut_off = True
            return False
        self._is_cut_off = False
        if news.epoch != self._last.epoch:
            self._sent.share_all(but=notes)
            if self._sent.num_unshared and not news.epoch.startswith(f"{self._id} ".encode()):
                self._may_write_at = self._now() + REBUILD_S
        self._last = news._replace(notes=())
        for value, age_s in news.notes:
            self._merge(value, age_s)
        return news.has_more

    def _merge(self, value: bytes, age_s: float) -> None:
        try:
            notes = decode(value, PrefixNotes, "prefix notes")
        except MalformedRecord as error:
            if (fault := str(error)) not in self._faults:
                LOG.warning("ignored %s", fault)
            self._faults = {fault}
        else:
            self._sent.merge(notes, age_s)
