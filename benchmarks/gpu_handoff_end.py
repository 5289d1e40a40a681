"""One of the two processes of gpu_handoff: a pool, a connector over it, and a bare NIXL agent.

The bare agent polls without a pause and does nothing but write, notify and answer.
"""

from __future__ import annotations

import base64
import json
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from effuse.kvtransfer import nixl_transport
from effuse.kvtransfer.connector import Arrived, Pushed
from effuse.kvtransfer.layout import KVLayout, ModelFacts, fingerprint
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import (
    AttemptId,
    BoundaryState,
    PageRef,
    Reservation,
    decode_reservation,
    encode,
)
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Pace, Transport

LAYOUT = KVLayout("unified", 28, 4, 128, 32, "bfloat16")  # Dream-7B's, pages of 32 tokens
FACTS = ModelFacts(
    weights="benchmark",
    architecture="dream",
    block_size=32,
    mask_token_id=1,
    prompt_attention="bidirectional",
    commit_rule="none",
)
LEASE_S = 60.0


class End:
    """Serves commands from standard input until it ends."""

    def __init__(self, role: str, kind: str, num_pages: int, *, is_busy: bool) -> None:
        if is_busy:
            for pace in (Pace.HOT, Pace.MOVING, Pace.BEGUN):
                nixl_transport.PAUSE_S[pace] = 0.0
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._role, self._kind = role, kind
        self._memory = PageMemory(LAYOUT, num_pages, device)
        self._memory.tensor.normal_()
        self._agreed = fingerprint(LAYOUT, FACTS)
        self._connector = ThreadConnector(
            self._transport(), self._memory, f"{role}-1", self._agreed
        )
        self._connector.start()
        self._generation = 0
        self._bare = Bare(role, self._memory) if kind == "nixl" else None

    def serve(self) -> None:
        """Does what the lines say."""
        for line in sys.stdin:
            command = json.loads(line)
            getattr(self, f"_{command.pop('do')}")(**command)

    def _transport(self) -> Transport:
        if self._kind == "nixl":
            return nixl_transport.NixlTransport(self._memory, f"{self._role}-1", role=self._role)
        from effuse.kvtransfer.zmq_transport import ZmqTransport

        return ZmqTransport(self._memory)

    def _hello(self) -> None:
        say(**({} if self._bare is None else self._bare.hello()))

    def _meet(self, **peer: str) -> None:
        say(**({} if self._bare is None else self._bare.meet(**peer)))

    def _reserve(self, name: str, pages: Sequence[int]) -> None:
        self._generation += 1
        reservation = Reservation(
            attempt=AttemptId(name, 1, name),
            incarnation=f"{self._role}-1",
            address=self._connector.describe(),
            num_pool_pages=self._memory.num_pages,
            page_bytes=self._memory.page_bytes,
            pages=tuple(PageRef(page, self._generation) for page in pages),
            fingerprint=self._agreed,
            digest_seed=5,
            lease_s=LEASE_S,
        )
        self._connector.expect(reservation, "sender-1")
        say(reservation=base64.b64encode(encode(reservation)).decode())
        arrived = self._await()
        assert isinstance(arrived, Arrived), arrived
        say(verified=arrived.manifest.num_bytes)

    def _push(self, reservation: str, pages: Sequence[int]) -> None:
        given = decode_reservation(base64.b64decode(reservation))
        boundary = BoundaryState(
            prompt_len=len(pages) * LAYOUT.page_size, prompt_digest=bytes(16), tail_token_ids=()
        )
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize()
        self._connector.push_pages(given, pages, 0)
        self._connector.finish(given, lambda: boundary)
        pushed = self._await()
        assert isinstance(pushed, Pushed), pushed
        say(seconds=pushed.seconds)

    def _write(self, source: Sequence[int], target: Sequence[int]) -> None:
        assert self._bare is not None
        say(**self._bare.write(source, target))

    def _answer(self) -> None:
        assert self._bare is not None
        say(**self._bare.answer())

    def _await(self) -> object:
        while True:
            select.select([self._connector.fileno()], [], [], LEASE_S)
            for event in self._connector.poll():
                return event


class Bare:
    """A NIXL agent over the same pool, written as one would for a benchmark of NIXL."""

    def __init__(self, role: str, memory: PageMemory) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._memory = memory
        self._kind = "VRAM" if memory.device.type == "cuda" else "DRAM"
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(f"bare-{role}", config)
        self._agent.register_memory([(memory.address, memory.num_bytes, 0, "")], self._kind)
        self._peer = ""

    def hello(self) -> dict[str, str]:
        """How it is reached."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": str(self._memory.address)}

    def meet(self, metadata: str, address: str) -> dict[str, str]:
        """Gets to know the other one; says how this one is reached."""
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._peer = peer.decode() if isinstance(peer, bytes) else str(peer)
        size, count = self._memory.page_bytes, self._memory.num_pages
        self._own, self._theirs = (
            self._agent.prep_xfer_dlist(
                owner, np.array([[base, size, 0, size, count]], dtype=np.uint64), self._kind
            )
            for owner, base in (("", self._memory.address), (self._peer, int(address)))
        )
        return self.hello()

    def write(self, source: Sequence[int], target: Sequence[int]) -> dict[str, float]:
        """Writes pages; seconds to the answer, and of posting the write."""
        agent = self._agent
        begin = time.perf_counter()
        handle = agent.make_prepped_xfer(
            "WRITE",
            self._own,
            np.array(source, dtype=np.int32),
            self._theirs,
            np.array(target, dtype=np.int32),
            b"written",
        )
        state = agent.transfer(handle)
        posted = time.perf_counter()
        while state != "DONE":
            state = agent.check_xfer_state(handle)
        while not agent.get_new_notifs():
            pass
        seconds = time.perf_counter() - begin
        agent.release_xfer_handle(handle)
        return {"seconds": seconds, "post_s": posted - begin}

    def answer(self) -> dict[str, float]:
        """Waits for a write and answers it."""
        while not self._agent.get_new_notifs():
            pass
        self._agent.send_notif(self._peer, b"arrived")
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.001:  # an answer may need more polling to leave
            self._agent.get_new_notifs()
        return {}


def say(**words: object) -> None:
    """One JSON line."""
    print(json.dumps(words), flush=True)
