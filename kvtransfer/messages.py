"""What the two ends of a handoff tell each other.

Plain data that crosses processes as msgpack; nothing here moves a byte or decides anything.
"""

import msgspec


class AttemptId(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at a request. Hashable, so that it can key a table."""

    request_id: str
    attempt: int  # counts the router's tries, from 1
    transfer_id: str  # unique name of the attempt's handoff, minted by the router


class PageRef(msgspec.Struct, frozen=True, array_like=True):
    """A page in one of its allocations."""

    page_id: int
    generation: int


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that a decode worker holds for one handoff, and how to write into them."""

    attempt: AttemptId
    incarnation: str  # of the decode worker
    connector: str  # loopback, zmq or nixl
    endpoint: str = ""  # where the connector listens; zmq only
    agent_name: str = ""  # nixl only, as are the next four
    agent_metadata: bytes = b""
    pool_address: int = 0  # address of page 0
    device_id: int = 0
    memory_kind: str = ""  # DRAM or VRAM
    num_pool_pages: int  # page ids are below it
    page_bytes: int
    pages: tuple[PageRef, ...]  # in the order of the prompt
    fingerprint: tuple[tuple[str, str], ...]  # (name, value), compared field by field
    lease_s: float  # the push must end within this time
