"""What the fleet knows about itself: workers, models, load, and where requests live.

Plain data with a schema: values read from Redis are decoded into these structs or refused. No I/O,
no clock.
"""

from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from effuse.config.decoding import DecodingDefaults

Role = Literal["prefill", "decode"]
PromptAttention = Literal["causal_blocks", "bidirectional"]
# Only a worker that is ready is given requests. One that is starting has lost its engine: its
# record is that of the life that is over, without load or links, until another life is ready.
WorkerState = Literal["starting", "ready", "draining", "released"]
# As far as the fields of protobuf reach in which clients are told of them.
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
Positive = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
PlacementState = Literal["running", "finished", "failed", "cancelled"]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model a worker serves, in the terms a router needs to check and place requests."""

    name: str  # name to ask for
    architecture: str  # as `models.families` names it
    block_size: Positive  # tokens in a diffusion block
    max_model_len: Positive  # most tokens of prompt and answer together
    vocab_size: Positive
    mask_token_id: U32
    eos_token_ids: tuple[U32, ...]
    prompt_attention: PromptAttention
    defaults: DecodingDefaults  # of knobs that a request leaves out


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has and does, at one moment. Counters start with the incarnation."""

    running: U32 = 0  # attempts that hold pages, those waiting for a peer included
    waiting: U32 = 0  # attempts that hold none yet
    runnable: U32 = 0  # attempts that the next step can move without anything from outside
    total_pages: U32 = 0
    free_pages: U32 = 0
    reserved_pages: U32 = 0  # promised to a writer that was not told of them yet
    receiving_pages: U32 = 0  # that a writer fills now
    quarantined_pages: U32 = 0  # pages that a late writer may still reach
    queued_tokens: U63 = 0  # prompt tokens waiting to be prefilled
    blocks_left: U63 = 0  # blocks still to denoise
    steps: U63 = 0  # forwards so far
    step_requests: U63 = 0  # requests in them, added up
    step_tokens: U63 = 0  # rows of them, added up
    preemptions: U63 = 0
    prompts_shared: U63 = 0  # whose KV another attempt had
    kv_bytes: U63 = 0  # KV bytes pushed or received
    prefix_queries: U63 = 0  # prompt tokens whose KV a prefill worker looked for
    prefix_hits: U63 = 0  # those of them whose KV it had

    def pages_by_state(self) -> dict[str, int]:
        """Every page once, by the state that it is in (`kvtransfer/pool.py`)."""
        pages = {
            "free": self.free_pages,
            "reserved": self.reserved_pages,
            "receiving": self.receiving_pages,
            "quarantined": self.quarantined_pages,
        }
        return {**pages, "committed": self.total_pages - sum(pages.values())}


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can hold, fixed for an incarnation."""

    total_pages: U32
    page_size: Positive  # tokens in a page
    max_num_seqs: Positive
    max_num_batched_tokens: Positive


FEW_PAGES = 8  # which a link warms up with, however busy its two ends are
MOST_LINKS = 1024  # of one worker; with them a record stays below 150 kB


class Link(msgspec.Struct, frozen=True, array_like=True):
    """The way from a prefill worker to one life of a decode worker, as a rehearsal found it."""

    peer: Annotated[str, Meta(max_length=128)]  # worker id
    peer_incarnation: Annotated[str, Meta(max_length=128)]
    transport: Annotated[str, Meta(max_length=64)]  # what moves the bytes, such as cuda_ipc
    bytes_per_second: Annotated[float, Meta(ge=0)]  # digests and the last answer included

    @property
    def gigabytes_per_second(self) -> float:
        """Its rate in 10^9 bytes a second."""
        return self.bytes_per_second / 1e9


MOST_QUARANTINES = 64  # of one worker, the oldest ones


class Quarantine(msgspec.Struct, frozen=True, array_like=True):
    """Pages of given-up handoffs that one prefill worker may still write into."""

    writer: Annotated[str, Meta(max_length=300)]  # host:port of its front
    pages: U32
    age_s: Annotated[float, Meta(ge=0, le=1e9)]  # of the oldest of them


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A worker in one of its lives, as it announces itself."""

    worker_id: str
    role: Role
    address: str  # host:port of its front
    incarnation: str
    engine_port: Annotated[int, Meta(ge=0, le=65535)] = (
        0  # beside the front's: open for as long as this life's engine is
    )
    place: Annotated[str, Meta(max_length=256)] = ""  # kernel and namespaces: `worker.peer.Place`
    connector: Annotated[str, Meta(max_length=20)] = ""  # by which pages move; empty: not told
    state: WorkerState
    fingerprint: tuple[tuple[str, str], ...]  # (name, value), compared field by field
    model: ModelInfo
    capacity: Capacity
    load: Load
    # Of a prefill worker: the decode workers that it can push to, as far as they were measured,
    links: Annotated[tuple[Link, ...], Meta(max_length=MOST_LINKS)] = ()
    # and below which rate no prompt may take one of them; 0 is no limit.
    min_handoff_gbps: float = 0.0
    # Of a prefill worker: whether prompts take no other ways than those in `links`, which are warm.
    warms_links: bool = False
    # Of a decode worker: whom its pages in quarantine wait for.
    quarantines: Annotated[tuple[Quarantine, ...], Meta(max_length=MOST_QUARANTINES)] = ()

    @cached_property
    def life(self) -> tuple[str, str]:
        """Which life of which worker: its id and incarnation."""
        return self.worker_id, self.incarnation

    @cached_property
    def fingerprint_text(self) -> str:
        """The fingerprint as one value that is compared, and looked up by, in no time."""
        return repr(self.fingerprint)

    @cached_property
    def _links_by_life(self) -> dict[tuple[str, str], Link]:
        return {(link.peer, link.peer_incarnation): link for link in self.links}

    def link_to(self, peer: "WorkerRecord") -> Link | None:
        """What is known of the way to this life of a decode worker."""
        return self._links_by_life.get((peer.worker_id, peer.incarnation))

    def has_connector_of(self, peer: "WorkerRecord") -> bool:
        """Whether pages move the same way at both, as far as they tell."""
        return not (self.connector and peer.connector) or self.connector == peer.connector

    def may_push_to(self, peer: "WorkerRecord") -> bool:
        """Whether connectors are the same, the way to `peer` is warm, and the limit allows it."""
        if not self.has_connector_of(peer):
            return False
        link = self.link_to(peer)
        if link is None:
            return not (self.min_handoff_gbps or self.warms_links)
        return link.gigabytes_per_second >= self.min_handoff_gbps

    def is_cold_to(self, peer: "WorkerRecord") -> bool:
        """Whether prompts may take the way to `peer` once it was warmed up."""
        return (
            self.warms_links
            and self.fingerprint == peer.fingerprint
            and self.has_connector_of(peer)
            and self.link_to(peer) is None
        )


class PlacedOn(msgspec.Struct, frozen=True, kw_only=True):
    """The life of a worker that an attempt was placed on."""

    worker_id: str
    incarnation: str


class PlacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where one attempt at a request lives, or which router has it before its first."""

    request_id: str
    attempt: U32  # 0 before the first; an older attempt never overwrites a newer one
    transfer_id: str
    router_id: str
    state: PlacementState
    model: str
    decode: PlacedOn | None = None  # None before the first attempt
    prefill: PlacedOn | None = None  # None where the decode worker prefills for itself
    prompt_tokens: U32 = 0
    num_tokens: U32 = 0  # tokens of the answer, known at its end
    seed: int = 0  # of its randomness
    tenant: str = ""  # whose it is, where clients have keys
    asked: str = ""  # digest of what was asked, where a client chose the id

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:  # beyond what msgspec's own bounds can say
            raise ValueError(f"seed: expected 64 bits without a sign, got {self.seed}")


class RoutedLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a router has on one life of a decode worker."""

    worker_id: str
    incarnation: str
    requests: U32


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a router tells others of itself."""

    router_id: str
    address: str  # host:port where clients find it; routers may share one
    waiting: U32 = 0  # requests without a seat
    waiting_by_model: dict[str, U32] | None = None  # the same, for each model that has requests
    loads: tuple[RoutedLoad, ...] = ()


# msgspec's own, a string that is not UTF-8, values nested too deeply.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MalformedRecord(ValueError):
    """A stored value does not follow its schema."""


def encode(record: WorkerRecord | PlacementRecord | RouterRecord) -> bytes:
    """Returns the stored form: JSON, so that a person can read it with any Redis client."""
    return msgspec.json.encode(record)


def decode_worker(value: bytes) -> WorkerRecord:
    """Reads a worker's stored form; raises `MalformedRecord` naming the field at fault."""
    try:
        return msgspec.json.decode(value, type=WorkerRecord)
    except _UNREADABLE as error:
        raise MalformedRecord(f"worker record: {error}") from error


def decode_placement(value: bytes) -> PlacementRecord:
    """Reads a placement's stored form; raises `MalformedRecord` naming the field at fault."""
    try:
        return msgspec.json.decode(value, type=PlacementRecord)
    except _UNREADABLE as error:
        raise MalformedRecord(f"placement record: {error}") from error


def decode_router(value: bytes) -> RouterRecord:
    """Reads a router's stored form; raises `MalformedRecord` naming the field at fault."""
    try:
        return msgspec.json.decode(value, type=RouterRecord)
    except _UNREADABLE as error:
        raise MalformedRecord(f"router record: {error}") from error
