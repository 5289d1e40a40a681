"""The fleet's records about itself: workers, models, load, and the places of requests.

Values read from Redis are decoded into these structs or refused. No I/O, no clock.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta

from effuse.config.checks import UNREADABLE
from effuse.config.decoding import DecodingDefaults

Kind = Literal["prefill", "decode"]  # of work
Role = Literal["prefill", "decode", "both"]  # the kinds of work that a worker accepts now
PromptAttention = Literal["causal_blocks", "bidirectional"]
# Only a ready worker gets requests. A starting one has lost its engine: its record is that of the
# ended life, without load or links, until another life is ready.
WorkerState = Literal["starting", "ready", "draining", "released"]
# The ranges of the protobuf fields.
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Above0 = Annotated[float, Meta(gt=0, le=1e15)]
Positive = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
PlacementState = Literal["running", "finished", "failed", "cancelled"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(kind: str, name: str) -> str:
    """Returns `name` if it may be part of a key; otherwise raises ValueError with the form."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} is not a valid name: expected 1 to 128 letters, digits, dots, "
            "underscores or hyphens, beginning with a letter or digit"
        )
    return name


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a worker, with all that a router needs to check and place requests."""

    name: str  # name by which requests ask for it
    architecture: str  # its name in `models.families`
    block_size: Positive  # tokens in a diffusion block
    max_model_len: Positive  # most tokens of prompt and answer together
    vocab_size: Positive
    mask_token_id: U32
    eos_token_ids: tuple[U32, ...]
    prompt_attention: PromptAttention
    defaults: DecodingDefaults  # of settings that a request leaves out
    deterministic: bool = False  # its answers do not depend on what else runs


class EngineCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of an engine since its incarnation began."""

    steps: U63 = 0  # forwards so far
    step_requests: U63 = 0  # sum of the requests in each forward
    step_tokens: U63 = 0  # sum of the rows of each forward
    steps_sharing: U63 = 0  # in which requests read a beginning together
    preemptions: U63 = 0
    prompts_shared: U63 = 0  # whose KV came from another attempt
    kv_bytes: U63 = 0  # KV bytes pushed or received
    prefix_queries: U63 = 0  # tokens that were looked up in the prefix cache
    prefix_hits: U63 = 0  # those that were found
    prefix_evictions: U63 = 0  # evicted units of the cache
    offload_saved: U63 = 0  # KV bytes copied from pages to host memory
    offload_loaded: U63 = 0  # KV bytes copied back
    offload_corrupt: U63 = 0  # units that came back with a wrong digest
    offload_file_kept: U63 = 0  # KV bytes written to files
    offload_file_read: U63 = 0  # KV bytes read from files
    offload_file_failures: U63 = 0  # errors and late answers
    offload_pool_kept: U63 = 0  # the same of the shared pool
    offload_pool_read: U63 = 0
    offload_pool_failures: U63 = 0
    kv_bytes_held: U63 = 0  # KV bytes that were not received, because the cache had them
    prompt_tokens: U63 = 0  # of prompts that a decode worker computed itself
    prompts_overdue: U63 = 0  # forwards of these that answers had left no room for


class Load(EngineCounts, frozen=True, kw_only=True):
    """State and counters of an engine at one moment."""

    running: U32 = 0  # attempts that hold pages, including those that wait for a peer
    waiting: U32 = 0  # attempts that hold none yet
    runnable: U32 = 0  # attempts that the next step can advance without outside help
    total_pages: U32 = 0
    free_pages: U32 = 0
    reserved_pages: U32 = 0  # reserved for a writer that has not received the reservation yet
    receiving_pages: U32 = 0  # that a writer is filling now
    quarantined_pages: U32 = 0  # pages that a late writer may still reach
    queued_tokens: U63 = 0  # prompt tokens waiting to be prefilled
    blocks_left: U63 = 0  # blocks still to denoise
    prefix_pages: U32 = 0  # pages that the prefix cache holds, free for others or in use
    prefix_units: U32 = 0  # units of these pages
    # Of all requests that hold pages; a page of two counts twice, and only full ones have two.
    kv_tokens: U63 = 0  # tokens whose KV is in their pages
    kv_room_partial: U63 = 0  # places for tokens that are free in partly filled pages
    kv_room_empty: U63 = 0  # places in pages without any token
    offload_pages: U32 = 0  # pages of host memory that hold kept KV
    offload_file_bytes: U63 = 0  # of all files with KV
    offload_pool: U63 = 0  # equal for workers that share a pool; 0: it takes no units now
    prompt_piece: U32 = 0  # tokens of the largest piece that fits into a gap; 0: not known
    prompt_rate: U63 = 0  # tokens a second of such pieces

    def pages_by_state(self) -> dict[str, int]:
        """Every page once, by its state (`kvtransfer/pool.py`)."""
        pages = {
            "free": self.free_pages,
            "reserved": self.reserved_pages,
            "receiving": self.receiving_pages,
            "quarantined": self.quarantined_pages,
        }
        return {**pages, "committed": self.total_pages - sum(pages.values())}


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a worker, fixed for an incarnation."""

    total_pages: U32
    page_size: Positive  # tokens in a page
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    ranks: Positive = 1  # devices that compute together
    context_ranks: Positive = 1  # of them, those that hold the same KV heads for other tokens
    stages: Positive = 1  # of layers, with equally many of them each
    replicas: Positive = 1  # that share pages, requests and rows; one of them runs a request


FEW_PAGES = 8  # for warming up a link, however busy its two ends are
MOST_LINKS = 1024  # of one worker; a record with this many stays below 150 kB


class Link(msgspec.Struct, frozen=True, array_like=True):
    """The link from a prefill worker to one life of a decode worker, as measured by a rehearsal."""

    peer: Annotated[str, Meta(max_length=128)]  # worker id
    peer_incarnation: Annotated[str, Meta(max_length=128)]
    transport: Annotated[str, Meta(max_length=64)]  # the transport, such as cuda_ipc
    bytes_per_second: Annotated[float, Meta(ge=0)]  # including digests and the last answer

    @property
    def gigabytes_per_second(self) -> float:
        """Its rate in 10^9 bytes a second."""
        return self.bytes_per_second / 1e9


Links = Annotated[tuple[Link, ...], Meta(max_length=MOST_LINKS)]
KnownLinks = Mapping[bytes, Links]  # by their stored form

MOST_QUARANTINES = 64  # of one worker, only the oldest ones


class Quarantine(msgspec.Struct, frozen=True, array_like=True):
    """Pages of abandoned handoffs that one prefill worker may still write into."""

    writer: Annotated[str, Meta(max_length=300)]  # host:port of its front
    pages: U32
    age_s: Annotated[float, Meta(ge=0, le=1e9)]  # of the oldest of them


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A worker in one of its lives, as it announces itself."""

    worker_id: str
    role: Role
    may_change_role: bool = False
    role_is_pinned: bool = False  # an operator has set it, and plans leave it
    role_age_s: Amount | None = None  # since it became another one; None if it never did
    num_leaving: U32 = 0  # attempts of a kind that it has ceased to accept, and still finishes
    address: str  # host:port of its front
    incarnation: str
    engine_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # open as long as this life's engine
    place: Annotated[str, Meta(max_length=256)] = ""  # kernel and namespaces: `worker.peer.Place`
    connector: Annotated[str, Meta(max_length=20)] = ""  # that moves the pages; empty if not known
    state: WorkerState
    fingerprint: tuple[tuple[str, str], ...]  # (name, value), compared field by field
    model: ModelInfo
    capacity: Capacity
    load: Load
    # Of a prefill worker: the decode workers that it can push to, as far as they were measured,
    links: Links = ()
    min_handoff_gbps: float = 0.0  # the rate below which no prompt may take a link; 0: no limit
    warms_links: bool = False  # and prompts only take the links in `links`, which are warm
    # Of a decode worker: the writers for which its pages in quarantine wait.
    quarantines: Annotated[tuple[Quarantine, ...], Meta(max_length=MOST_QUARANTINES)] = ()

    @cached_property
    def life(self) -> tuple[str, str]:
        return self.worker_id, self.incarnation

    @property
    def facts(self) -> Self:
        """The record without what changes while nothing happens to the worker."""
        rest: dict[str, object] = {"links": (), "quarantines": (), "role_age_s": None}
        return msgspec.structs.replace(self, load=Load(), num_leaving=0, **rest)

    def does(self, kind: Kind) -> bool:
        return self.role in (kind, "both")

    @property
    def may_ever_decode(self) -> bool:
        return self.may_change_role or self.does("decode")

    @cached_property
    def fingerprint_text(self) -> str:
        return repr(self.fingerprint)

    @cached_property
    def _links_by_life(self) -> dict[tuple[str, str], Link]:
        return {(link.peer, link.peer_incarnation): link for link in self.links}

    def link_to(self, peer: "WorkerRecord") -> Link | None:
        return self._links_by_life.get((peer.worker_id, peer.incarnation))

    def has_connector_of(self, peer: "WorkerRecord") -> bool:
        """Whether both move pages with the same connector, as far as known."""
        return not (self.connector and peer.connector) or self.connector == peer.connector

    def difference_from(self, peer: "WorkerRecord") -> str:
        """The first fact that keeps KV from passing between them; empty if there is none."""
        ours, theirs = dict(self.fingerprint), dict(peer.fingerprint)
        name = next((one for one in ours | theirs if ours.get(one) != theirs.get(one)), "")
        own, other = (facts.get(name, "(absent)") for facts in (ours, theirs))
        return name and f": {name} is {own} at {self.worker_id}, {other} at {peer.worker_id}"

    def shares_pool_with(self, peer: "WorkerRecord") -> bool:
        """Whether each finds in a pool what the other writes there now."""
        own = self.load.offload_pool
        return own == peer.load.offload_pool != 0 and self.worker_id != peer.worker_id

    def may_push_to(self, peer: "WorkerRecord") -> bool:
        """Whether connectors match, the link to `peer` is warm, and the limit allows it. A worker
        pushes nothing to itself."""
        if not self.has_connector_of(peer) or self.worker_id == peer.worker_id:
            return False
        link = self.link_to(peer)
        if link is None:
            return not (self.min_handoff_gbps or self.warms_links)
        return link.gigabytes_per_second >= self.min_handoff_gbps

    def is_cold_to(self, peer: "WorkerRecord") -> bool:
        """Whether prompts may take the link to `peer` once it is warm."""
        return (
            self.warms_links
            and self.worker_id != peer.worker_id
            and self.fingerprint == peer.fingerprint
            and self.has_connector_of(peer)
            and self.link_to(peer) is None
        )


class PlacedOn(msgspec.Struct, frozen=True, kw_only=True):
    """The life of a worker that an attempt was placed on."""

    worker_id: str
    incarnation: str


class PlacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one attempt at a request, or the router that has it before its first."""

    request_id: str
    attempt: U32  # 0 before the first; an older attempt never overwrites a newer one
    transfer_id: str
    router_id: str
    state: PlacementState
    model: str
    decode: PlacedOn | None = None  # None before the first attempt
    prefill: PlacedOn | None = None  # None if the decode worker prefills
    prompt_tokens: U32 = 0
    num_tokens: U32 = 0  # tokens of the answer, known at its end
    seed: int = 0  # seed of its randomness
    tenant: str = ""  # the request's tenant, if clients have keys
    asked: str = ""  # digest of the request, if the client chose the id

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:  # beyond the bounds that msgspec can express
            raise ValueError(f"seed: expected an unsigned 64-bit integer, got {self.seed}")


class RoutedLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load that a router has on one life of a decode worker."""

    worker_id: str
    incarnation: str
    requests: U32


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A router's record for other routers."""

    router_id: str
    address: str  # host:port for clients; routers may share one
    # Requests without a place on a worker, for each model that it has requests of.
    waiting_by_model: dict[str, U32] = msgspec.field(default_factory=dict)
    loads: tuple[RoutedLoad, ...] = ()
    # Requests a second that begin, by model, and the mean tokens of their prompts and answers.
    workloads: dict[str, tuple[Amount, Above0, Above0]] = msgspec.field(default_factory=dict)
    steers: tuple[str, ...] = ()  # models for which it has a plan of roles that it may carry out


KEY_BYTES = 16  # of a beginning's key
MOST_HOLDERS = 64  # workers of each beginning, the latest; lives that are over would add up


class PrefixHolder(msgspec.Struct, frozen=True, array_like=True):
    """The life of a worker that has computed beginnings, and the time since it last used them."""

    worker_id: Annotated[str, Meta(max_length=128)]
    incarnation: Annotated[str, Meta(max_length=128)]
    age_s: Amount


class PrefixGroup(msgspec.Struct, frozen=True, array_like=True):
    """Beginnings of prompts that the same workers have. A key is a digest of tenant and tokens."""

    keys: bytes  # one behind the other
    holders: Annotated[tuple[PrefixHolder, ...], Meta(max_length=MOST_HOLDERS)]

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise ValueError(f"keys: expected {KEY_BYTES} bytes each, got {len(self.keys)}")


class PrefixNotes(msgspec.Struct, frozen=True):
    """Beginnings that a router has sent to workers since it last wrote notes."""

    groups: tuple[PrefixGroup, ...]


class PrefixNews(NamedTuple):
    """Notes of beginnings that other routers have added."""

    epoch: bytes = b""  # another one than before once Redis has lost notes
    read: bytes = b""  # the place of the last note that was looked at
    has_more: bool = True
    notes: Sequence[tuple[bytes, float]] = ()  # undecoded, and the seconds since each was written


Record = TypeVar("Record", WorkerRecord, PlacementRecord, RouterRecord, PrefixNotes)


class MalformedRecord(ValueError):
    """A stored value does not follow its schema."""


def encode(record: WorkerRecord | PlacementRecord | RouterRecord | PrefixNotes) -> bytes:
    """Returns the stored form: JSON, which a person can read with any Redis client."""
    return msgspec.json.encode(record)


def decode(value: bytes, schema: type[Record], name: str) -> Record:
    """Reads a stored form; raises `MalformedRecord` with `name` and the bad field."""
    try:
        return msgspec.json.decode(value, type=schema)
    except UNREADABLE as error:
        raise MalformedRecord(f"{name}: {error}") from error


class StoredWorker(NamedTuple):
    """A worker's record, and its links, as they are stored. Links are apart, because they are most
    of the bytes and seldom change."""

    record: bytes
    links: bytes = b""

    @classmethod
    def of(cls, record: WorkerRecord) -> Self:
        links = msgspec.json.encode(record.links) if record.links else b""
        return cls(encode(msgspec.structs.replace(record, links=())), links)


def decode_worker(value: bytes | StoredWorker, known: KnownLinks | None = None) -> WorkerRecord:
    """Reads a worker's stored form; raises `MalformedRecord` that names the bad field."""
    record, links = (value, b"") if isinstance(value, bytes) else value
    parts = msgspec.structs.asdict(decode(record, _StoredRecord, "worker record"))
    try:
        parts["model"] = _decode_model(bytes(parts["model"]))
        if links:
            parts["links"] = (known or {}).get(links) or msgspec.json.decode(links, type=Links)
    except UNREADABLE as error:
        raise MalformedRecord(f"worker record: {error} of its model or links") from error
    return WorkerRecord(**parts)


class _StoredRecord(WorkerRecord, frozen=True, kw_only=True):
    model: msgspec.Raw  # type: ignore[assignment]  # read once for all workers


_decode_model = lru_cache(maxsize=64)(msgspec.json.Decoder(ModelInfo).decode)


def decode_placement(value: bytes) -> PlacementRecord:
    """Reads it like `decode_worker`."""
    return decode(value, PlacementRecord, "placement record")
