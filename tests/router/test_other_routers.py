"""Seats that routers share: no router starves, and no worker is overfilled while all want more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from router.fake_model import worker_record
from router.fakes import FakeStore

from effuse.placement.records import Capacity, RoutedLoad, RouterRecord, WorkerRecord
from effuse.router.seats import ALONE_S, EXCHANGE_S, OtherRouters, fair_share


@pytest.mark.parametrize("contenders", range(1, 9))
@pytest.mark.parametrize("seats", [8, 9, 64])
def test_shares_are_fair_and_together_are_all(seats: int, contenders: int) -> None:
    shares = [fair_share(seats, contenders, rank) for rank in range(contenders)]
    assert sum(shares) == seats
    assert max(shares) - min(shares) <= 1


def test_with_more_routers_than_seats_each_may_have_one_in_turn() -> None:
    assert [fair_share(2, 3, rank) for rank in range(3)] == [1, 1, 1]


@dataclass
class Peer:
    """A router with requests that wait and requests on one worker."""

    store: FakeStore
    name: str
    worker: WorkerRecord
    waiting: int = 0
    running: int = 0
    routers: OtherRouters = field(init=False)

    def __post_init__(self) -> None:
        self.routers = OtherRouters(self.store, self.name)

    async def exchange(self) -> None:
        load = RoutedLoad(self.worker.worker_id, self.worker.incarnation, self.running)
        loads = (load,) if self.running else ()
        has_any = self.running or self.waiting
        waiting = {self.worker.model.name: self.waiting} if has_any else {}
        own = RouterRecord(router_id=self.name, address="", waiting_by_model=waiting, loads=loads)
        await self.routers.exchange(own)

    def place(self) -> None:
        """Puts waiting requests onto free seats, like admission."""
        new = max(0, min(self.waiting, self.routers.seats(self.worker) - self.running))
        self.waiting, self.running = self.waiting - new, self.running + new


def peers(number: int, seats: int) -> list[Peer]:
    store, record = FakeStore(), worker_record("d0", "decode")
    capacity = Capacity(
        total_pages=256, page_size=16, max_num_seqs=seats, max_num_batched_tokens=512
    )
    worker = msgspec.structs.replace(record, capacity=capacity)
    return [Peer(store, f"router-{number}", worker) for number in range(number)]


def test_a_router_alone_has_all_seats() -> None:
    async def go() -> None:
        one, two = peers(2, 8)
        two.waiting = 0
        await two.exchange()
        assert two.routers.pause_s == ALONE_S, "it need not tell anybody what it has"
        await one.exchange()
        assert one.routers.num_alive == 1
        assert one.routers.pause_s == EXCHANGE_S
        assert one.routers.seats(one.worker) == 8

    asyncio.run(go())


def test_who_has_all_seats_gives_back_down_to_its_share() -> None:
    async def go() -> None:
        one, two = peers(2, 8)
        one.running, one.waiting, two.waiting = 8, 5, 5
        for _ in range(12):
            for peer in (one, two):
                await peer.exchange()
            for peer in (one, two):
                peer.place()
            assert one.running + two.running <= 8
            one.running -= one.running > 4  # answers end, and more requests come
            one.waiting = two.waiting = 5
        assert (one.running, two.running) == (4, 4)

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(8))
def test_under_full_load_no_worker_is_overfilled_and_nobody_starves(seed: int) -> None:
    async def go() -> None:
        draw = random.Random(seed)
        seats = draw.randint(4, 16)
        all_peers = peers(draw.randint(2, 4), seats)
        served = dict.fromkeys((peer.name for peer in all_peers), 0)
        for peer in (*all_peers, *all_peers):  # until each knows of all
            peer.waiting = 100
            await peer.exchange()
        for turn in range(400):
            peer = draw.choice(all_peers)
            peer.waiting = 100
            if draw.random() < 0.5:
                await peer.exchange()  # some notice much later than others
            peer.place()
            assert sum(one.running for one in all_peers) <= seats, turn
            ended = draw.randint(0, peer.running)
            peer.running -= ended
            served[peer.name] += ended
        assert min(served.values()) > 0.3 * max(served.values())

    asyncio.run(go())


def test_without_redis_a_router_keeps_to_its_share() -> None:
    async def go() -> None:
        one, two = peers(2, 8)
        two.running = 6
        await two.exchange()
        await one.exchange()
        assert one.routers.seats(one.worker) == 2
        one.store.is_down = True
        await one.exchange()
        assert one.routers.seats(one.worker) == 4

    asyncio.run(go())


def test_without_redis_those_that_had_nothing_to_do_have_their_share_too() -> None:
    """Each of them may get requests, and knows nothing of the others."""

    async def go() -> None:
        everybody = peers(3, 8)
        for peer in (*everybody, *everybody):
            await peer.exchange()
        assert [peer.routers.seats(peer.worker) for peer in everybody] == [8, 8, 8]
        everybody[0].store.is_down = True
        for peer in everybody:
            await peer.exchange()
        assert sorted(peer.routers.seats(peer.worker) for peer in everybody) == [2, 3, 3]

    asyncio.run(go())


def test_requests_that_wait_for_one_model_leave_others_seats_alone() -> None:
    async def go() -> None:
        one, two = peers(2, 8)
        other = msgspec.structs.replace(
            one.worker,
            worker_id="d1",
            model=msgspec.structs.replace(one.worker.model, name="other"),
        )
        await one.exchange()
        for by_model, seats, seats_of_other in (
            ({one.worker.model.name: 5}, 4, 8),
            ({one.worker.model.name: 5, "other": 0}, 4, 8),
            ({one.worker.model.name: 0, "other": 5}, 8, 4),
        ):
            told = RouterRecord(router_id=two.name, address="", waiting_by_model=by_model)
            await two.routers.exchange(told)
            await one.exchange()
            assert one.routers.seats(other) == seats_of_other
            assert one.routers.seats(one.worker) == seats

    asyncio.run(go())


def test_a_router_that_ended_leaves_its_seats() -> None:
    async def go() -> None:
        one, two = peers(2, 8)
        two.running = 6
        await two.exchange()
        await one.exchange()
        await two.routers.release()
        await one.exchange()
        assert (one.routers.num_alive, one.routers.seats(one.worker)) == (0, 8)

    asyncio.run(go())


def test_a_choice_costs_no_more_for_what_others_have_elsewhere() -> None:
    """Each choice asks for the seats of every worker."""
    num_reads = 0

    class Loads(tuple[RoutedLoad, ...]):
        def __iter__(self) -> Iterator[RoutedLoad]:
            nonlocal num_reads
            num_reads += 1
            return super().__iter__()

    async def go() -> None:
        one, two = peers(2, 8)
        two.running = 3
        await two.exchange()
        await one.exchange()
        (other,) = one.routers._others.values()
        one.routers._others = {"o": msgspec.structs.replace(other, loads=Loads(other.loads))}
        assert [one.routers.seats(one.worker) for _ in range(100)] == [5] * 100

    asyncio.run(go())
    assert num_reads == 0


def test_a_record_that_cannot_be_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It comes ten times a second, like from a router of a later version."""

    async def go() -> None:
        (one,) = peers(1, 8)
        told = one.store.announce_router
        unread = [b'{"router_id": 1}']

        async def announce(record: RouterRecord, lease_s: float) -> list[bytes]:
            return [*await told(record, lease_s), *unread]

        one.store.announce_router = announce  # type: ignore[method-assign]
        for _ in range(3):
            await one.exchange()
        assert caplog.text.count("ignored a router record") == 1
        unread.append(b"{}")
        for _ in range(3):
            await one.exchange()
        assert caplog.text.count("ignored a router record") == 2
        unread.clear()
        await one.exchange()
        unread.append(b"{}")
        await one.exchange()
        assert caplog.text.count("ignored a router record") == 3, "it is there again"

    asyncio.run(go())
