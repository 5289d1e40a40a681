"""The router's own account of the fleet: counts, turns, and excluded workers."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from msgspec.structs import replace
from router.fake_model import worker_record

from effuse.placement.leases import FleetView
from effuse.placement.records import Load, Role, WorkerRecord
from effuse.protos import errors
from effuse.protos.channels import FleetAccess, FleetChannel
from effuse.protos.rpc import FLEET_KEEPALIVE, Keepalive
from effuse.router.calls import Peers
from effuse.router.failures import Failure, FailureKind
from effuse.router.fleet import RoutedFleet
from effuse.router.policy import Holder, InFlight, Pair, Placement, Prospect


def worker(worker_id: str) -> WorkerRecord:
    role: Role = "prefill" if worker_id.startswith("p") else "decode"
    return worker_record(worker_id, role)


class View(FleetView):
    """Workers that never change and report nothing new."""

    def __init__(self, *records: WorkerRecord) -> None:
        self.records = records

    def workers(self) -> list[WorkerRecord]:
        return list(self.records)


def test_two_workers_of_each_role_share_64_requests_evenly() -> None:
    fleet = RoutedFleet(View(*(worker(n) for n in ("d0", "d1", "p0", "p1"))), "auto", lambda: 0.0)
    placed: dict[str, int] = {}
    for at in range(64):
        placement = fleet.place(fleet.need("fake"))
        assert placement is not None and placement.prefill is not None
        fleet.counted(placement, 10 + 3 * (at % 7), 64).__enter__()
        for record in (placement.decode, placement.prefill):
            placed[record.worker_id] = placed.get(record.worker_id, 0) + 1
    assert min(placed.values()) >= 28, placed


def test_equal_workers_take_turns() -> None:
    fleet = RoutedFleet(View(worker("d0"), worker("d1")), "auto", lambda: 0.0)
    order = []
    for _ in range(6):
        placement = fleet.place(fleet.need("fake"))
        assert placement is not None
        with fleet.counted(placement, 5, 5):
            order.append(placement.decode.worker_id)
    assert order == ["d0", "d1"] * 3


def test_suspicion_ends() -> None:
    now = 0.0
    fleet = RoutedFleet(View(worker("d0"), worker("d1")), "auto", lambda: now)
    fleet.standing.note(Failure(FailureKind.FAILED, errors.Bug("a step failed"), worker("d0")))

    def taken() -> str:
        placement = fleet.place(fleet.need("fake"))
        return "" if placement is None else placement.decode.worker_id

    assert taken() == "d1"
    now = 6.1
    assert taken() == "d0"


def test_one_attempt_at_a_time_tries_a_pair_that_failed() -> None:
    now = 0.0
    fleet = RoutedFleet(View(worker("d0"), worker("p0")), "remote", lambda: now)
    pair: Pair = (("p0", "1"), ("d0", "1"))
    failure = Failure(FailureKind.HANDOFF, errors.TransferFailed("no way"), worker("p0"), pair)
    fleet.standing.note(failure)
    assert fleet.place(fleet.need("fake")) is None
    now = 100.0
    placement = fleet.place(fleet.need("fake"))
    assert placement is not None and not fleet.need("fake").doubtful
    with fleet.counted(placement, 7, 9):
        assert fleet.need("fake").doubtful == {pair}


def test_those_that_wait_for_the_same_look_once_together() -> None:
    """A change wakes all: a thousand looks at hundreds of workers each would block the loop."""

    class CountedView(View):
        num_reads = 0

        def workers(self) -> list[WorkerRecord]:
            self.num_reads += 1
            return super().workers()

    view = CountedView(worker("d0"))
    fleet = RoutedFleet(view, "remote", lambda: 0.0)

    def look(waiting: int) -> int:
        before = view.num_reads
        for _ in range(waiting):
            need = fleet.need("fake")
            if fleet.known_prospect(need) is None:
                assert fleet.place(need) is None
                assert fleet.prospect(need) is Prospect.WORKER
            assert fleet.known_prospect(need) is Prospect.WORKER
        return view.num_reads - before

    async def go() -> None:
        once = look(1)
        assert look(1000) == 0 < once
        fleet.announce_change()
        assert look(1000) == once, "what has changed is seen"
        await asyncio.sleep(0)
        view.records = (worker("d0"), worker("p0"))
        assert fleet.place(fleet.need("fake")) is not None, "and so is what nobody announced"

    asyncio.run(go())


def test_counts_come_back_to_nothing() -> None:
    fleet = RoutedFleet(View(worker("d0"), worker("p0")), "auto", lambda: 0.0)
    placement = fleet.place(fleet.need("fake"))
    assert placement is not None
    with fleet.counted(placement, 7, 9):
        assert [c.in_flight.tokens + c.in_flight.to_prefill for c in fleet.candidates()] == [16, 7]
    assert [c.in_flight for c in fleet.candidates()] == [InFlight(placed=1)] * 2


@pytest.mark.parametrize("prefill", [None, worker("p0")], ids=["own prompt", "remote"])
def test_a_prompt_counts_until_it_is_complete(prefill: WorkerRecord | None) -> None:
    fleet = RoutedFleet(View(worker("d0"), worker("p0")), "auto", lambda: 0.0)
    placement = Placement(worker("d0"), prefill)
    with fleet.counted(placement, 7, 9) as share:
        for _ in range(2):
            share.end_prompt()
            decode, other = (c.in_flight for c in fleet.candidates())
            assert (decode.requests, decode.to_prefill, other.to_prefill) == (1, 0, 0)
    assert all(c.in_flight.is_idle for c in fleet.candidates())


def test_a_prompt_that_is_shared_counts_once() -> None:
    record = worker("d0")
    fleet = RoutedFleet(View(record), "auto", lambda: 0.0)
    with (
        fleet.counted(Placement(record, None), 100, 20),
        fleet.counted(Placement(record, None, shares_prompt=True), 100, 20),
    ):
        (found,) = fleet.candidates()
        assert found.in_flight == InFlight(requests=2, tokens=140, to_prefill=100, placed=2)
    (found,) = fleet.candidates()
    assert found.in_flight == InFlight(placed=2)


def test_calls_go_on_over_the_channels_that_they_have_however_often_certificates_change() -> None:
    """A certificate and its authority may be written some seconds apart."""
    now = 0.0
    made: list[FleetChannel] = []

    class Renewed(FleetAccess):
        version = 0

        def look(self) -> int:
            return self.version

        def connect(
            self, address: str, *, keepalive: Keepalive | None = FLEET_KEEPALIVE
        ) -> FleetChannel:
            made.append(super().connect(address, keepalive=keepalive))
            return made[-1]

    def num_closed() -> int:
        shut_down = grpc.ChannelConnectivity.SHUTDOWN
        return sum(channel.get_state() is shut_down for channel in made)

    async def go() -> None:
        nonlocal now
        access = Renewed()
        peers = Peers(lambda: now, access, longest_call_s=60.0)
        fleet = RoutedFleet(View(worker("d0")), "auto", lambda: now, peers=peers)
        for _ in range(3):
            fleet.peers.at(worker("d0").address)
            access.version += 1
            await fleet.forget_ended()
        assert (len(made), num_closed()) == (3, 0)
        now = 61.0
        await fleet.forget_ended()
        assert num_closed() == 3, "no call can run over them any more"
        for _ in range(100):
            fleet.peers.at(worker("d0").address)
            access.version += 1
            await fleet.forget_ended()
        assert len(made) - num_closed() < 10, "nor are there ever more of them"
        await fleet.peers.close()
        assert num_closed() == len(made)

    asyncio.run(go())


def test_attempts_at_one_life_hold_one_record_without_what_changes() -> None:
    decode, prefill = worker("d0"), worker("p0")
    fleet = RoutedFleet(View(decode, prefill), "auto", lambda: 0.0)
    held = [
        fleet.held(Placement(replace(decode, load=Load(running=at)), prefill)) for at in range(3)
    ]
    assert held[0].decode is held[1].decode is held[2].decode
    assert held[0].prefill is held[2].prefill and held[0].decode.load == Load()
    assert (held[0].decode.life, held[0].decode.model) == (decode.life, decode.model)
    other = fleet.held(Placement(replace(decode, role="both"), None))
    assert other.decode.role == "both" and other.prefill is None


def test_a_prompt_is_at_its_prefill_worker_until_its_kv_is_complete() -> None:
    async def main() -> None:
        fleet = RoutedFleet(View(), "auto", lambda: 0.0)
        prefill, decode = worker("p0"), worker("d0")
        with fleet.counted(Placement(decode, prefill), 100, 20) as share:
            assert fleet._in_flight[prefill.life].to_prefill == 100
            fleet._kept[prefill.life] = Holder("digest", "a request that waits for it")
            changed = fleet._changed
            share.end_prompt()
            assert changed.is_set()
            share.end_prompt()
            assert fleet._in_flight[prefill.life] == InFlight(placed=1)
            assert fleet._in_flight[decode.life].tokens == 120
        assert fleet._in_flight[prefill.life] == InFlight(placed=1)
        assert fleet._in_flight[decode.life] == InFlight(placed=1)
        for known, left in ((64, 36), (100, 1), (128, 1)):
            with fleet.counted(Placement(decode, None), 100, 20, known):
                assert fleet._in_flight[decode.life] == InFlight(1, 120, to_prefill=left, placed=2)
            fleet._in_flight[decode.life] = InFlight(placed=1)

    asyncio.run(main())
