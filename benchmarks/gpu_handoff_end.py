"""One of the two processes of gpu_handoff: a pool, a connector over it, and a bare NIXL agent.

The bare agent polls without a pause and only writes, notifies and answers.
"""

from __future__ import annotations

import base64
import json
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from effuse.benchmarks.gpu_models import MODELS
from effuse.kvtransfer import nixl_transport
from effuse.kvtransfer.connector import Arrived, Expect, FinishPush, Pushed, PushPages
from effuse.kvtransfer.layout import MOST_GROUPS, KVLayout, ModelFacts, PageMemory, fingerprint
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

PAGE_TOKENS = 32
FACTS = ModelFacts(
    weights="benchmark",
    architecture="dream",
    block_size=32,
    mask_token_id=1,
    prompt_attention="bidirectional",
    commit_rule="none",
)
LEASE_S = 60.0
KNOWN_BEFORE_S = 0.005


class End:
    """One of the two, with commands for `serve`."""

    def __init__(self, role: str, kind: str, memory: PageMemory, *, is_busy: bool = False) -> None:
        if is_busy:
            for pace in (Pace.HOT, Pace.MOVING, Pace.COMPUTING, Pace.BEGUN):
                nixl_transport.PAUSE_S[pace] = 0.0
        self._role, self._kind = role, kind
        self._memory = memory
        self._agreed = fingerprint(memory.layout, FACTS)
        self._connector = ThreadConnector(
            self._transport(), self._memory, f"{role}-1", self._agreed
        )
        self._connector.start()
        self._generation = 0
        self._events: deque[object] = deque()
        self._bare = Bare(role, self._memory) if kind == "nixl" else None

    def _transport(self) -> Transport:
        if self._kind == "nixl":
            return nixl_transport.NixlTransport(self._memory, f"{self._role}-1", role=self._role)
        from effuse.kvtransfer.zmq_transport import ZmqTransport

        return ZmqTransport(self._memory)

    def _hello(self) -> None:
        respond(**({} if self._bare is None else self._bare.hello()))

    def _meet(self, **peer: str) -> None:
        respond(**({} if self._bare is None else self._bare.meet(**peer)))

    def _reserve(self, name: str, pages: Sequence[int]) -> None:
        respond(reservation=self.expect(name, pages))
        arrived = self._await()
        verified_at = time.perf_counter()
        assert isinstance(arrived, Arrived), arrived
        respond(verified_at=verified_at)

    def expect(self, name: str, pages: Sequence[int]) -> str:
        """Opens these pages to the sender; its reservation, encoded."""
        self._generation += 1
        reservation = Reservation(
            attempt=AttemptId(name, 1, name),
            incarnation=f"{self._role}-1",
            shards=self._connector.describe(),
            num_pool_pages=self._memory.num_pages,
            pages=tuple(PageRef(page, self._generation) for page in pages),
            fingerprint=self._agreed,
            digest_seed=5,
            lease_s=LEASE_S,
        )
        self._connector.send(Expect(reservation, "sender-1"))
        return base64.b64encode(encode(reservation)).decode()

    def arrived(self) -> int:
        """Handoffs that are verified since the last call."""
        events = list(self._connector.poll())
        assert all(isinstance(event, Arrived) for event in events), events
        return len(events)

    def _push(self, reservation: str, pages: Sequence[int]) -> None:
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize()
        # Like an engine: everything is requested when the forward is queued, and final when it
        # ends.
        ended: list[bool] = []
        self._begin_push(reservation, pages, lambda: bool(ended))
        time.sleep(KNOWN_BEFORE_S)
        begin = time.perf_counter()
        ended.append(True)
        pushed = self._await()
        assert isinstance(pushed, Pushed), pushed
        respond(seconds=time.perf_counter() - begin, final_at=begin)

    def _push_many(self, reservations: list[str], source: Sequence[int], every_s: float) -> None:
        """The same pages repeatedly, one push every `every_s`."""
        begin = time.monotonic()
        for number, reservation in enumerate(reservations):
            time.sleep(max(0.0, begin + number * every_s - time.monotonic()))
            self._begin_push(reservation, source)
        seconds: list[float] = []
        while len(seconds) < len(reservations):
            pushed = self._await()
            assert isinstance(pushed, Pushed), pushed
            seconds.append(pushed.seconds)
        respond(seconds=seconds)

    def _begin_push(
        self, reservation: str, pages: Sequence[int], is_final: Callable[[], bool] = lambda: True
    ) -> None:
        """Requests a push of pages that are final once `is_final` returns so."""
        given, layout = _given(reservation), self._memory.layout
        boundary = BoundaryState(
            prompt_len=len(pages) * layout.page_size, prompt_digest=bytes(16), tail_token_ids=()
        )
        num_groups = layout.num_groups
        self._connector.send(
            PushPages(given, tuple(pages), 0, lambda: num_groups if is_final() else 0)
        )
        self._connector.send(FinishPush(given, lambda: boundary if is_final() else None))

    def _write(self, source: Sequence[int], target: Sequence[int], parts: int) -> None:
        assert self._bare is not None
        respond(**self._bare.write(source, target, parts))

    def _answer(self) -> None:
        assert self._bare is not None
        respond(**self._bare.answer())

    def _await(self) -> object:
        while not self._events:
            select.select([self._connector.fileno()], [], [], LEASE_S)
            self._events.extend(self._connector.poll())
        return self._events.popleft()


class Bare:
    """A NIXL agent over the same pool, written like a benchmark of NIXL."""

    def __init__(self, role: str, memory: PageMemory) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        from effuse.kvtransfer.nixl_agent import bind_netlink

        bind_netlink()
        self._memory = memory
        self._kind = "VRAM" if memory.device.type == "cuda" else "DRAM"
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(f"bare-{role}", config)
        self._agent.register_memory([(memory.address, memory.num_bytes, 0, "")], self._kind)
        self._peer = ""

    def hello(self) -> dict[str, str]:
        """Its address."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": str(self._memory.address)}

    def meet(self, metadata: str, address: str) -> dict[str, str]:
        """Adds the other one; returns this one's address."""
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._peer = peer.decode() if isinstance(peer, bytes) else str(peer)
        self._lists = {
            parts: [
                self._prepare(owner, base, parts)
                for owner, base in (("", self._memory.address), (self._peer, int(address)))
            ]
            for parts in (1, self._memory.layout.num_groups)
        }
        return self.hello()

    def _prepare(self, owner: str, base: int, parts: int) -> object:
        size, count = self._memory.page_bytes // parts, self._memory.num_pages * parts
        described = np.array([[base, size, 0, size, count]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(owner, described, self._kind)

    def write(self, source: Sequence[int], target: Sequence[int], parts: int) -> dict[str, float]:
        """Writes pages, each with this many prepared descriptors; returns the seconds to the
        answer, and those of posting the write.
        """
        agent, (own, theirs) = self._agent, self._lists[parts]
        begin = time.perf_counter()
        handle = agent.make_prepped_xfer(
            "WRITE", own, _units(source, parts), theirs, _units(target, parts), b"written"
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


def _given(reservation: str) -> Reservation:
    return decode_reservation(base64.b64decode(reservation))


def _units(pages: Sequence[int], parts: int) -> npt.NDArray[np.int32]:
    first = np.array(pages, dtype=np.int32)[:, None] * parts
    return (first + np.arange(parts)).astype(np.int32).ravel()


def memory_for(num_pages: int, model: str, dtype: str, connector: str) -> PageMemory:
    """A pool of this model's pages on the GPU, if there is one, with data in them, as workers with
    this connector have it.
    """
    config = MODELS[model]
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, PAGE_TOKENS)
    layout = KVLayout("unified", *sizes, dtype, MOST_GROUPS[connector])
    memory = PageMemory(layout, num_pages, "cuda" if torch.cuda.is_available() else "cpu")
    memory.tensor.normal_()
    return memory


def copy_between(num_bytes: int) -> None:
    """Measures how fast this many bytes are copied from the first visible GPU to the second."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=at) for at in (0, 1))
    taken = []
    for _ in range(12):
        torch.cuda.synchronize(0)
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        taken.append(time.perf_counter() - begin)
    respond(bytes_per_s=num_bytes / min(taken))


def serve(peer: object) -> None:
    """Calls the methods that the lines of standard input name, until it ends."""
    for line in sys.stdin:
        command = json.loads(line)
        getattr(peer, f"_{command.pop('do')}")(**command)


def respond(**words: object) -> None:
    """One JSON line."""
    print(json.dumps(words), flush=True)
