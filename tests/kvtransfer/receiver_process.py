"""A receiving pool in a process of its own, driven by JSON lines; the connector tests' peer."""

from __future__ import annotations

import base64
import json
import select
import sys
import time
from typing import Any

from kvtransfer.fixtures import LARGE, SMALL, print_of, reservation

from effuse.kvtransfer.connector import Connector, Received, Refused
from effuse.kvtransfer.digest import page_digests
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import PageRef, encode

LAYOUTS: dict[str, KVLayout] = {"small": SMALL, "large": LARGE}


def main(kind: str, layout_name: str, num_pages: int, incarnation: str) -> None:
    """Serves until stdin ends."""
    layout = LAYOUTS[layout_name]
    memory = PageMemory(layout, num_pages)
    connector = make(kind, memory, incarnation)
    connector.start()
    said = sys.stdin.buffer
    while True:
        ready, _, _ = select.select([said, connector.fileno()], [], [], 30.0)
        if said in ready:
            line = said.readline()
            if not line:
                connector.close()
                return
            obey(json.loads(line), connector, memory, incarnation)
        for event in connector.poll():
            match event:
                case Received(transfer_id, manifest):
                    ids = [page.page_id for page in manifest.pages]
                    say(
                        event="received",
                        transfer=transfer_id,
                        at=time.monotonic(),
                        digests=[d.hex() for d in page_digests(memory, ids)],
                        tail=list(manifest.boundary.tail_token_ids),
                    )
                case Refused(transfer_id, cause, message):
                    say(event="refused", transfer=transfer_id, cause=cause.name, message=message)
                case other:
                    say(event=type(other).__name__)


def make(kind: str, memory: PageMemory, incarnation: str) -> Connector:
    """The connector under test."""
    if kind == "zmq":
        from effuse.kvtransfer.zmq_connector import ZmqConnector

        return ZmqConnector(memory, incarnation, print_of(memory.layout))
    from effuse.kvtransfer.nixl_connector import NixlConnector

    return NixlConnector(memory, incarnation, print_of(memory.layout), role="decode")


def obey(command: dict[str, Any], connector: Connector, memory: PageMemory, own: str) -> None:
    """Runs one command and answers it."""
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
            connector.expect(reserved, command["writer"])
            say(reservation=base64.b64encode(encode(reserved)).decode())
        case "forget":
            connector.forget(command["transfer"])
            say(forgotten=command["transfer"])
        case "digests":
            say(digests=[d.hex() for d in page_digests(memory, range(memory.num_pages))])
        case other:
            raise ValueError(f"unknown command {other}")


def say(**words: object) -> None:
    """One JSON line."""
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
