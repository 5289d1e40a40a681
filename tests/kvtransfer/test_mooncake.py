"""The shared pool of a real Mooncake Store: a master and memory in processes, over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from e2e.client import wait_until
from kvtransfer.mooncake_master import Mooncake
from kvtransfer.pool_user import FACTS, KEYS, MEMORY, PoolUser

from effuse.kvtransfer.mooncake_pool import MooncakePool

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    running = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.close()


@pytest.fixture
def users(mooncake: Mooncake) -> Iterator[tuple[PoolUser, PoolUser]]:
    mooncake.run("store.remove_all(True)")
    both = PoolUser(mooncake.address), PoolUser(mooncake.address)
    yield both
    for user in both:
        user.pool.close()


def test_a_unit_comes_to_another_worker_as_it_was(users: tuple[PoolUser, PoolUser]) -> None:
    """From slots in any order to others."""
    one, other = users
    size = one.keep(KEYS[0], 3, 4, 5, 1)
    assert size > 4 * MEMORY.page_bytes
    assert other.load(KEYS[0], 9, 2, 3, 15) == FACTS
    assert torch.equal(other.slots[[9, 2, 3, 15]], one.slots[[3, 4, 5, 1]])
    assert one.keep(KEYS[0], 3, 4, 5, 1) == size  # it is there already


def test_the_first_units_of_a_text_are_found(users: tuple[PoolUser, PoolUser]) -> None:
    one, other = users
    for key in (KEYS[0], KEYS[1], KEYS[3]):
        one.keep(key, 0)
    assert other.count(*KEYS[:5]) == 2
    assert other.count(*KEYS[4:]) == 0


def test_models_and_namespaces_share_nothing(
    mooncake: Mooncake, users: tuple[PoolUser, PoolUser]
) -> None:
    users[0].keep(KEYS[0], 0)
    stranger = PoolUser(mooncake.address, "another model")
    assert stranger.count(KEYS[0]) == 0
    stranger.pool.close()
    names = mooncake.run("print(store.get_size('effuse/tests/model/" + KEYS[0].hex() + "'))")
    assert int(names.splitlines()[-1]) > MEMORY.page_bytes


def test_a_unit_that_is_forgotten_leaves_the_pool(users: tuple[PoolUser, PoolUser]) -> None:
    one, other = users
    one.pool.kept(KEYS[0], b"", one.keep(KEYS[0], 0))
    other.load(KEYS[0], 0)  # it has a lease
    one.pool.forget(KEYS[0])
    wait_until(lambda: other.count(KEYS[0]) == 0, "the unit is still there")
    with pytest.raises(FileNotFoundError):
        other.load(KEYS[0], 0)


@pytest.mark.parametrize("way", ["cut", "foreign", "another unit"])
def test_wrong_objects_are_refused(
    mooncake: Mooncake, users: tuple[PoolUser, PoolUser], way: str
) -> None:
    one, other = users
    one.keep(KEYS[0], 0)
    name = "'effuse/tests/model/" + KEYS[1].hex() + "'"
    value = {
        "cut": "b'x' * 40",
        "foreign": f"b'x' * {MEMORY.page_bytes + 80}",
        "another unit": "store.get('effuse/tests/model/" + KEYS[0].hex() + "')",
    }[way]
    assert mooncake.run(f"print(store.put({name}, {value}))").splitlines()[-1] == "0"
    with pytest.raises(ValueError, match=r"unit|incomplete|digest"):
        other.load(KEYS[1], 0)
    with pytest.raises(ValueError, match=r"incomplete|expected"):
        other.load(KEYS[0], 0, 1)


def test_a_full_pool_refuses(mooncake: Mooncake, users: tuple[PoolUser, PoolUser]) -> None:
    """Objects that were read a moment ago are not evicted."""
    one, _ = users
    mooncake.fill()
    with pytest.raises(OSError, match="full"):
        for key in KEYS:
            one.keep(key, *range(16))


def test_a_master_that_stands_still_is_given_up(
    mooncake: Mooncake, users: tuple[PoolUser, PoolUser], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's own calls wait 30 s and longer. Nothing of its process is left."""
    monkeypatch.setattr("effuse.kvtransfer.mooncake_pool._ANSWER_S", 0.5)
    one, other = users
    one.keep(KEYS[0], 0)
    assert one.pool._client is not None
    process = one.pool._client._process
    with mooncake.paused():
        calls: list[Callable[[], object]]
        calls = [lambda: one.count(KEYS[0]), lambda: other.load(KEYS[0], 0)]
        for call in calls:
            began_s = time.monotonic()
            with pytest.raises(ConnectionError, match=r"no answer within 0.5 s"):
                call()
            assert time.monotonic() - began_s < 10
        assert process.poll() is not None
        with pytest.raises(ConnectionError):
            one.pool.open().result(20)
    monkeypatch.undo()
    one.pool.open().result(20)
    assert one.count(KEYS[0]) == 1


def test_a_dead_master_is_an_error_and_its_successor_is_used(tmp_path: Path) -> None:
    mooncake = Mooncake(tmp_path)
    one = PoolUser(mooncake.address)
    one.keep(KEYS[0], 0)
    mooncake.close()
    calls: list[Callable[[], object]]
    calls = [lambda: one.count(KEYS[0]), lambda: one.pool.open().result(20)]
    for call in calls:
        with pytest.raises(ConnectionError, match="code -900"):
            call()
    fresh = MooncakePool(mooncake.address, "model", one.host)
    with pytest.raises(ConnectionError, match="refused"):
        fresh.open().result(20)
    mooncake.start()
    fresh.open().result(20)
    wait_until(lambda: one.pool.open().exception(20) is None, "the client stays away")
    assert one.count(KEYS[0]) == 0
    one.keep(KEYS[0], 0)
    assert one.count(KEYS[0]) == 1
    for pool in (one.pool, fresh):
        pool.close()
    mooncake.close()


def test_the_process_ends_with_its_user(mooncake: Mooncake) -> None:
    one = PoolUser(mooncake.address)
    assert one.pool._client is not None
    process = one.pool._client._process
    assert process.poll() is None
    one.pool.close()
    assert process.poll() is not None
