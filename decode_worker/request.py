"""One attempt at a request inside the engine: what was asked, its sequence, its pages and counters;
and its rows in a forward, which are a chunk of its prompt or its denoise step.

Data with derived properties; the scheduler makes decisions and the engine carries them out.

Its changes of logits (penalties of written tokens, biases, barred ids) depend only on final text,
that is, on settled blocks. So they are the same for an attempt that resumes the request at the same
commit, and a block in flight does not depend on the order in which its own masks were filled.
`kernels/sampling.py` applies the changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from effuse.config.decoding import ALGORITHMS, Alg, DecodeSettings, Sampling
from effuse.decode_worker import canvas, denoise
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.scheduler import DecodeLimits, Demand, Footprint
from effuse.decode_worker.sequence import CanvasStep, IntArray, Sequence
from effuse.kernels.sampling_llada import LladaDraw, position_noise
from effuse.kernels.values import ScoreCode
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.units import HeldUnits
from effuse.models.config import ModelConfig
from effuse.models.part import Part, PartEdits, TokenEdits
from effuse.worker.messages import StartDecode, TokenLogprobs

_SCORES: Final[Mapping[Alg, ScoreCode]] = {
    "origin": ScoreCode.CONFIDENCE,  # which decides nothing there
    "maskgit_plus": ScoreCode.CONFIDENCE,
    "topk_margin": ScoreCode.MARGIN,
    "entropy": ScoreCode.NEG_ENTROPY,
}


class LastBlock(NamedTuple):
    """When an answer last got final tokens, on the engine's clock."""

    moment: float
    steps: int  # its forward passes until then
    prompts_s: float  # seconds that the engine had spent on prompts


class BlockCost(NamedTuple):
    """What an answer's new final tokens had beside them."""

    batch: int = 1  # answers in the step that ended with them
    prompts_s: float = 0.0  # seconds since the ones before that went to prompts


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """An attempt from its arrival to its end. Pages cover the sequence's stored tokens."""

    asked: StartDecode  # without the ids, which the sequence has
    model: ModelConfig
    arrival: int  # order of arrival; the age for the scheduler
    arrived_s: float  # on the engine's clock
    sequence: Sequence
    settings: DecodeSettings  # with the steps of the model's family
    # Requests for answers to the same prompt, including itself, which share its KV.
    siblings: list["DecodeRequest"] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position, not yet sent
    drafted_end: int = 0  # position after the last block in a draft
    pages: list[PageRef] = field(default_factory=list)
    units: HeldUnits = field(default_factory=HeldUnits)  # its part of the cache
    # start of the generation block whose surroundings are in the canvas' pages
    cache_of: int | None = None
    boundary: Tensor | None = None  # [H] hidden row of the last stored position (shifting models)
    prompt_boundary: Tensor | None = None  # [H] the same after the prompt, once that was stored
    known_edits: tuple[int, TokenEdits | None] = (0, None)  # for a final text of this length
    plan: StepPlan | None = None  # of the opened step that is not applied yet
    is_verified: bool = False  # the prompt's KV was complete at some time
    forward_passes: int = 0
    last_block: LastBlock | None = None  # None while that is unknown
    preemptions: int = 0

    @property
    def transfer_id(self) -> str:
        """Its name in this engine."""
        return self.asked.attempt.transfer_id

    @property
    def page_ids(self) -> list[int]:
        return [page.page_id for page in self.pages]

    @property
    def num_to_prefill(self) -> int:
        """Rows to run before the next denoise step: tokens before the blocks in flight whose KV is
        not stored, from prompt and settled text. For a canvas that has lost its cache all rows,
        otherwise none."""
        if not self.settings.is_canvas:
            return self.sequence.in_flight_start - self.sequence.committed_len
        lacks_cache = self.settings.cache != "none" and not self.has_cache
        is_begun = lacks_cache and canvas.is_begun(self.canvas_step())
        return self.sequence.mask_end if is_begun else 0

    @property
    def is_prompt(self) -> bool:
        """Whether its next forward computes tokens of a prompt, or text that has lost its KV."""
        return not self.settings.is_canvas and self.num_to_prefill > 0

    @property
    def has_cache(self) -> bool:
        """Whether pages hold the surroundings of the canvas' current generation block."""
        return self.cache_of is not None and self.cache_of == self.canvas_step().block_start

    def num_stored(self, page_size: int) -> int:
        """Tokens whose KV is in its pages. Before a prompt has arrived, those that were found."""
        if self.settings.is_canvas:
            return canvas.num_cached(self.canvas_step()) if self.has_cache else 0
        found = min(self.units.num_pages * page_size, self.sequence.first_block_start)
        return max(self.sequence.committed_len, found)

    def canvas_step(self) -> CanvasStep:
        """The inputs of the canvas' coming step."""
        canvas.append_blocks(self.sequence)
        seed, index = self.asked.sampling.seed, self.asked.sampling.answer_index
        return CanvasStep(
            self.sequence,
            self.settings,
            lambda positions, step: position_noise(seed, positions, step, index),
            self.model.shift_logits,
        )

    @property
    def runs_from_host(self) -> bool:
        """Whether the host feeds its next forward, even if others denoise on a device."""
        has_program = ALGORITHMS[self.settings.algorithm].slot_program is not None
        if not has_program or self.settings.edits_tokens:
            return True
        if self.num_to_prefill > 0 or self.asked.num_logprobs is not None:
            return True
        return changes_logits(self.asked.sampling, self.sequence, self.open_step().candidates)

    @property
    def lacks_prompt(self) -> bool:
        """Whether KV of its prompt is still missing, which another request may have."""
        return self.sequence.committed_len < self.sequence.first_block_start

    @property
    def holds_prompt(self) -> bool:
        """Whether its pages have everything with which another answer to this prompt can begin."""
        if self.sequence.committed_len == 0 or self.lacks_prompt:
            return False
        return self.prompt_boundary is not None or not self.model.shift_logits

    @property
    def needs_remote(self) -> bool:
        """True until the pages of its prefill worker have arrived."""
        return self.asked.writer is not None and not self.is_verified

    def open_step(self) -> StepPlan:
        """The plan of the coming denoise step; the same one until it is applied."""
        if self.plan is None:
            if self.settings.is_canvas:
                self.plan = canvas.open_step(self.canvas_step(), has_cache=self.has_cache)
            else:
                self.plan = denoise.open_step(self.sequence, self.settings)
        return self.plan

    def close_step(self) -> StepPlan:
        """The plan of the denoise step whose forward has ended; the next one may be opened."""
        plan = self.open_step()
        self.plan = None
        self.forward_passes += 1
        return plan

    def edits(self, candidates: IntArray) -> PartEdits | None:
        """`edits_for` these positions. Edits for final text read all of it, which takes longer than
        a step for a prompt of thousands of tokens. So they are kept until there is more final text.
        """
        length = self.sequence.num_emitted
        known = self.known_edits[1] if self.known_edits[0] == length else None
        found = edits_for(self.asked.sampling, self.sequence, candidates, known)
        if found is not None:
            self.known_edits = length, found.edits
        return found

    def take_prompt(self, pages: Iterable[PageRef], boundary: Tensor | None) -> None:
        """Continues after a prompt with this boundary, whose first pages it holds now, as if it had
        stored it itself."""
        self.pages = list(pages)
        self.sequence.store(self.sequence.first_block_start)
        self.boundary = self.prompt_boundary = boundary

    def pages_to_begin(self, limits: DecodeLimits) -> int:
        """Pages that it needs before its first forward here, or before its writer may push; another
        request's prompt may save some."""
        if self.settings.is_canvas:
            return limits.pages_for(canvas.num_cached(self.canvas_step()))
        if self.needs_remote:
            return limits.pages_for(self.sequence.first_block_start)
        return limits.pages_for(self.sequence.in_flight_start)

    def demand(self, limits: DecodeLimits, *, runs_ahead: bool = False) -> Demand:
        """Its demand for the next step; opens its denoise step.

        With `runs_ahead` a second step is launched before this one is read, and both need pages.
        """
        sequence, rows = self.sequence, self.num_to_prefill
        if not rows:
            plan = self.open_step()
            rows = least = (plan.end - plan.start) * self._passes
            end = plan.start + plan.num_stored
            if runs_ahead:
                end = max(end, min(sequence.in_flight_end, sequence.last_block_start))
        else:
            # A bidirectional prompt goes in one piece; later tokens go block by block.
            least = max(0, sequence.origin - sequence.committed_len) or sequence.block_size
            end = sequence.in_flight_start
        if self.settings.is_canvas:  # all rows of its step, or none
            least, end = rows, canvas.num_cached(self.canvas_step())
        growth = max(0, limits.pages_for(end) - len(self.pages))
        return Demand(
            rows=rows,
            least=least,
            growth=growth,
            holds_pages=bool(self.pages),
            is_prompt=self.is_prompt,
        )

    def preempt(self) -> None:
        """Its pages are gone: forgets the stored KV; tokens, flags and counters stay."""
        if self.settings.is_canvas:
            self.cache_of = self.plan = None  # a plan that reads the cache
        self.boundary = self.last_block = None
        self.sequence.committed_len = self.units.num_pages = 0
        self.preemptions += 1

    def footprint(self) -> Footprint:
        """Most resources that it can ever need."""
        sequence = self.sequence
        if self.settings.is_canvas:
            return canvas.footprint(self.canvas_step(), self._passes)
        num_blocks = (sequence.last_block_end - sequence.first_block_start) // sequence.block_size
        return Footprint(
            most_cached=sequence.last_block_start,
            # All blocks of a full window may settle in one step and be stored together with one new
            # block.
            most_rows=min(self.settings.most_active + 1, num_blocks) * sequence.block_size,
            first_chunk=sequence.origin,
        )

    @property
    def _passes(self) -> int:
        """Sequences in a forward: with guidance, also one whose prompt is masked."""
        return 2 if self.settings.is_canvas and self.settings.cfg_scale else 1


def edits_for(
    sampling: Sampling, sequence: Sequence, candidates: IntArray, known: TokenEdits | None = None
) -> PartEdits | None:
    """A step's changes of the logits at these positions [R] of `sequence`; None for none. `known`
    are the earlier edits for the same final text."""
    bars = _bars(sequence, candidates)
    if not (sampling.edits_logits or bars):
        return None
    edits = _token_edits(sampling, sequence) if known is None else known
    return PartEdits(
        edits=edits,
        early=_barring(edits, sequence.stopping.stop_token_ids) if bars else edits,
        early_end=sequence.min_end,
        min_p=sampling.min_p,
    )


def changes_logits(sampling: Sampling, sequence: Sequence, candidates: IntArray) -> bool:
    """Whether `edits_for` the same has something to change."""
    return sampling.edits_logits or _bars(sequence, candidates)


def _bars(sequence: Sequence, candidates: IntArray) -> bool:
    """Whether a candidate must not be a stop id; the first candidate is the leftmost."""
    has_stops = bool(sequence.stopping.stop_token_ids)
    return has_stops and len(candidates) > 0 and int(candidates[0]) < sequence.min_end


def _token_edits(sampling: Sampling, sequence: Sequence) -> TokenEdits:
    first = sequence.prompt_len
    answer, times = np.unique(
        sequence.token_ids[first : first + sequence.num_emitted], return_counts=True
    )
    by_id: dict[int, list[float]] = {}  # penalty, number to add
    if sampling.repetition_penalty != 1:
        seen = {*sequence.token_ids[:first].tolist(), *answer.tolist()}
        by_id = {token: [sampling.repetition_penalty, 0.0] for token in seen}
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in zip(answer.tolist(), times.tolist(), strict=True):
            taken = sampling.presence_penalty + count * sampling.frequency_penalty
            by_id.setdefault(token, [1.0, 0.0])[1] -= taken
    for token, added in sampling.logit_bias:
        by_id.setdefault(token, [1.0, 0.0])[1] += added
    ids = sorted(by_id)
    values = np.array([by_id[token] for token in ids], np.float32).reshape(-1, 2)
    return TokenEdits(np.array(ids, np.int64), values[:, 0], values[:, 1])


def _barring(edits: TokenEdits, barred: Iterable[int]) -> TokenEdits:
    """The same, and none of these ids is ever drawn."""
    ids = np.array(sorted(barred), np.int64)
    others = ~np.isin(edits.token_ids, ids)
    return TokenEdits(
        np.concatenate([edits.token_ids[others], ids]),
        np.concatenate([edits.penalties[others], np.ones(len(ids), np.float32)]),
        np.concatenate([edits.added[others], np.full(len(ids), -np.inf, np.float32)]),
    )


def parts_of(request: DecodeRequest, num_rows: int) -> list[Part]:
    """The parts of a forward for a request; the first one's results are the request's. num_rows: of
    a prompt."""
    if not request.num_to_prefill:
        return _with_guide(request, denoise_part(request, request.open_step()))
    if request.settings.is_canvas:
        return _with_guide(request, _refill_part(request))
    return [prefill_part(request, num_rows)]


def prefill_part(request: DecodeRequest, num_rows: int) -> Part:
    """The next `num_rows` tokens before the blocks in flight; all are stored."""
    sequence = request.sequence
    start = sequence.committed_len
    return Part(
        token_ids=sequence.token_ids[start : start + num_rows].tolist(),
        start=start,
        pages=request.page_ids,
        num_stored=num_rows,
        block_origin=sequence.origin,
        keep_boundary=num_rows == request.num_to_prefill,
    )


def denoise_part(request: DecodeRequest, plan: StepPlan) -> Part:
    """The rows of a step: all blocks in flight, or a canvas. Masks need candidates."""
    sequence, settings, sampling = request.sequence, request.settings, request.asked.sampling
    is_canvas = settings.is_canvas
    if plan.is_greedy:
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    return Part(
        token_ids=sequence.token_ids[plan.start : plan.end].tolist(),
        start=plan.start,
        pages=request.page_ids,
        num_stored=plan.num_stored,
        num_behind=plan.num_behind,
        unstored=plan.unstored,
        # On a canvas each token before its end sees all of them.
        block_origin=sequence.mask_end if is_canvas else sequence.origin,
        candidates=plan.candidates.tolist(),
        boundary=request.boundary,
        keep_boundary=plan.num_stored > 0 and not is_canvas,
        denoise_counts=plan.denoise_counts.tolist(),
        sampling=sampling,
        score=_SCORES[settings.alg] if is_canvas else ScoreCode[settings.ranked_by.upper()],
        draw=_draw(request) if is_canvas else None,
        guidance=settings.cfg_scale if is_canvas else 0.0,
        num_logprobs=request.asked.num_logprobs,
        edits=request.edits(plan.candidates),
    )


def _refill_part(request: DecodeRequest) -> Part:
    """The rows that fill the lost cache of a canvas, before its block had any tokens."""
    step = request.canvas_step()
    part = denoise_part(request, canvas.open_refill(step))
    token_ids = request.sequence.token_ids.copy()
    token_ids[step.block_start : step.block_end] = request.sequence.mask_token_id
    return replace(
        part, token_ids=token_ids[part.start : part.start + len(part.token_ids)].tolist()
    )


def _with_guide(request: DecodeRequest, part: Part) -> list[Part]:
    """The part, and with guidance also that of a canvas without a prompt."""
    if not part.guidance:
        return [part]
    prompt_len = request.sequence.prompt_len
    masked = [request.sequence.mask_token_id] * prompt_len + list(part.token_ids[prompt_len:])
    return [part, replace(part, token_ids=masked, guidance=0.0, edits=None, num_logprobs=None)]


def _draw(request: DecodeRequest) -> LladaDraw | None:
    """Draws of LLaDA's loop, and of Fast-dLLM's except for models that shift their logits."""
    settings, model, sampling = request.settings, request.model, request.asked.sampling
    if settings.algorithm == "dream" or (settings.algorithm == "fast_dllm" and model.shift_logits):
        return None
    eos = model.eos_token_ids[:1] if settings.logits_eos_inf else ()
    return LladaDraw(
        temperature=sampling.temperature,
        seed=sampling.seed,
        answer_index=sampling.answer_index,
        never=(request.sequence.mask_token_id, *eos),
        last=model.postponed_ids if settings.confidence_eos_eot_inf else (),
    )
