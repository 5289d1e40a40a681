"""A pool in a process of its own, driven by JSON lines: the connector tests' peer. One process
forks all of them."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from kvtransfer.fixtures import (
    LARGE,
    SHARED,
    SMALL,
    boundary,
    digests_of,
    filled,
    print_of,
    reservation,
)

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    Connector,
    Expect,
    FinishPush,
    Forget,
    Promised,
    PushPages,
)
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import PageRef, decode_reservation, encode
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Transport

DEVICE = "KV_TEST_DEVICE"  # the variable with the pool's device
LAYOUTS: dict[str, KVLayout] = {"small": SMALL, "large": LARGE, "shared": SHARED}


def main(kind: str, layout_name: str, num_pages: int, incarnation: str) -> None:
    """Serves until stdin ends."""
    layout = LAYOUTS[layout_name]
    memory = PageMemory(layout, num_pages, os.environ.get(DEVICE, "cpu"))
    connector = make(kind, memory, incarnation)
    connector.start()
    said, begun = sys.stdin.fileno(), b""
    reserved: dict[str, tuple[PageRef, ...]] = {}
    while True:
        ready, _, _ = select.select([said, connector.fileno()], [], [], 30.0)
        if said in ready:
            read = os.read(said, 1 << 20)
            if not read:
                connector.close()
                return
            *lines, begun = (begun + read).split(b"\n")
            for line in lines:
                obey(json.loads(line), connector, memory, incarnation, reserved)
        for event in connector.poll():
            match event:
                case Arrived(transfer_id, manifest):
                    ids = [page.page_id for page in reserved.pop(transfer_id)]
                    say(
                        event="received",
                        transfer=transfer_id,
                        at=time.monotonic(),
                        digests=[d.hex() for d in digests_of(memory, ids)],
                        tail=list(manifest.boundary.tail_token_ids),
                    )
                case ArrivalRefused(transfer_id, cause, message):
                    say(event="refused", transfer=transfer_id, cause=cause.name, message=message)
                case Promised():
                    pass  # it is no end: a slow machine's writer may send any number of them
                case other:
                    say(event=type(other).__name__.lower(), transfer=other.transfer_id)


def make(kind: str, memory: PageMemory, incarnation: str) -> ThreadConnector:
    """The connector under test."""
    return ThreadConnector(
        transport(kind, memory, incarnation), memory, incarnation, print_of(memory.layout)
    )


def transport(kind: str, memory: PageMemory, incarnation: str) -> Transport:
    """The transport under it."""
    if kind == "zmq":
        from effuse.kvtransfer.zmq_transport import ZmqTransport

        return ZmqTransport(memory)
    from effuse.kvtransfer.nixl_transport import NixlTransport

    return NixlTransport(memory, incarnation, role="decode", rank=memory.layout.rank)


def obey(
    command: dict[str, Any],
    connector: Connector,
    memory: PageMemory,
    own: str,
    pages_of: dict[str, tuple[PageRef, ...]],
) -> None:
    """Runs one command and answers it; notes which pages a transfer is to fill."""
    match command["do"]:
        case "reserve":
            pages = tuple(PageRef(page, generation) for page, generation in command["pages"])
            reserved = reservation(
                memory,
                connector.describe(),
                pages,
                incarnation=own,
                number=command["number"],
                lease_s=command["lease_s"],
            )
            pages_of[reserved.transfer_id] = pages
            connector.send(Expect(reserved, command["writer"]))
            say(reservation=base64.b64encode(encode(reserved)).decode())
        case "forget":
            connector.send(Forget(command["transfer"]))
            say(forgotten=command["transfer"])
        case "cancel":
            connector.send(Cancel(command["transfer"]))
        case "digests":
            say(digests=[d.hex() for d in digests_of(memory, range(memory.num_pages))])
        case "push":
            given = decode_reservation(base64.b64decode(command["reservation"]))
            if command["value"] is not None:
                memory.tensor.fill_(command["value"])
            connector.send(PushPages(given, tuple(command["pages"]), 0))
            connector.send(FinishPush(given, boundary))
        case "draw":
            memory.tensor.copy_(filled(memory.layout, memory.num_pages).tensor)
            say(drawn=True)
        case "spoil":
            spoil(connector, memory, command["page"])
            say(spoilt=True)
        case other:
            raise ValueError(f"unknown command {other}")


def spoil(connector: Connector, memory: PageMemory, page: int) -> None:
    """From now on a byte of this page changes between its arrival and its digest."""
    assert isinstance(connector, ThreadConnector)
    digester = connector._exchange._receptions._digester
    begin = digester.begin

    def begin_later(
        page_ids: Sequence[int], groups: range, seed: int, heads: range | None = None
    ) -> DigestJob:
        if page in page_ids:
            memory.byte_rows()[page, groups.start * memory.layout.group_bytes + 17] ^= 1
            if memory.device.type == "cuda":
                torch.cuda.synchronize()
        return begin(page_ids, groups, seed, heads)

    digester.begin = begin_later  # type: ignore[method-assign]


def say(**words: object) -> None:
    """One JSON line."""
    print(json.dumps(words), flush=True)


def fork_all(orders: socket.socket) -> None:
    """Forks a receiver for each order until the other end is closed, and answers its process id.

    An order has its arguments and environment, and the descriptors of its stdin and stdout.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes note of their ends
    while True:
        order, files, _, _ = socket.recv_fds(orders, 1 << 20, 2)
        if not order:
            return
        if not (pid := os.fork()):
            with orders:
                fork(files, *json.loads(order))
        for file in files:
            os.close(file)
        orders.send(str(pid).encode())


def fork(files: Sequence[int], arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """The life of a forked process, up to an end that the interpreter does not delay."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    kind, layout, num_pages, incarnation = arguments
    try:
        main(kind, layout, int(num_pages), incarnation)
    finally:
        if sys.exception() is not None:
            traceback.print_exc()
        os._exit(0)


if __name__ == "__main__":
    fork_all(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
