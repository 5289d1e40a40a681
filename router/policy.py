"""Where an attempt goes: a decode worker first, then a prefill worker that fits it, or none.

Pure: filter, score, pick over values. What is in flight and who is suspected comes from `fleet.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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


Fitting = dict[tuple[tuple[str, str], ...], list[Candidate]]
"""Prefill workers by their fingerprint."""


def place(
    candidates: Sequence[Candidate],
    model: str,
    mode: PrefillMode,
    excluded: Collection[WorkerLife] = (),
) -> Placement | None:
    """Picks the least loaded pair; None where there is none.

    `auto` lets decode prefill where no prefill worker fits, or where all that do refuse the link;
    `remote` never, `local` always."""
    usable = [c for c in candidates if _is_usable(c, model, excluded)]
    decoders = [c for c in usable if c.record.role == "decode"]
    prefillers = [] if mode == "local" else [c for c in usable if c.record.role == "prefill"]
    fitting = _by_fingerprint(prefillers)
    if mode == "remote":
        decoders = [d for d in decoders if _has_link(d, fitting)]
    if not decoders:
        return None
    decode = min(decoders, key=lambda d: _decode_score(d, fitting)).record
    allowed = [p for p in fitting.get(decode.fingerprint, ()) if p.record.may_push_to(decode)]
    return Placement(decode, min(allowed, key=_prefill_score).record if allowed else None)


def why_refused(candidates: Sequence[Candidate], model: str) -> str:
    """Of the links that prefill workers refuse, the fastest: how fast it is, and how fast it should
    be. Empty where none is refused."""
    usable = [c for c in candidates if _is_usable(c, model, ())]
    fitting = _by_fingerprint(c for c in usable if c.record.role == "prefill")
    refused = [
        (prefill.record, decode.record)
        for decode in usable
        if decode.record.role == "decode"
        for prefill in fitting.get(decode.record.fingerprint, ())
        if not prefill.record.may_push_to(decode.record)
    ]
    if not refused:
        return ""
    prefill, decode = max(refused, key=lambda pair: _rate(*pair))
    link = prefill.link_to(decode)
    found = "has not been measured yet"
    if link is not None:
        found = f"({link.transport}) moves {link.gigabytes_per_second:.4g} GB/s"
    others = f" ({len(refused)} links are refused, this is the fastest)" if refused[1:] else ""
    return (
        f"the link {prefill.worker_id} to {decode.worker_id} {found}, "
        f"--min-handoff-gbps asks for {prefill.min_handoff_gbps:.10g}{others}"
    )


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


def _by_fingerprint(prefillers: Iterable[Candidate]) -> Fitting:
    fitting: Fitting = {}
    for candidate in prefillers:
        fitting.setdefault(candidate.record.fingerprint, []).append(candidate)
    return fitting


def _has_link(decode: Candidate, fitting: Fitting) -> bool:
    fits = fitting.get(decode.record.fingerprint, ())
    return any(p.record.may_push_to(decode.record) for p in fits)


def _rate(prefill: WorkerRecord, decode: WorkerRecord) -> float:
    link = prefill.link_to(decode)
    return -1.0 if link is None else link.bytes_per_second


def _decode_score(
    candidate: Candidate, fitting: Fitting
) -> tuple[bool, bool, bool, float, int, int, str]:
    """A free seat, a link that is not refused where prefill workers fit, free pages net of what is
    on the way there, then blocks left to denoise."""
    record, load = candidate.record, candidate.record.load
    capacity = max(1, record.capacity.total_pages)
    own_pages = -(-candidate.in_flight.tokens // record.capacity.page_size)
    reported = load.total_pages - load.free_pages
    used = max(own_pages, reported) / capacity
    own_blocks = -(-candidate.in_flight.tokens // record.model.block_size)
    blocks = max(own_blocks, load.blocks_left)
    is_full = candidate.in_flight.requests >= record.capacity.max_num_seqs
    placed = candidate.in_flight.placed
    is_cut_off = record.fingerprint in fitting and not _has_link(candidate, fitting)
    return candidate.is_suspect, is_full, is_cut_off, used, blocks, placed, record.worker_id


def _prefill_score(candidate: Candidate) -> tuple[bool, int, int, str]:
    """Tokens queued there, by its own account or by ours, whichever is more."""
    queued = max(candidate.in_flight.tokens, candidate.record.load.queued_tokens)
    return candidate.is_suspect, queued, candidate.in_flight.placed, candidate.record.worker_id
