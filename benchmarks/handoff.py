"""A handoff of 64 MiB between two processes, digests included, beside bare NIXL and bare ZMQ.

The sender's pages are final at once, so nothing but the handoff is timed: from the first write to
the receiver's word that every page was verified. Both sides are measured in turns, each with new
processes, since where two processes and their memory lie sets their pace; the figure is the median
of the turns' own ratios.
"""

from __future__ import annotations

import base64
import json
import select
import statistics
import subprocess
import sys
import time
from typing import IO

import torch

from effuse.benchmarks.raw_transfer import hear, raw_nixl_round_s, raw_zmq_round_s, receiving
from effuse.benchmarks.report import Figure
from effuse.kvtransfer.connector import Connector, Pushed, Received
from effuse.kvtransfer.layout import Fingerprint, KVLayout, ModelFacts, fingerprint
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import (
    AttemptId,
    BoundaryState,
    PageRef,
    Reservation,
    decode_reservation,
    encode,
)

# A page of 1 MiB: 16 layers, 8 KV heads of 128, 16 tokens, bf16.
LAYOUT = KVLayout("unified", 16, 8, 128, 16, "bfloat16")
NUM_BYTES = 64 << 20
NUM_PAGES = NUM_BYTES // LAYOUT.page_bytes
TURNS = 5
ROUNDS = 9
WARM_UP = 3
DEADLINE_S = 60.0
LEAST_SHARE = {"nixl": 0.7, "zmq": 0.5}


def measure(kind: str) -> tuple[Figure, list[str]]:
    """The share of the bare transport's rate that a handoff over `kind` reaches."""
    turns = [_turn(kind) for _ in range(TURNS)]
    share = statistics.median(bare_s / ours_s for bare_s, ours_s in turns)
    figure = Figure(
        name=f"handoff of 64 MiB over {kind}",
        value=share,
        limit=LEAST_SHARE[kind],
        unit="x",
        bound="at least",
        against=f"bare {kind} transfer of the same bytes on loopback",
    )
    bare, ours = (NUM_BYTES / statistics.median(times) / 1e9 for times in zip(*turns, strict=True))
    shares = sorted(bare_s / ours_s for bare_s, ours_s in turns)
    note = f"{kind}: {ours:.2f} GB/s handed over and verified, {bare:.2f} GB/s bare"
    return figure, [f"{note}; {shares[0]:.2f} to {shares[-1]:.2f} in {TURNS} turns"]


def _turn(kind: str) -> tuple[float, float]:
    """Median seconds of a bare transfer and of a handoff, one after the other.

    NIXL is given one descriptor or one a page; whichever is faster is the limit.
    """
    pieces = (NUM_BYTES, LAYOUT.page_bytes) if kind == "nixl" else (NUM_BYTES,)
    bare = min(statistics.median(_bare_rounds_s(kind, piece)[WARM_UP:]) for piece in pieces)
    return bare, statistics.median(_handoff_rounds_s(kind)[WARM_UP:])


def _bare_rounds_s(kind: str, piece: int) -> list[float]:
    if kind == "nixl":
        return raw_nixl_round_s(NUM_BYTES, WARM_UP + ROUNDS, piece)
    return raw_zmq_round_s(NUM_BYTES, WARM_UP + ROUNDS)


def _handoff_rounds_s(kind: str) -> list[float]:
    memory = PageMemory(LAYOUT, NUM_PAGES)
    memory.tensor.copy_(torch.randn(memory.tensor.shape))
    connector = _connector(kind, memory, "prefill-1", "prefill")
    connector.start()
    try:
        with receiving("effuse.benchmarks.handoff", kind) as (process, said):
            return [_round_s(connector, process, said, n) for n in range(WARM_UP + ROUNDS)]
    finally:
        connector.close()


def _round_s(
    connector: Connector, process: subprocess.Popen[str], said: IO[str], number: int
) -> float:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    reservation = decode_reservation(base64.b64decode(str(hear(said)["reservation"])))
    start = time.perf_counter()
    connector.push_pages(reservation, range(NUM_PAGES), 0)
    connector.finish(
        reservation, BoundaryState(prompt_len=NUM_PAGES * LAYOUT.page_size, tail_token_ids=())
    )
    _await_push(connector)
    took = time.perf_counter() - start
    assert hear(said)["verified"] == NUM_BYTES
    return took


def _await_push(connector: Connector) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for event in connector.poll():
            if isinstance(event, Pushed):
                return
            raise RuntimeError(f"the push ended with {event}")
        select.select([connector.fileno()], [], [], 1.0)
    raise TimeoutError(f"a handoff took longer than {DEADLINE_S} s")


def _receive(kind: str) -> None:
    """The receiving process: one reservation of all pages for each line on standard input."""
    memory = PageMemory(LAYOUT, NUM_PAGES)
    connector = _connector(kind, memory, "decode-1", "decode")
    connector.start()
    for line in sys.stdin:
        number = int(line)
        reservation = Reservation(
            attempt=AttemptId(f"request-{number}", 1, f"transfer-{number}"),
            incarnation="decode-1",
            address=connector.describe(),
            num_pool_pages=NUM_PAGES,
            page_bytes=memory.page_bytes,
            pages=tuple(PageRef(page, number + 1) for page in range(NUM_PAGES)),
            fingerprint=_fingerprint(),
            lease_s=DEADLINE_S,
        )
        connector.expect(reservation, "prefill-1")
        print(
            json.dumps({"reservation": base64.b64encode(encode(reservation)).decode()}), flush=True
        )
        print(json.dumps({"verified": _await_receipt(connector)}), flush=True)


def _await_receipt(connector: Connector) -> int:
    while True:
        select.select([connector.fileno()], [], [], 1.0)
        for event in connector.poll():
            if isinstance(event, Received):
                return event.manifest.num_bytes
            raise RuntimeError(f"the handoff ended with {event}")


def _connector(kind: str, memory: PageMemory, incarnation: str, role: str) -> Connector:
    if kind == "nixl":
        from effuse.kvtransfer.nixl_connector import NixlConnector

        return NixlConnector(memory, incarnation, _fingerprint(), role=role)
    from effuse.kvtransfer.zmq_connector import ZmqConnector

    return ZmqConnector(memory, incarnation, _fingerprint())


def _fingerprint() -> Fingerprint:
    facts = ModelFacts(
        weights="benchmark",
        architecture="sdar",
        block_size=16,
        mask_token_id=2,
        prompt_attention="causal_blocks",
        commit_rule="none",
    )
    return fingerprint(LAYOUT, facts)


if __name__ == "__main__":
    _receive(sys.argv[1])
