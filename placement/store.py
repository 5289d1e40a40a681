"""The Redis commands of a fleet, each of which is one script with a timeout. One circuit breaker is
for leases and one for placements, so that failing placements never stop the renewal of a lease.

Raises `StoreUnavailable` if there is no answer in time. It never retries: its callers are loops.
"""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, Self, cast

from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError

from effuse.config.checks import RedisServers
from effuse.placement.access import FAULTS, RedisAccess, close, let_go, reason_of
from effuse.placement.records import (
    PlacementRecord,
    PrefixNews,
    RouterRecord,
    StoredWorker,
    WorkerRecord,
    check_name,
    encode,
)

Announcement = Literal["held", "superseded"]
Placing = Literal["placed", "stale", "duplicate", "foreign"]

MOST_ENDED = 50_000
"""Most placements of ended requests that a fleet keeps, the newest ones; about 50 MB in Redis."""
MOST_ANSWERS = 20_000  # that a fleet keeps
MOST_ANSWER_BYTES = 64 << 20  # of these together
_MOST_LOOKUPS = 4  # at a time; clients cause them, and must never take the last connection
MOST_CONNECTIONS = _MOST_LOOKUPS + 5
"""Connections of one process to Redis, for lookups and all loops."""


class StoreUnavailable(Exception):
    """Redis did not answer in time, or refused."""


class StoreFull(StoreUnavailable):
    """Redis has reached its `maxmemory` and accepts no more placements; it still answers."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of claiming a request id. The id is this router's if no other field is set."""

    response: bytes | None = None  # the kept answer, undecoded
    earlier: bytes | None = None  # the placement of a router that is gone, undecoded
    elsewhere: bytes | None = None  # the placement of another live router, undecoded
    lease_s: float = 0.0  # for as long as the other router's lease holds


@dataclass(slots=True)
class Circuit:
    """Whether to ask Redis now: after consecutive failures callers are refused, for `first_s` after
    the first failure and twice as long after each further one, up to `most_s`. It does no I/O."""

    now: Callable[[], float]  # monotonic seconds
    first_s: float = 0.1
    most_s: float = 2.0
    failures: int = 0
    open_until: float = 0.0
    why: str = ""  # the last failure

    @property
    def is_open(self) -> bool:
        return self.now() < self.open_until

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until = 0.0

    def failed(self, why: str) -> None:
        pause = min(self.first_s * 2.0**self.failures, self.most_s)
        self.failures = min(self.failures + 1, 32)
        self.open_until, self.why = self.now() + pause, why


class Keys:
    """Names of one fleet's keys. All share a hash tag, so that a script uses one slot and fleets
    never share keys."""

    def __init__(self, fleet: str) -> None:
        tag = f"effuse:{{{check_name('fleet', fleet)}}}:"
        self.worker_prefix = f"{tag}worker:"
        self.workers = f"{tag}workers"  # a set of ids, with dead ones until a reader prunes them
        self.news = f"{tag}workers-news"  # a hash: the epoch of this Redis, the count of its news
        self.router_prefix = f"{tag}router:"
        self.routers = f"{tag}routers"  # the same, which another router prunes
        self.request_prefix = f"{tag}request:"
        self.running = f"{tag}running-until"  # ids sorted by when their placements expire
        self.ended = f"{tag}ended-until"  # the same for ended requests, as many as are kept
        self.answer_prefix = f"{tag}answer:"
        self.answers = f"{tag}answers-until"  # ids of kept answers, sorted by their expiry
        self.answer_sizes = f"{tag}answer-bytes"  # a hash by id; the empty id has the sum
        # Digests of requests under which engines died, sorted by expiry in ms of Redis's clock.
        self.refused = f"{tag}refused"
        self.prefixes = f"{tag}prefixes"  # a stream of routers' notes of beginnings
        self.prefix_state = f"{tag}prefix-state"  # a hash of their epoch and bytes

    def worker(self, worker_id: str) -> str:
        """Key of a worker's lease: a hash of the process that holds it and the worker's record."""
        return f"{self.worker_prefix}{check_name('worker id', worker_id)}"

    def router(self, router_id: str) -> str:
        return f"{self.router_prefix}{check_name('router id', router_id)}"

    def request(self, request_id: str) -> str:
        """Key of a request's placement: a hash of attempt, router, state and record."""
        return f"{self.request_prefix}{request_id}"

    def answer(self, request_id: str) -> str:
        """Key of a request's answer: a hash of the request's digest and the response."""
        return f"{self.answer_prefix}{request_id}"


class Store:
    """One fleet's keys in one Redis. Construct it, use it, and close it in one event loop."""

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        access: RedisAccess | None = None,
        timeout_s: float = 0.2,
        most_ended: int = MOST_ENDED,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = Keys(fleet)
        self.circuit = Circuit(now)  # of leases and the view of them
        self.placement_circuit = Circuit(now)
        self.prefix_circuit = Circuit(now)
        self._most_ended = most_ended
        self._access = access or RedisAccess()
        self._timeout_s = timeout_s
        servers = RedisServers.of(url)
        # An exchange, and one more if a script must be loaded; others to find the right server.
        self._limit_s = timeout_s * (2 + (len(servers.addresses) if servers else 0))
        self._redis = self._access.connect(url, timeout_s, MOST_CONNECTIONS)
        self._links: dict[bytes, bytes] = {}  # of workers, by digest, as far as they are alive
        self._lookups = asyncio.Semaphore(_MOST_LOOKUPS)
        self._scripts = {
            one.name.removesuffix(".lua"): (_digest(text := one.read_bytes()), text)
            for one in resources.files(__package__).iterdir()
            if one.name.endswith(".lua")
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        async with asyncio.timeout(1.0):
            await close(self._redis)

    async def announce(
        self, record: WorkerRecord, lease_s: float, holder: str, *, takes: bool
    ) -> Announcement:
        """Takes or renews the worker's lease for the process `holder`, and replaces the record.
        Ids of later processes sort after those of earlier ones. With `takes` it takes the lease
        from any holder; otherwise a later process keeps it."""
        keys = [self.keys.worker(record.worker_id), self.keys.workers, self.keys.news]
        action = "take" if takes else "renew"
        stored = StoredWorker.of(record)
        digest = _digest(stored.links) if stored.links else ""
        facts = _digest(encode(record.facts))
        args = (record.worker_id, holder, stored.record, _ms(lease_s), action, digest)
        answer = await self._run_script("announce", keys, (*args, b"", facts))
        if answer == b"unknown":
            answer = await self._run_script("announce", keys, (*args, stored.links, facts))
        return cast(Announcement, cast(bytes, answer).decode())

    async def workers(self) -> list[tuple[StoredWorker, float]]:
        """Returns every live worker: its stored record, undecoded, and seconds left. Links travel
        only if they have changed since the last call."""
        _, parts = await self._read_workers(b"*", self._links)
        self._links = {digest: one.links for one, digest, _ in parts or () if one.links}
        return [(one, left_s) for one, _, left_s in parts or ()]

    async def changes(self, seen: bytes) -> tuple[bytes, list[tuple[StoredWorker, float]] | None]:
        """The news now, and the same without links, or None if the reader has `seen` these news:
        no worker has come, gone, or changed other facts than its load."""
        news, parts = await self._read_workers(seen)
        return news, None if parts is None else [(one, left_s) for one, _, left_s in parts]

    async def worker(self, worker_id: str) -> bytes | None:
        """A worker's stored record, undecoded; None if it has no lease."""
        key = self.keys.worker(worker_id)
        found = await self._ask_redis(lambda: self._redis.hget(key, "record"), self.circuit)
        return cast("bytes | None", found)

    async def _read_workers(
        self, seen: bytes, links: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> tuple[bytes, list[tuple[StoredWorker, bytes, float]] | None]:
        """The news, and each worker with the digest of its links. `links`: known ones by digest."""
        keys = [self.keys.workers, self.keys.news]
        answer = await self._run_script("workers", keys, [self.keys.worker_prefix, seen, *links])
        news, *rest = cast(list[bytes], answer)
        if not rest:
            return news, None
        words, text = iter(rest[0].split()), io.BytesIO(rest[1])
        parts = []
        for ms, size, more, digest in zip(words, words, words, words, strict=True):
            record, found = text.read(int(size)), text.read(int(more)) or links.get(digest, b"")
            parts.append((StoredWorker(record, found), digest, int(ms) / 1e3))
        return news, parts

    async def place(
        self, placements: Sequence[tuple[PlacementRecord, float]], held: Collection[str] = ()
    ) -> list[Placing]:
        """Writes placements, each for a number of seconds, in one round trip; if more than
        `most_ended` have ended, the oldest go.

        Redis keeps an existing placement in some cases. If it is running, an older attempt or,
        while its own router lives, another router does not replace it. An id of `held` does not
        replace one that another router has ended, and the end of a request that never ran does not
        replace any of another router. A value of another kind is "foreign" and is never replaced.
        Raises `StoreFull` if Redis has no memory left for one; those before it are written.
        """

        keys, prefixes = self.keys, (self.keys.request_prefix, self.keys.router_prefix)

        async def write() -> object:
            digest, place = self._scripts["place"]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for number, (record, lifetime_s) in enumerate(placements):
                    # The first one loads the script, so that no further call is needed.
                    script = ("EVALSHA", digest) if number else ("EVAL", place)
                    name, router_id = record.request_id, record.router_id
                    own = (keys.request(name), keys.running, keys.ended)
                    facts = (name, record.attempt, router_id, record.state, encode(record))
                    rest = (_ms(lifetime_s), self._most_ended, *prefixes, int(name in held))
                    pipeline.execute_command(*script, len(own), *own, *facts, *rest)  # only queued
                return await pipeline.execute()

        answers = await self._ask_redis(write, self.placement_circuit)
        return [cast(Placing, one.decode()) for one in cast(list[bytes], answers)]

    async def placement(self, request_id: str) -> bytes | None:
        """The stored placement of a request, undecoded; None if there is none. Lookups wait for
        their turn, because a burst of them does not mean that Redis fails."""
        (record,) = await self._look_up(self.keys.request(request_id), "record")
        return record

    async def claim(self, record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
        """Writes `record`, for a request that is about to run, for `lifetime_s`. It does not if
        another live router runs the request, or if an answer to the request of `digest` is kept
        under its id. Waits for its turn like `placement`. Raises `StoreFull`."""
        keys, name = self.keys, record.request_id
        args = (name, record.router_id, encode(record), _ms(lifetime_s), digest, keys.router_prefix)
        script_keys = [keys.request(name), keys.running, keys.ended, keys.answer(name)]
        async with self._turn():
            answer = await self._run_script("claim", script_keys, args, self.placement_circuit)
        outcome, *rest = cast(list[bytes], answer)
        if outcome == b"answered":
            return Claim(response=rest[0])
        if outcome == b"running":
            return Claim(elsewhere=rest[0], lease_s=int(rest[1]) / 1000)
        return Claim(earlier=rest[0] or None)

    async def keep_answer(
        self, request_id: str, digest: str, response: bytes, keep_s: float, holder: str = ""
    ) -> None:
        """Keeps the answer to the request of `digest`; beyond `MOST_ANSWERS` and
        `MOST_ANSWER_BYTES` those that expire first go. If a router has held the id as its `holder`
        and another router holds it by now, the answer is not kept. Raises `StoreFull`."""
        keys = self.keys
        args: list[str | bytes | int] = [request_id, digest, response, _ms(keep_s)]
        args += [MOST_ANSWERS, MOST_ANSWER_BYTES, keys.answer_prefix, keys.router_prefix, holder]
        of_all = [keys.answer(request_id), keys.answers, keys.answer_sizes]
        script_keys = [*of_all, keys.request(request_id)]
        await self._run_script("keep", script_keys, args, self.placement_circuit)

    async def answer(self, request_id: str, digest: str) -> bytes | None:
        """The kept answer to the request of `digest`, undecoded; None if there is none. The id may
        belong to another request by now."""
        kept, response = await self._look_up(self.keys.answer(request_id), "digest", "response")
        return response if kept == digest.encode() else None

    async def announce_router(self, record: RouterRecord, lease_s: float) -> list[bytes]:
        """Takes or renews a router's lease; the other live routers, undecoded."""
        keys = self.keys
        own = [keys.router(record.router_id), keys.routers]
        args = (record.router_id, encode(record), _ms(lease_s), keys.router_prefix)
        return cast(list[bytes], await self._run_script("routers", own, args))

    async def release_router(self, router_id: str) -> None:
        key = self.keys.router(router_id)
        await self._ask_redis(lambda: self._redis.execute_command("DEL", key), self.circuit)

    async def share_refusals(self, refused: Mapping[str, float], most: int) -> dict[str, float]:
        """Adds digests that Redis lacks, each for a number of seconds, and returns all digests with
        their seconds left. Beyond `most` of them those that expire first are dropped."""
        args: list[str | bytes | int] = [most]
        for digest, left_s in refused.items():
            args += [digest, _ms(left_s)]
        keys, circuit = [self.keys.refused], self.placement_circuit
        answer = await self._run_script("refused", keys, args, circuit)
        return {one.decode("ascii", "replace"): left_s for one, left_s in _with_seconds(answer)}

    async def share_prefixes(
        self, router_id: str, last: PrefixNews, notes: bytes, most_bytes: int
    ) -> PrefixNews:
        """Adds a router's notes of beginnings, if any, and returns what others have added since
        the `last` answer. Beyond `most_bytes` of all notes the oldest go. Raises `StoreFull`."""
        keys = [self.keys.prefixes, self.keys.prefix_state]
        args = (router_id, last.epoch, last.read, notes, most_bytes)
        answer = await self._run_script("prefixes", keys, args, self.prefix_circuit)
        epoch, read, more, *found = cast(list[Any], answer)
        return PrefixNews(epoch, read, bool(more), _with_seconds(found))

    async def _look_up(self, key: str, *fields: str) -> list[bytes | None]:
        async with self._turn():
            answer = await self._ask_redis(
                lambda: self._redis.execute_command("HMGET", key, *fields), self.placement_circuit
            )
        return cast(list[bytes | None], answer)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await self._lookups.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("too many lookups of placements at a time") from error
        try:
            yield
        finally:
            self._lookups.release()

    def _run_script(
        self,
        name: str,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        circuit: Circuit | None = None,
    ) -> Awaitable[object]:
        digest, script = self._scripts[name]
        given = (len(keys), *keys, *args)

        async def run() -> object:
            try:
                return await self._redis.execute_command("EVALSHA", digest, *given)
            except NoScriptError:  # on this server
                return await self._redis.execute_command("EVAL", script, *given)

        return self._ask_redis(run, circuit or self.circuit)

    async def _ask_redis(
        self, command: Callable[[], Awaitable[object]], circuit: Circuit
    ) -> object:
        if circuit.is_open:
            raise StoreUnavailable(circuit.why)
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await command()
        except OutOfMemoryError as error:
            circuit.succeeded()  # Redis answers, and read-only calls still succeed
            raise StoreFull(f"Redis is full: {error}") from error
        except (*FAULTS, TimeoutError) as error:
            why = f"Redis: {reason_of(error, self._access)}"
            if not str(error).startswith("WRONGTYPE"):  # the value is not ours, but Redis answers
                circuit.failed(why)
            if isinstance(error, ReadOnlyError) or str(error).startswith("NOREPLICAS"):
                await let_go(self._redis, self._timeout_s)
            raise StoreUnavailable(why) from error
        finally:
            if task and task.cancelling() > cancelled:
                # redis-py writes through asyncio.wait_for, in which Python 3.11 may lose it.
                raise asyncio.CancelledError
        circuit.succeeded()
        return answer


def _with_seconds(answer: object) -> list[tuple[bytes, float]]:
    """The values of a script's answer, in which the milliseconds left of each stand behind it."""
    flat = iter(cast(list[Any], answer))
    return [(value, left_ms / 1000) for value, left_ms in zip(flat, flat, strict=True)]


def _digest(value: bytes) -> str:
    return sha1(value, usedforsecurity=False).hexdigest()


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
