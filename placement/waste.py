"""Which part of a pool holds no KV, from a worker's load. No I/O."""

from typing import NamedTuple

from effuse.placement.records import Load


class Waste(NamedTuple):
    """Shares of memory for KV that hold no KV, from 0 to 1."""

    reserved: float = 0.0  # of a pool: pages of requests that have no token yet
    internal: float = 0.0  # the rest of partly filled pages
    external: float = 0.0  # pages that neither requests nor new ones may use
    paged: float = 0.0  # of the pages of requests
    contiguous: float = 0.0  # of as many buffers of the greatest length as there are requests


def waste_of(load: Load, page_size: int, max_model_len: int) -> Waste:
    """Waste of a worker; the greatest length is `max_model_len` tokens."""
    size, empty = load.total_pages * page_size, load.kv_room_partial + load.kv_room_empty
    held, longest = load.kv_tokens + empty, load.running * max_model_len
    return Waste(
        reserved=load.kv_room_empty / size if size else 0.0,
        internal=load.kv_room_partial / size if size else 0.0,
        external=load.quarantined_pages * page_size / size if size else 0.0,
        paged=empty / held if held else 0.0,
        contiguous=1 - load.kv_tokens / longest if longest else 0.0,
    )
