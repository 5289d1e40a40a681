"""Digests of pages: of which bytes, in which order, and that they are taken beside other work."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import xxhash
from eventually import eventually
from kvtransfer.fixtures import LARGE, SEED, SMALL, filled

from effuse.kernels.pages_digests import piece_bytes_of
from effuse.kvtransfer import digest
from effuse.kvtransfer.digest import (
    BesideCopies,
    DeviceDigester,
    DigestJob,
    HostDigester,
    PieceDigests,
    digester_of,
    pages_digest,
    pieces_in_head,
    prompt_digest,
)
from effuse.kvtransfer.layout import KVLayout, PageMemory


def expected(memory: PageMemory, page_id: int, groups: range, seed: int) -> list[int]:
    """By the definition: xxh3_64 of each piece, as int64."""
    layout = memory.layout
    size = piece_bytes_of(layout.head_bytes)
    data = bytes(memory.bytes_at(page_id))
    span = range(groups.start * layout.group_bytes, groups.stop * layout.group_bytes, size)
    words = [xxhash.xxh3_64_intdigest(data[at : at + size], seed) for at in span]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def take(memory: PageMemory, pages: list[int], groups: range, seed: int = SEED) -> PieceDigests:
    found = HostDigester(memory).begin(pages, groups, seed)()
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_pieces_are_those_of_the_groups_that_were_asked_for(layout: KVLayout) -> None:
    memory, groups = filled(layout, 4), range(1, layout.num_groups)
    found = take(memory, [3, 0], groups, seed=2**63 - 1)
    assert found.shape == (2, len(groups) * 2 * pieces_in_head(layout))
    for row, page in zip(found.tolist(), (3, 0), strict=True):
        assert row == expected(memory, page, groups, 2**63 - 1)


def test_groups_that_are_taken_one_by_one_are_the_page() -> None:
    memory = filled(LARGE, 4)
    parts = [take(memory, [2, 1], range(g, g + 1)) for g in range(LARGE.num_groups)]
    whole = take(memory, [2, 1], range(LARGE.num_groups))
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert pages_digest(np.concatenate(parts, axis=1)) == pages_digest(whole)


@pytest.mark.parametrize("least", [1, 1 << 20], ids=["kept", "made anew"])
def test_views_of_pages_follow_their_bytes_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(digest, "KEPT_BYTES", least)
    monkeypatch.setattr(digest, "MOST_VIEWS", 2 * LARGE.num_groups * 2 * pieces_in_head(LARGE))
    memory, groups = filled(LARGE, 8), range(LARGE.num_groups)
    digester = HostDigester(memory)
    for turn in range(3):
        memory.tensor.add_(turn)
        found = digester.begin(range(8), groups, SEED)()
        assert found is not None
        assert np.array_equal(found, take(memory, [*range(8)], groups))
        assert len(digester._views) == (2 if least == 1 else 0)


def test_the_digest_of_pages_is_that_of_their_pieces_in_order() -> None:
    whole = take(filled(SMALL, 2), [1, 0], range(SMALL.num_groups))
    assert pages_digest(whole) == xxhash.xxh3_128_digest(whole.astype("<i8").tobytes())
    assert pages_digest(whole[::-1]) != pages_digest(whole)
    for place in np.ndindex(whole.shape):
        changed = whole.copy()
        changed[place] ^= 1
        assert pages_digest(changed) != pages_digest(whole)


def test_a_host_takes_digests_at_once() -> None:
    memory = filled(SMALL, 4)
    before = take(memory, [1], range(SMALL.num_groups))
    job = digester_of(memory).begin([1], range(SMALL.num_groups), SEED)
    memory.tensor[1] = 0
    found = job()
    assert found is not None
    assert np.array_equal(found, before)


class Gated:
    """Digests of pages in host memory that wait at a gate, and the threads that compute them."""

    def __init__(self, memory: PageMemory) -> None:
        self.gate = threading.Event()
        self.begun: list[tuple[int, threading.Thread]] = []  # first pages, and their threads
        self._digester = HostDigester(memory)

    def begin(
        self, page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        self.begun.append((page_ids[0], threading.current_thread()))
        assert self.gate.wait(20)
        return self._digester.begin(page_ids, groups, seed, heads)


def finished(job: DigestJob) -> PieceDigests:
    """Its digests, once it has ended."""
    asyncio.run(eventually(lambda: job() is not None))
    found = job()
    assert found is not None
    return found


def test_many_bytes_are_digested_in_order_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, groups, heads = filled(LARGE, 4), range(1, LARGE.num_groups), range(1, 2)
    monkeypatch.setattr(digest, "BESIDE_BYTES", 2 * LARGE.bytes_of(heads, groups))
    gated, host, pages = Gated(memory), HostDigester(memory), ([3, 0], [1, 2])
    beside = BesideCopies(gated, LARGE)
    jobs = [beside.begin(one, groups, SEED, heads) for one in pages]
    assert [job() for job in jobs] == [None, None]
    gated.gate.set()
    for job, one in zip(jobs, pages, strict=True):
        expected = finished(host.begin(one, groups, SEED, heads))
        assert np.array_equal(finished(job), expected)
    (first, thread), (second, other) = gated.begun
    assert (first, second) == (3, 1) and thread is other is not threading.current_thread()
    assert beside.begin([2], groups, SEED, heads)() is not None
    assert gated.begun[-1] == (2, threading.current_thread())
    gated.gate.clear()
    running, waiting = (beside.begin([at, 2], groups, SEED, heads) for at in (0, 1))
    asyncio.run(eventually(lambda: gated.begun[-1][0] == 0))
    beside.close()
    gated.gate.set()
    assert len(finished(running)) == 2
    asyncio.run(eventually(lambda: not thread.is_alive()))
    with pytest.raises(CancelledError):
        waiting()
    assert gated.begun[-1][0] == 0, "it began after the end"


def test_an_error_beside_a_copy_reaches_the_connector() -> None:
    """Otherwise a push would wait for its digests until its lease ends."""
    memory = filled(LARGE, 2)
    beside = BesideCopies(HostDigester(memory), LARGE)
    pages = [0] * (digest.BESIDE_BYTES // LARGE.page_bytes) + [7]  # of which there is none
    job = beside.begin(pages, range(LARGE.num_groups), SEED)
    with pytest.raises(IndexError):
        finished(job)
    beside.close()


def test_prompts_differ_by_every_id_and_their_order() -> None:
    digests = {prompt_digest(p) for p in ([1, 2, 3], [1, 3, 2], [1, 2], [1, 2, 3, 0], [], [0])}
    assert len(digests) == 6
    assert prompt_digest([1, 2, 3]) == prompt_digest(np.array([1, 2, 3]))


class SlowDevice:
    """The objects and calls of a DeviceDigester, without a device: a job ends when `over` returns
    so.
    """

    def __init__(self, num_ids: int, num_found: int) -> None:
        self.num_ids, self.num_found = num_ids, num_found
        self.ids_on_host = np.zeros(num_ids, dtype=np.int32)
        self.found_on_host = np.zeros(num_found, dtype=np.int64)
        self.ids = self.found = None
        self.over = False

    @property
    def done(self) -> SlowDevice:
        return self

    def query(self) -> bool:
        return self.over

    def record(self, stream: object) -> None:
        """Nothing is queued."""

    @staticmethod
    def take(*tensors: object, **sizes: int) -> None:
        """Nothing is computed."""


def test_memory_of_a_forgotten_job_is_held_until_the_device_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "_Buffers", SlowDevice)
    digester = object.__new__(DeviceDigester)
    vars(digester).update(
        _layout=SMALL, _stream=None, _pool=SlowDevice, _keys={SEED: object()}, _free=[], _running=[]
    )
    groups = range(SMALL.num_groups)
    forgotten: Any = digester.begin([1], groups, SEED)
    memory = weakref.ref(forgotten.buffers)
    del forgotten
    asked: Any = digester.begin([2], groups, SEED)
    assert memory() is not None and asked() is None
    kept: Any = memory()
    kept.over = asked.buffers.over = True
    del kept
    assert asked() is not None
    again: Any = digester.begin([3], groups, SEED)
    assert memory() is None and again.buffers is asked.buffers
