"""How a host finds its leader by a name, whichever addresses the name has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopbacks import LOOPBACKS, give_name
from worker.test_nodes import asked, config, leader

from effuse.worker.messages import RankOrders
from effuse.worker.node import LeaderLink, NodeAgent
from effuse.worker.node_messages import Joining, Welcome
from effuse.worker.nodes import Nodes

NAME = "localhost"
FAR = "leader-0"  # a name that need not be of this machine
needs_ipv6 = pytest.mark.skipif(len(LOOPBACKS) == 1, reason="no address of IPv6")


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's looks up names by itself, and does not know those of a test."""
    with contextlib.ExitStack() as kept:

        def keep(*_: object, master_listen_fd: int, **__: object) -> None:
            kept.enter_context(socket.socket(fileno=master_listen_fd))

        monkeypatch.setattr("effuse.worker.nodes.dist.TCPStore", keep)
        yield


async def meets(nodes: Nodes, link: LeaderLink) -> bool:
    offer = Joining(node=1, settings=dict(nodes.roll.settings))
    return isinstance(await asked(nodes, link, offer, 3.0), Welcome)


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "master", "addresses"),
    [
        (NAME, NAME, ("127.0.0.1",)),
        (NAME, NAME, ("::1", "127.0.0.1")),
        (NAME, NAME, ("127.0.0.1", "::1")),
        (NAME, NAME, ("::1",)),
        ("0.0.0.0", FAR, ("::1", "127.0.0.1")),
        ("::", FAR, ("::1", "127.0.0.1")),
        ("::", FAR, ("::1",)),
        (NAME, "::1", ("127.0.0.1", "::1")),
        (NAME, "127.0.0.1", ("::1", "127.0.0.1")),
    ],
)
def test_a_host_meets_its_leader(
    host: str,
    master: str,
    addresses: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (NAME, FAR):
        give_name(monkeypatch, name, *addresses)
    own = config(tmp_path, host=host, master_addr=master, allow_plaintext="all")

    async def meet() -> None:
        link = LeaderLink(replace(own, node_rank=1))
        with contextlib.closing(link), leader(own) as nodes:
            assert await meets(nodes, link)
            where = (link.host, nodes.address.port)
            socket.create_connection(where, timeout=1.0).close()  # as its ranks do

    asyncio.run(meet())


@needs_ipv6
def test_ranks_of_a_host_go_where_it_met_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name(monkeypatch, NAME, "::1")
    own = config(tmp_path, host=NAME, master_addr=NAME)
    found: list[RankOrders] = []

    async def start(_: str, orders: RankOrders) -> asyncio.subprocess.Process:
        found.append(orders)
        return await asyncio.create_subprocess_exec("true")

    monkeypatch.setattr("effuse.worker.node.start", start)

    async def meet() -> None:
        there = replace(own, node_rank=1)
        agent, link = NodeAgent(there, asyncio.Event(), lambda _: None), LeaderLink(there)
        with contextlib.closing(link), leader(own) as nodes:
            await agent._start(link.host, nodes.roll.welcomes[1])
            await agent._end_ranks()

    asyncio.run(meet())
    (orders,) = found
    assert orders.store is not None and orders.store.host == "::1"
    assert orders.leader is not None
    for endpoint in (orders.leader.commands, orders.leader.answers):
        assert endpoint.startswith("tcp://[::1]:")


def test_a_host_looks_up_a_name_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader's pod may get another address, or its first one after the host has begun."""
    monkeypatch.setattr("effuse.worker.node._LOOK_UP_S", 0.2)
    own = config(tmp_path, host="127.0.0.1", master_addr=NAME)
    give_name(monkeypatch, NAME, "127.0.0.2")
    stop = asyncio.Event()

    async def meet() -> None:
        with leader(own) as nodes:
            running = asyncio.ensure_future(
                NodeAgent(replace(own, node_rank=1), stop, lambda _: None).run()
            )
            for turn in range(100):
                nodes.turn()
                await asyncio.sleep(0.05)
                if turn == 10:
                    assert nodes.roll.missing == [1]
                    give_name(monkeypatch, NAME, "127.0.0.1")
                if not nodes.roll.missing:
                    break
            assert nodes.roll.missing == []
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    async def start(*_: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sleep", "1000")

    monkeypatch.setattr("effuse.worker.node.start", start)
    asyncio.run(meet())
