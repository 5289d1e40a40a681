"""A handoff of 64 MiB between two processes, including digests, compared with bare NIXL and bare
ZMQ.

The sender's pages are final from the start, so only the handoff is timed: from the first write to
the receiver's report that every page was verified. Pages are scattered on both sides, as in used
pools, so that no two can travel as one; pages in the order of memory are also measured. Both sides
are measured in turns, each with new processes, because the placement of two processes and their
memory decides their pace. The figure is the median of the turns' own ratios.
"""

from __future__ import annotations

import base64
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO

import torch

from effuse.benchmarks.raw_transfer import (
    IN_ORDER,
    SCATTERED,
    WAYS,
    Move,
    Rounds,
    raw_rounds_s,
    receive,
    receiving,
    scattered,
)
from effuse.benchmarks.report import Figure
from effuse.kvtransfer.connector import Arrived, Connector, Expect, FinishPush, Pushed, PushPages
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.layout import Fingerprint, KVLayout, ModelFacts, PageMemory, fingerprint
from effuse.kvtransfer.messages import (
    AttemptId,
    BoundaryState,
    PageRef,
    Reservation,
    decode_reservation,
    encode,
)
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Transport

# A page of 1 MiB: 16 layers, 8 KV heads of 128, 16 tokens, bf16.
LAYOUT = KVLayout("unified", 16, 8, 128, 16, "bfloat16")
NUM_BYTES = 64 << 20
NUM_PAGES = NUM_BYTES // LAYOUT.page_bytes
MOVES = {
    SCATTERED: Move(LAYOUT.page_bytes, scattered(NUM_PAGES, 1), scattered(NUM_PAGES, 2)),
    IN_ORDER: Move(LAYOUT.page_bytes, tuple(range(NUM_PAGES)), tuple(range(NUM_PAGES))),
}
BOUNDARY = BoundaryState(
    prompt_len=NUM_PAGES * LAYOUT.page_size, prompt_digest=prompt_digest(()), tail_token_ids=()
)
TURNS = 5
ROUNDS = 9
WARM_UP = 3
DEADLINE_S = 60.0
# A bare transfer copies the bytes once. A handoff reads them twice more, for digests on both sides,
# at the speed of the same memory: on a GPU these reads are almost free, on two processors they are
# not. The aim over NIXL is 0.67.
ENCRYPTED = "zmq-encrypted"
LEAST_SHARE = {"nixl": 0.50, "zmq": 0.50}

Seconds = dict[str, float]  # medians, by way or by order of pages


def measure(kind: str) -> tuple[Figure, list[str]]:
    """The share of the bare transport's rate that a handoff of scattered pages reaches."""
    turns = [_turn(kind) for _ in range(TURNS)]
    share = statistics.median(shares_of(turns, kind, SCATTERED))
    figure = Figure(
        name=f"handoff of 64 MiB over {kind}, scattered pages",
        value=share,
        limit=LEAST_SHARE[kind],
        unit="x",
        bound="at least",
        against=f"bare {kind} transfer of the same pages on loopback, its faster way",
    )
    notes = [_note(turns, kind, order) for order in MOVES] + [_ways_note(turns, kind)]
    return figure, [*notes, *([_encrypted_note()] if kind == "zmq" else [])]


def _turn(kind: str) -> tuple[Seconds, Seconds]:
    """Median seconds of each bare way, and of a handoff in each order, one after another."""
    bare = raw_rounds_s(kind, MOVES[SCATTERED], WARM_UP + ROUNDS)
    return medians_s(bare), medians_s(_handoff_rounds_s(kind))


def medians_s(rounds: Rounds) -> Seconds:
    """Median seconds of the counted rounds."""
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in rounds.items()}


def limit_s(bare: Seconds, kind: str, order: str) -> float:
    """Seconds of the faster of the bare ways that move pages in this order."""
    return min(bare[way] for way, moved in WAYS[kind].items() if moved == order)


def shares_of(turns: Sequence[tuple[Seconds, Seconds]], kind: str, order: str) -> list[float]:
    """Each turn's share of the bare rate, ascending."""
    return sorted(limit_s(bare, kind, order) / ours[order] for bare, ours in turns)


def _note(turns: Sequence[tuple[Seconds, Seconds]], kind: str, order: str) -> str:
    ours = _rate(ours[order] for _, ours in turns)
    bare = _rate(limit_s(bare, kind, order) for bare, _ in turns)
    shares = shares_of(turns, kind, order)
    rates = f"{ours:.2f} GB/s handed over and verified, {bare:.2f} GB/s bare"
    span = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    return f"{kind}, pages {order}: {rates}; share {span} in {len(turns)} turns"


def _encrypted_note() -> str:
    """The share of the rate that remains with encryption (--encrypt-pages), in separate turns."""
    pairs = [
        [medians_s(_handoff_rounds_s(kind))[SCATTERED] for kind in ("zmq", ENCRYPTED)]
        for _ in range(TURNS)
    ]
    plain, sealed = (_rate(seconds) for seconds in zip(*pairs, strict=True))
    shares = sorted(one / other for one, other in pairs)
    span = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
    return f"zmq, encrypted: {sealed:.2f} GB/s, plain {plain:.2f}; share {span} in {TURNS} turns"


def _ways_note(turns: Sequence[tuple[Seconds, Seconds]], kind: str) -> str:
    rates = ", ".join(f"{way} {_rate(bare[way] for bare, _ in turns):.2f}" for way in WAYS[kind])
    return f"bare {kind}, GB/s: {rates}"


def _rate(seconds: Iterable[float]) -> float:
    return NUM_BYTES / statistics.median(seconds) / 1e9


def _handoff_rounds_s(kind: str) -> Rounds:
    """Rounds in both orders, in turns between the same two processes."""
    memory = PageMemory(LAYOUT, NUM_PAGES)
    memory.tensor.copy_(torch.randn(memory.tensor.shape))
    connector = _connector(kind, memory, "prefill-1", "prefill")
    connector.start()
    times: Rounds = {order: [] for order in MOVES}
    try:
        with receiving("effuse.benchmarks.handoff", kind) as (process, output):
            for number in range(WARM_UP + ROUNDS):
                for order in MOVES:
                    name = f"{number} {order}"
                    times[order].append(_round_s(connector, process, output, name, order))
    finally:
        connector.close()
    return times


def _round_s(
    connector: Connector, process: subprocess.Popen[str], output: IO[str], name: str, order: str
) -> float:
    assert process.stdin is not None
    process.stdin.write(json.dumps([name, order]) + "\n")
    process.stdin.flush()
    reservation = decode_reservation(base64.b64decode(str(receive(output)["reservation"])))
    start = time.perf_counter()
    connector.send(PushPages(reservation, MOVES[order].source, 0))
    connector.send(FinishPush(reservation, lambda: BOUNDARY))
    _await_push(connector)
    took = time.perf_counter() - start
    assert receive(output)["verified"] == NUM_BYTES
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
    for generation, line in enumerate(sys.stdin, start=1):
        name, order = json.loads(line)
        reservation = Reservation(
            attempt=AttemptId(name, 1, name),
            incarnation="decode-1",
            shards=connector.describe(),
            num_pool_pages=NUM_PAGES,
            pages=tuple(PageRef(page, generation) for page in MOVES[order].target),
            fingerprint=_fingerprint(),
            digest_seed=generation,
            lease_s=DEADLINE_S,
        )
        connector.send(Expect(reservation, "prefill-1"))
        print(
            json.dumps({"reservation": base64.b64encode(encode(reservation)).decode()}), flush=True
        )
        print(json.dumps({"verified": _await_receipt(connector)}), flush=True)


def _await_receipt(connector: Connector) -> int:
    while True:
        select.select([connector.fileno()], [], [], 1.0)
        for event in connector.poll():
            if isinstance(event, Arrived):
                return event.num_bytes
            raise RuntimeError(f"the handoff ended with {event}")


def _connector(kind: str, memory: PageMemory, incarnation: str, role: str) -> ThreadConnector:
    transport = _transport(kind, memory, incarnation, role)
    return ThreadConnector(transport, memory, incarnation, _fingerprint())


def _transport(kind: str, memory: PageMemory, incarnation: str, role: str) -> Transport:
    if kind == "nixl":
        from effuse.kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(memory, incarnation, role=role)
    from effuse.kvtransfer.zmq_sockets import CurveKeys
    from effuse.kvtransfer.zmq_transport import ZmqTransport

    return ZmqTransport(memory, keys=CurveKeys.of(bytes(32)) if kind == ENCRYPTED else None)


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
