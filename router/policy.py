"""Where an attempt goes: a decode worker first, then a prefill worker that fits it, or none.

Pure: filter, score, pick over values. What is in flight and who is suspected comes from `fleet.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from effuse.placement.records import WorkerRecord

PrefillMode = Literal["auto", "remote", "local"]
WorkerLife = tuple[str, str]
"""Worker id and incarnation."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What this router has on a worker now; its load report tells of that only later."""

    requests: int = 0
    tokens: int = 0  # prompt tokens for a prefill worker, prompt and answer for a decode worker
    placed: int = 0  # requests ever, to take turns among equals


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it."""

    record: WorkerRecord
    in_flight: InFlight
    is_suspect: bool = False  # it failed a moment ago, and its lease has not run out yet

    @property
    def life(self) -> WorkerLife:
        """Which life of which worker."""
        return self.record.worker_id, self.record.incarnation


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of one attempt; without `prefill` the decode worker prefills for itself."""

    decode: WorkerRecord
    prefill: WorkerRecord | None


def place(
    candidates: Sequence[Candidate],
    model: str,
    mode: PrefillMode,
    excluded: Collection[WorkerLife] = (),
) -> Placement | None:
    """Picks the least loaded pair; None where there is none.

    `auto` lets decode prefill where no prefill worker fits, `remote` never, `local` always."""
    usable = [c for c in candidates if _is_usable(c, model, excluded)]
    decoders = [c for c in usable if c.record.role == "decode"]
    prefillers = [c for c in usable if c.record.role == "prefill"]
    if mode == "remote":
        fingerprints = {c.record.fingerprint for c in prefillers}
        decoders = [c for c in decoders if c.record.fingerprint in fingerprints]
    if not decoders:
        return None
    decode = min(decoders, key=_decode_score).record
    if mode == "local":
        return Placement(decode, None)
    fitting = [c for c in prefillers if c.record.fingerprint == decode.fingerprint]
    return Placement(decode, min(fitting, key=_prefill_score).record if fitting else None)


def live_workers(
    candidates: Sequence[Candidate], model: str | None = None
) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Prefill and decode workers that take requests, of one model or of all."""
    ready = [
        c.record
        for c in candidates
        if c.record.state == "ready" and model in (None, c.record.model.name)
    ]
    return [r for r in ready if r.role == "prefill"], [r for r in ready if r.role == "decode"]


def _is_usable(candidate: Candidate, model: str, excluded: Collection[WorkerLife]) -> bool:
    record = candidate.record
    return record.state == "ready" and record.model.name == model and candidate.life not in excluded


def _decode_score(candidate: Candidate) -> tuple[bool, bool, float, int, int, str]:
    """A free seat, free pages net of what is on the way there, then blocks left to denoise."""
    record, load = candidate.record, candidate.record.load
    capacity = max(1, record.capacity.total_pages)
    own_pages = -(-candidate.in_flight.tokens // record.capacity.page_size)
    reported = load.total_pages - load.free_pages
    used = max(own_pages, reported) / capacity
    own_blocks = -(-candidate.in_flight.tokens // record.model.block_size)
    blocks = max(own_blocks, load.blocks_left)
    is_full = candidate.in_flight.requests >= record.capacity.max_num_seqs
    placed = candidate.in_flight.placed
    return candidate.is_suspect, is_full, used, blocks, placed, record.worker_id


def _prefill_score(candidate: Candidate) -> tuple[bool, int, int, str]:
    """Tokens queued there, by its own account or by ours, whichever is more."""
    queued = max(candidate.in_flight.tokens, candidate.record.load.queued_tokens)
    return candidate.is_suspect, queued, candidate.in_flight.placed, candidate.record.worker_id
