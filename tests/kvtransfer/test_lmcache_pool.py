"""Units in an LMCache server, with a stand-in for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from kvtransfer.lmcache_stand_in import StandIn
from kvtransfer.pool_user import FACTS, KEYS, MEMORY

from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer import stores
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.lmcache_pool import LMCachePool
from effuse.kvtransfer.stores import UnitFacts


@pytest.fixture
def server() -> Iterator[StandIn]:
    with contextlib.closing(StandIn()) as running:
        yield running


class User:
    def __init__(self, server: StandIn, content: str = "model") -> None:
        self.host = HostPages(MEMORY, 16, is_shared=True)
        self.host._slots.copy_(torch.randint(0, 255, self.host._slots.shape, dtype=torch.uint8))
        self.pool = LMCachePool(PoolAddress.parse(server.url), content)
        self.pool.open().result(20)

    def keep(self, key: bytes, *slots: int, facts: UnitFacts = FACTS) -> int:
        return self.pool.keep(key, b"", lambda: facts, self.host.views(slots)).result(20)

    def load(self, key: bytes, *slots: int) -> UnitFacts:
        return self.pool.load(key, self.host.views(slots)).result(20)


@pytest.mark.parametrize("facts", [FACTS, UnitFacts(b"d" * 16)], ids=["row", "no row"])
def test_a_unit_comes_to_another_worker_as_it_was(server: StandIn, facts: UnitFacts) -> None:
    one, other = User(server), User(server)
    assert one.keep(KEYS[0], 3, 1, facts=facts) == len(next(iter(server.objects.values())))
    assert other.load(KEYS[0], 9, 11) == facts
    assert torch.equal(other.host._slots[[9, 11]], one.host._slots[[3, 1]])
    assert one.pool.number == other.pool.number != User(server, "other").pool.number
    assert other.pool.find(dict.fromkeys(KEYS[:2], b"")).result(20) == 1


def test_workers_with_other_names_of_the_server_share_units(server: StandIn) -> None:
    one = User(server)
    one.keep(KEYS[0], 1)
    server.url = server.url.replace("127.0.0.1", "localhost")
    other = User(server)
    assert other.pool.find({KEYS[0]: b""}).result(20) == 1
    assert other.load(KEYS[0], 2) == FACTS
    assert other.pool.number != one.pool.number, "the names may be those of two servers"
    server.url = server.url.replace("/tests", "/others")
    assert User(server).pool.find({KEYS[0]: b""}).result(20) == 0


def test_many_units_are_sought(server: StandIn) -> None:
    user = User(server)
    keys = [number.to_bytes(32, "big") for number in range(600)]
    for key in keys[:520]:
        server.objects[user.pool._asked(1, key)[36:].decode().strip()] = b""
    assert user.pool.find(dict.fromkeys(keys, b"")).result(20) == 520


def test_what_is_no_unit_is_refused_and_the_next_one_still_comes(server: StandIn) -> None:
    user = User(server)
    user.keep(KEYS[0], 1, 2)
    user.keep(KEYS[1], 1)
    server.objects = {
        key: one[:-1] if at else one
        for at, (key, one) in enumerate(reversed(server.objects.items()))
    }
    for key, slots in ((KEYS[0], (3, 4)), (KEYS[1], (3, 4))):
        with pytest.raises(ValueError, match=r"incomplete|expected"):
            user.load(key, *slots)
    name = user.pool._asked(1, KEYS[3])[36:].decode().strip()
    server.objects[name] = bytes(2 << 20)
    with pytest.raises(ValueError, match="expected"):
        user.load(KEYS[3], 3)
    assert user.load(KEYS[1], 3) == FACTS
    with pytest.raises(FileNotFoundError):
        user.load(KEYS[2], 3)


def test_a_server_that_ends_a_connection_is_asked_anew(server: StandIn) -> None:
    user = User(server)
    user.keep(KEYS[0], 1)
    assert user.load(KEYS[0], 2) == user.load(KEYS[0], 2) == FACTS
    server.is_cut = True
    for call in (lambda: user.load(KEYS[0], 2), lambda: user.keep(KEYS[1], 2)):
        with pytest.raises(ConnectionError):
            call()
    server.is_cut = False
    for _ in range(2):  # by either reader
        assert user.pool.load(KEYS[0], user.host.views([2])).result(20) == FACTS
    user.pool.close()


def test_units_of_a_server_are_forgotten_here_beyond_a_number_and_stay_there(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MOST_KNOWN", 2)
    user = User(server)
    for key in KEYS[:4]:
        user.pool.kept(key, b"", user.keep(key, 1))
    assert [key in user.pool for key in KEYS[:4]] == [False, False, True, True]
    assert len(server.objects) == 4
    assert user.pool.num_bytes == 2 * len(next(iter(server.objects.values())))
