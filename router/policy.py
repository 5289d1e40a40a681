"""The placement of an attempt: a decode worker, then a prefill worker that fits it, or none.

Pure: filters, scores and picks among the workers and the requests in flight of `fleet.py`."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from effuse.placement.records import Kind, WorkerRecord
from effuse.router.sizes import NO_SIZES, Sizes

OWN_STEPS: Final = 4
"""Steps' worth of prompts that decode gets instead of prefill; more would only delay answers."""

PrefillMode = Literal["auto", "remote", "local"]
WorkerLife = tuple[str, str]  # worker id and incarnation
Pair = tuple[WorkerLife, WorkerLife]  # a prefill worker and a decode worker
Fingerprint = tuple[tuple[str, str], ...]  # weights, layout and rules: if equal, answers are


class InFlight(Struct, frozen=True):
    """The requests of this router on a worker now; its load report shows them only later."""

    requests: int = 0  # answers that it writes
    tokens: int = 0  # of their prompts and of them
    prompts: int = 0  # that it computes for other workers
    to_prefill: int = 0  # tokens of prompts that it has yet to compute, for itself or for others
    placed: int = 0  # of both ever, to take turns among equals

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self.prompts)


IDLE: Final = InFlight()


class Condition(Enum):
    """Whether a worker takes part in choices, and if not, the reason."""

    READY = "ready"
    DRAINING = "draining"  # this life of it takes no more requests
    STARTING = "starting"  # its front answers, its engine is not ready
    LOST = "lost"  # its engine has ended under a request
    UNREACHABLE = "unreachable"  # a call to it broke off


class Holder(NamedTuple):
    """A request for which workers are kept, so that it runs without others."""

    digest: str  # of its question to an engine
    request_id: str


class Candidate(Struct, frozen=True):
    """A worker as the policy sees it."""

    record: WorkerRecord
    in_flight: InFlight
    condition: Condition = Condition.READY
    is_full: bool = False  # it reported so a moment ago
    is_suspect: bool = False  # it failed a moment ago
    kept_for: Holder | None = None  # it is to run nothing else
    seats: int | None = None  # requests that we may have on it; None is all that it takes

    @property
    def num_seats(self) -> int:
        return self.record.capacity.max_num_seqs if self.seats is None else self.seats

    @property
    def num_free_seats(self) -> int:
        return 0 if self.is_full else self.num_seats - self.in_flight.requests


class PromptCost(NamedTuple):
    """The prompt of an answer."""

    tokens: int = 1
    seconds: float | None = None  # of a worker without answers; 0: not known; None: no objective

    def is_sooner(self, decode: WorkerRecord, own: int, others: int) -> bool:
        """Whether `decode` is known to be done with it before a prefill worker; `own` and `others`:
        tokens that wait at both. A bidirectional prompt has to fit into one gap."""
        load, is_whole = decode.load, decode.model.prompt_attention == "bidirectional"
        if is_whole and self.tokens > load.prompt_piece:
            return False
        seconds = (others + self.tokens) * (self.seconds or 0.0) / self.tokens
        return own + self.tokens < seconds * load.prompt_rate


class AttemptNeeds(Struct, frozen=True, kw_only=True):
    """What an attempt asks of the fleet."""

    model: str
    mode: PrefillMode
    fingerprint: Fingerprint | None = None  # of the worker that it goes on from
    excluded: Collection[WorkerLife] = ()
    broken: Collection[Pair] = ()  # pairs that hand nothing over now
    doubtful: Collection[Pair] = ()  # pairs that come after others
    holder: Holder | None = None
    alone: Collection[Kind] = ()  # kinds of work that take only workers kept for it, once empty
    beside: WorkerLife | None = None  # the decode worker that has its prompt's KV, or will
    num_answers: int = 1  # to the same prompt, of which this is the first one
    cached: Mapping[WorkerLife, int] = {}  # tokens of its prompt that workers may have
    prompt: PromptCost = PromptCost()
    by_pool: bool = False  # KV goes through a pool that both workers share, if they do
    sizes: Sizes = NO_SIZES  # for which its workers need room

    @property
    def key(self) -> Hashable:
        sets = map(frozenset, (self.excluded, self.broken, self.doubtful, self.alone))
        facts = self.model, self.mode, self.fingerprint, self.holder, self.beside, self.num_answers
        return (*facts, self.sizes, self.by_pool, *sets)


class Placement(Struct, frozen=True):
    """The workers of one attempt; without `prefill` the decode worker prefills for itself."""

    decode: WorkerRecord
    prefill: WorkerRecord | None
    shares_prompt: bool = False  # another attempt there brings the prompt's KV
    by_pool: bool = False  # its KV goes through the pool of both, as long as that works


class Prospect(Enum):
    """The expectation of a request."""

    NOW = "now"  # workers can take it
    SEAT = "seat"  # they can once another request has ended
    WORKER = "worker"  # none can, but one may come, or come back
    NONE = "none"  # they are there, and nothing may pass between them


Fitting = dict[str, list[Candidate]]  # prefill workers by the text of their fingerprint


def place(candidates: Sequence[Candidate], need: AttemptNeeds) -> Placement | None:
    """Picks the least loaded pair with a free seat; None if there is none.

    `auto` lets decode prefill a few prompts at a time if no prefill worker can hand over to it, or
    as of `_prefers_itself`; `remote` never, `local` always. An answer whose prompt's KV is at a
    worker goes there if it has a seat."""
    decoders = _usable(candidates, need, "decode")
    if beside := [c for c in decoders if c.record.life == need.beside and c.num_free_seats > 0]:
        return Placement(beside[0].record, None, shares_prompt=True)
    writers = () if need.mode == "local" else _usable(candidates, need, "prefill")
    fitting = _by_fingerprint(c for c in writers if not c.is_full)
    decoders = [c for c in decoders if _may_decode(c, fitting, need)]
    if not decoders:
        return None
    decode = min(decoders, key=lambda c: _decode_score(c, fitting, need))
    able = list(_writers(decode, fitting, need))
    trusted = [w for w in able if (w.record.life, decode.record.life) not in need.doubtful]
    prefill = min(trusted or able, key=lambda c: _prefill_score(c, need), default=decode)
    if _prefers_itself(decode, prefill, need):
        prefill = decode
    by_pool = need.by_pool and prefill.record.shares_pool_with(decode.record)
    return Placement(decode.record, None if prefill is decode else prefill.record, by_pool=by_pool)


def prospect(candidates: Sequence[Candidate], need: AttemptNeeds) -> Prospect:
    """What to expect: the same choice in a fleet that nothing runs on. If that fails, too, a worker
    is missing and may come, unless all are there and each link between them is refused for good."""
    if place(candidates, need) is not None:
        return Prospect.NOW
    idle = [replace(c, kept_for=None) for c in _idle(candidates)]
    if place(idle, need := replace(need, alone=())) is not None:
        return Prospect.SEAT
    return Prospect.NONE if _is_refused_for_good(idle, need) else Prospect.WORKER


def has_own(candidates: Sequence[Candidate], need: AttemptNeeds) -> bool:
    """Whether workers that are kept for a request that runs alone suffice once they are empty."""
    return place(_idle(candidates), need) is not None


def choose_own(candidates: Sequence[Candidate], need: AttemptNeeds) -> list[WorkerRecord]:
    """Workers to keep for a request that runs alone, the least loaded; none if others would lack
    them. Under `auto` a decode worker is enough, which then prefills for itself."""
    shared = replace(need, alone=())
    ways = [shared, replace(shared, mode="local")] if need.mode == "auto" else [shared]
    for way in ways:
        chosen = place(candidates, way) or place(_idle(candidates), way)
        workers = () if chosen is None else (chosen.decode, chosen.prefill)
        own = [one for one in workers if one is not None and is_alone(one, need.alone)]
        if own and all(_may_keep(candidates, need, record) for record in own):
            return own
    return []


def _idle(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [replace(c, in_flight=IDLE, seats=None, is_full=False) for c in candidates]


def is_alone(record: WorkerRecord, alone: Collection[Kind]) -> bool:
    """Whether a request that runs alone for these kinds of work shares the worker with no other."""
    return any(record.does(kind) for kind in alone)


def _may_keep(candidates: Sequence[Candidate], need: AttemptNeeds, record: WorkerRecord) -> bool:
    """Of several workers of a role at most half are kept, and another one is ready."""
    known = [c for c in candidates if c.condition is not Condition.DRAINING]
    wanted = record.role, need.model
    known = [c for c in known if (c.record.role, c.record.model.name) == wanted]
    if len(known) == 1:
        return known[0].kept_for is None
    num_free = sum(1 for c in known if c.condition is Condition.READY and not c.kept_for)
    return num_free > 1 and sum(1 for c in known if c.kept_for) < len(known) // 2


def why_refused(candidates: Sequence[Candidate], model: str) -> str:
    """The fastest of the links that no prompt may take, with its rate and the least rate, or that
    its ends have two connectors. Empty if none is refused."""
    links = _links(candidates, AttemptNeeds(model=model, mode="remote"))
    cold = [(one, two) for one, two in links if not one.may_push_to(two)]
    refused = [e for e in cold if e[0].min_handoff_gbps or not e[0].is_cold_to(e[1])]
    if not refused:
        return ""

    def quality(ends: tuple[WorkerRecord, WorkerRecord]) -> tuple[bool, float]:
        link = ends[0].link_to(ends[1])
        return ends[0].has_connector_of(ends[1]), link.bytes_per_second if link else -1.0

    prefill, decode = max(refused, key=quality)
    if not prefill.has_connector_of(decode):
        ways = f"{prefill.worker_id} moves pages with {prefill.connector}, but {decode.worker_id}"
        return f"{ways} with {decode.connector}; both need the same --connector"
    link = prefill.link_to(decode)
    moves = link and f"({link.transport}) moves {link.gigabytes_per_second:.4g} GB/s"
    found = moves or "has not been measured yet"
    others = f" ({len(refused)} links are refused, this is the fastest)" if refused[1:] else ""
    return (
        f"the link from {prefill.worker_id} to {decode.worker_id} {found}, but --min-handoff-gbps "
        f"is {prefill.min_handoff_gbps:.10g}{others}"
    )


def what_is_missing(candidates: Sequence[Candidate], need: AttemptNeeds) -> str:
    """Returns which workers a waiting request lacks, and how those are that the router knows."""
    ours = [c for c in candidates if c.record.model.name == need.model]
    decoders, writers = _usable(ours, need, "decode"), _usable(ours, need, "prefill")
    kinds: tuple[Kind, ...] = ("decode", "prefill") if need.mode == "remote" else ("decode",)
    for kind in kinds:
        if not (decoders if kind == "decode" else writers):
            known = [c for c in ours if c.record.does(kind) or c.record.may_change_role]
            known.sort(key=lambda c: not need.sizes.fit(kind, c.record))
            found = (f"{c.record.worker_id} is {_state(c, need, kind)}" for c in known[:4])
            states = ", ".join(found) or "none is known"
            return f"no live {kind} worker serves {need.model!r} ({states})"
    if need.mode == "remote" and (refused := why_refused(candidates, need.model)):
        return refused
    if not any(need.fingerprint in (None, c.record.fingerprint) for c in decoders):
        return "no live decode worker has the weights and settings with which the answer began"
    if need.mode == "remote" and decoders == writers and len(decoders) == 1:
        return f"{decoders[0].record.worker_id} needs another worker to prefill (--prefill remote)"
    pairs = ((w.record, d.record) for w in writers for d in decoders)
    differ = next(filter(None, (w.difference_from(d) for w, d in pairs)), "")
    return f"no prefill worker of {need.model!r} matches a decode worker or reaches one{differ}"


def _state(candidate: Candidate, need: AttemptNeeds, kind: Kind) -> str:
    if candidate.condition is not Condition.READY:
        return str(candidate.condition.value)
    if not need.sizes.fit(kind, candidate.record):
        return "too small for the request"
    if not candidate.record.does(kind):
        return f"in the role {candidate.record.role}"
    return "failing" if candidate.record.life in need.excluded else "reserved for another request"


def _links(
    candidates: Iterable[Candidate], need: AttemptNeeds
) -> Iterator[tuple[WorkerRecord, WorkerRecord]]:
    """Each prefill worker with each decode worker that it fits."""
    fitting = _by_fingerprint(_usable(candidates, need, "prefill"))
    for receiver in _usable(candidates, need, "decode"):
        for writer in fitting.get(receiver.record.fingerprint_text, ()):
            if writer is not receiver:
                yield writer.record, receiver.record


def _is_refused_for_good(candidates: Sequence[Candidate], need: AttemptNeeds) -> bool:
    """Whether all workers of a model are ready, and no link between them can become a good one."""
    ours = [c for c in candidates if c.record.model.name == need.model]
    if need.mode != "remote" or any(c.condition is not Condition.READY for c in ours):
        return False
    links = list(_links(ours, replace(need, excluded=())))
    return bool(links) and not any(
        w.may_push_to(d) or (w.has_connector_of(d) and w.link_to(d) is None) for w, d in links
    )


def _usable(candidates: Iterable[Candidate], need: AttemptNeeds, kind: Kind) -> list[Candidate]:
    """Those that take part, and may do this kind of work for the request."""
    return [
        c
        for c in candidates
        if c.condition is Condition.READY
        and c.record.does(kind)
        and c.record.model.name == need.model
        and c.record.life not in need.excluded
        and need.sizes.fit(kind, c.record)
        and _is_its_own(c, need)
    ]


def _is_its_own(candidate: Candidate, need: AttemptNeeds) -> bool:
    """Whether no other request has it or, if this one runs without others, is still in it."""
    if not need.alone or not is_alone(candidate.record, need.alone):
        return candidate.kept_for is None
    return candidate.kept_for == need.holder and candidate.in_flight.is_idle


def _by_fingerprint(prefillers: Iterable[Candidate]) -> Fitting:
    fitting: Fitting = defaultdict(list)
    for candidate in prefillers:
        fitting[candidate.record.fingerprint_text].append(candidate)
    return fitting


def _may_decode(candidate: Candidate, fitting: Fitting, need: AttemptNeeds) -> bool:
    """Whether it has a seat, the weights, and a worker that prefills, for a few prompts itself."""
    record = candidate.record
    if candidate.num_free_seats <= 0 or need.fingerprint not in (None, record.fingerprint):
        return False
    is_idle = need.mode == "auto" and _may_prefill_more(candidate)
    return need.mode == "local" or is_idle or any(_writers(candidate, fitting, need))


def _may_prefill_more(decode: Candidate) -> bool:
    return decode.in_flight.to_prefill < OWN_STEPS * decode.record.capacity.max_num_batched_tokens


def _writers(decode: Candidate, fitting: Fitting, need: AttemptNeeds) -> Iterator[Candidate]:
    """Workers that can compute a prompt and hand it over to `decode`. Between two workers that do
    both a prompt only moves if it must."""
    does_both = decode.record.role == "both" and need.mode != "remote"
    for candidate in fitting.get(decode.record.fingerprint_text, ()):
        record = candidate.record
        if does_both and record.role == "both":
            continue
        by_pool = need.by_pool and record.shares_pool_with(decode.record)
        is_broken = bool(need.broken) and (record.life, decode.record.life) in need.broken
        if by_pool or (not is_broken and record.may_push_to(decode.record)):
            yield candidate


def _prefers_itself(decode: Candidate, prefill: Candidate, need: AttemptNeeds) -> bool:
    """Whether a worker computes a prompt itself although `prefill` could: it is done sooner within
    the gaps of its answers or, without an objective for them, has fewer tokens to compute. One
    that only decodes also has to know more of the prompt, and the rest must not lengthen gaps."""
    if need.mode != "auto" or not _may_prefill_more(decode):
        return False
    own, others = _prefill_score(decode, need), _prefill_score(prefill, need)
    record, prompt = decode.record, need.prompt
    is_both = record.role == "both"
    if prompt.seconds is not None and (not is_both or prompt.seconds * record.load.prompt_rate):
        return prompt.is_sooner(record, own[1], others[1])
    knows_more = _known_tokens(decode, need) > _known_tokens(prefill, need)
    most_rows = record.capacity.max_num_seqs * record.model.block_size  # of all its answers
    return own < others and (is_both or (knows_more and own[1] + prompt.tokens <= most_rows))


def _decode_score(
    candidate: Candidate, fitting: Fitting, need: AttemptNeeds
) -> tuple[bool, bool, bool, float, int, int, str]:
    """A trusted way to it if prefill workers fit, seats for all answers, free pages net of what
    is on the way there and of those with the prompt already, then blocks left to denoise."""
    record, in_flight = candidate.record, candidate.in_flight
    load, capacity, tokens = record.load, record.capacity, in_flight.tokens
    own_pages = -(-tokens // capacity.page_size)
    reported = load.total_pages - load.free_pages
    known_pages = _known_tokens(candidate, need) // capacity.page_size
    used = (max(own_pages, reported) - known_pages) / (capacity.total_pages or 1)
    blocks = max(-(-tokens // record.model.block_size), load.blocks_left)
    # Whether prefill workers fit, and none of them is trusted to hand over to it.
    writers = _writers(candidate, fitting, need)
    if need.doubtful:
        writers = (w for w in writers if (w.record.life, record.life) not in need.doubtful)
    is_cut_off = record.fingerprint_text in fitting and next(writers, None) is None
    lacks_seats, placed = candidate.num_free_seats < need.num_answers, in_flight.placed
    return candidate.is_suspect, is_cut_off, lacks_seats, used, blocks, placed, record.worker_id


def _known_tokens(candidate: Candidate, need: AttemptNeeds) -> int:
    return need.cached.get(candidate.record.life, 0) if candidate.record.load.prefix_queries else 0


def _prefill_score(candidate: Candidate, need: AttemptNeeds) -> tuple[bool, int, bool, int, str]:
    """Tokens queued there, the larger of its own count and ours, without those of the prompt that
    it has in its cache. Of equals one that writes no answers comes first."""
    record, placed = candidate.record, candidate.in_flight.placed
    queued = max(candidate.in_flight.to_prefill, record.load.queued_tokens)
    queued -= _known_tokens(candidate, need)
    return candidate.is_suspect, queued, record.does("decode"), placed, record.worker_id
