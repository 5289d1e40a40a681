"""Shared parts of the handoff tests: a small layout, its fingerprint, and reservations on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from eventually import is_readable
from slowness import patient

from effuse.kvtransfer.connector import Command, Connector, ConnectorEvent, ForgetLife, Promised
from effuse.kvtransfer.digest import HostDigester, pages_digest, prompt_digest
from effuse.kvtransfer.layout import Fingerprint, KVLayout, ModelFacts, PageMemory, fingerprint
from effuse.kvtransfer.messages import (
    DIGEST_BYTES,
    AttemptId,
    BoundaryState,
    Field,
    PageRef,
    ReceiverAddress,
    Reservation,
    Shard,
)
from effuse.kvtransfer.push import shard_of
from effuse.kvtransfer.thread import ThreadConnector

SMALL = KVLayout("unified", 2, 2, 4, 8, "float32")  # 1 KiB a page
LARGE = KVLayout("unified", 8, 2, 32, 16, "float32")  # 64 KiB a page, 8 groups of layers
WHOLE = SMALL.part
# Four heads of 4 KiB in each of two groups of layers: 32 KiB a page.
SHARED = KVLayout("unified", 4, 4, 16, 16, "float32", most_groups=2)
SEED = 7
DEADLINE_S = patient(60.0)  # the other process may still have to start
LEASE_S = 60.0  # the longest one that a sender takes


def facts(weights: str = "w1") -> ModelFacts:
    """Facts of a model that does not exist."""
    return ModelFacts(
        weights=weights,
        architecture="sdar",
        block_size=8,
        mask_token_id=3,
        prompt_attention="causal_blocks",
        commit_rule="clean",
    )


def print_of(layout: KVLayout, weights: str = "w1") -> Fingerprint:
    """Fingerprint of a layout."""
    return fingerprint(layout, facts(weights))


FIELD_NAMES = tuple(field.name for field in print_of(SMALL))


def changed(fields: Fingerprint, name: str) -> Fingerprint:
    """The fingerprint with one field changed."""
    return tuple(Field(f.name, f.value + "x") if f.name == name else f for f in fields)


def filled(layout: KVLayout, num_pages: int, seed: int = 0, device: str = "cpu") -> PageMemory:
    """A pool whose pages are all different."""
    memory = PageMemory(layout, num_pages, device)
    generator = torch.Generator().manual_seed(seed)
    memory.tensor.copy_(torch.rand(memory.tensor.shape, generator=generator))
    return memory


def reservation(
    memory: PageMemory,
    address: ReceiverAddress | tuple[Shard, ...],
    pages: Sequence[PageRef],
    *,
    incarnation: str = "decode-1",
    number: int = 1,
    fields: Fingerprint | None = None,
    lease_s: float = LEASE_S,
) -> Reservation:
    """A reservation of these pages. An address is that of a pool that holds what `memory` does."""
    shards = address if isinstance(address, tuple) else (shard_of(memory.layout, address),)
    return Reservation(
        attempt=AttemptId(f"request-{number}", 1, f"transfer-{number}"),
        incarnation=incarnation,
        shards=shards,
        num_pool_pages=memory.num_pages,
        pages=tuple(pages),
        fingerprint=fields if fields is not None else print_of(memory.layout),
        digest_seed=SEED,
        lease_s=lease_s,
    )


def address_of(reserved: Reservation) -> ReceiverAddress:
    """Where the only rank of a reservation is."""
    (shard,) = reserved.shards
    return shard.address


def with_shard(reserved: Reservation, **changes: Any) -> Reservation:
    """The reservation, with its only rank changed."""
    (shard,) = reserved.shards
    return msgspec.structs.replace(reserved, shards=(msgspec.structs.replace(shard, **changes),))


def digest_of(memory: PageMemory, pages: Sequence[int]) -> bytes:
    """The digest of these pages for a manifest; those of a GPU are copied for it."""
    if memory.device.type != "cpu":
        host = PageMemory(memory.layout, memory.num_pages)
        host.tensor.copy_(memory.tensor)
        memory = host
    groups = range(memory.layout.num_groups)
    pieces = HostDigester(memory).begin(pages, groups, SEED)()
    assert pieces is not None, "it takes them at once"
    return pages_digest(pieces)


def digests_of(memory: PageMemory, pages: Sequence[int]) -> list[bytes]:
    """The digest of each of these pages by itself."""
    return [digest_of(memory, [page]) for page in pages]


def boundary(prompt_len: int = 25, **changes: Any) -> BoundaryState:
    """The boundary state of some prompt."""
    words: dict[str, Any] = {
        "prompt_digest": prompt_digest(range(prompt_len)),
        "tail_token_ids": (9,),
    }
    return BoundaryState(prompt_len=prompt_len, **(words | changes))


def spoilt(address: ReceiverAddress, what: str) -> bytes:
    """Its metadata: with another name, and right by its digest, or with a bit flipped."""
    metadata = bytearray(address.agent_metadata)
    if what == "bit":
        metadata[len(metadata) // 2] ^= 1
        return bytes(metadata)
    name, told = address.agent_name.encode(), bytes(metadata[DIGEST_BYTES:])
    assert name in told
    told = told.replace(name, b"\xff" + name[1:])
    return xxhash.xxh3_128_digest(told) + told


def next_event(
    connector: Connector, transfer_id: str, kind: type[object] = object
) -> ConnectorEvent:
    """Waits for this transfer's next event of a kind; earlier events, and those beside it, are
    dropped.

    Promises are dropped too: a writer that a busy machine slows down may send any number of them.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for event in connector.poll():
            is_ours = event.transfer_id == transfer_id and not isinstance(event, Promised)
            if is_ours and isinstance(event, kind):
                return event
        left = deadline - time.monotonic()
        assert left > 0, "no event came"
        is_readable(connector.fileno(), left)


def run_on_thread(connector: ThreadConnector, action: Callable[[], None]) -> None:
    """Has the connector's thread run an action in its turn among the commands."""
    exchange, marker = connector._exchange, ForgetLife("nobody's")
    execute = exchange.execute

    def execute_or_act(command: Command, at: float) -> None:
        if command is marker:
            exchange.execute = execute  # type: ignore[method-assign]
            action()
        else:
            execute(command, at)

    exchange.execute = execute_or_act  # type: ignore[method-assign]
    connector.send(marker)
