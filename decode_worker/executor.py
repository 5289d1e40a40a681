"""Runs the forward of a step: chunks of prompts, and denoise steps.

The host feeds every forward, except for the denoise steps of requests in the slots of a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from effuse.decode_worker import canvas, denoise
from effuse.decode_worker.denoise import StepOutcome
from effuse.decode_worker.request import DecodeRequest, parts_of
from effuse.decode_worker.sequence import HostCandidates, IntArray
from effuse.kernels.pages import Place, QueuedLayers
from effuse.models.part import Forward, HostLogprobs, Part, PartResult, Pipeline
from effuse.worker.engine_process import ForwardFailed, ForwardGuard
from effuse.worker.messages import TokenLogprobs

if TYPE_CHECKING:
    from effuse.decode_worker.device_slots import DeviceSlots


class Counters(msgspec.Struct):
    """Counters of an engine since its start, by their names in `Load`."""

    steps: int = 0  # forwards
    step_requests: int = 0  # sum of the requests in each
    step_tokens: int = 0  # sum of the tokens in each
    steps_sharing: int = 0  # in which requests read a beginning together
    preemptions: int = 0
    prompts_shared: int = 0  # whose KV came from another request
    prompt_tokens: int = 0  # of prompts that were computed here
    prompts_overdue: int = 0  # forwards whose prompts had waited too long for room
    kv_bytes: int = 0  # received from prefill workers
    kv_bytes_held: int = 0  # that the cache had, and no prefill worker sent


@dataclass(frozen=True, slots=True)
class Share:
    """One request's share of a step: all rows of its denoise step, or a chunk of its prefill."""

    request: DecodeRequest
    num_rows: int
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Prefilled:
    """KV of a request's chunk is stored."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Denoised:
    """A denoise step has changed a request's sequence."""

    request: DecodeRequest
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class Broken:
    """A request cannot go on; none of its work runs any more."""

    request: DecodeRequest
    message: str  # for the caller
    is_retryable: bool


StepResult = Prefilled | Denoised | Broken
NOT_FINITE = "the model gave no finite probabilities"


class Executor:
    """Launches steps, and returns their results once they have ended.

    Results must be applied before the next ones are read, because they refer to the current
    sequences. Prompts, canvases and some requests are fed from the host: their results are there
    when the launch returns. With `slots` the other denoise steps run on the device, one behind.

    On a device a prompt's forward, or a page's copy, may write pages long after its launch returns.
    Later work in the same queue comes after them, but a prefill worker's bytes do not.
    """

    def __init__(
        self,
        forward: Forward,
        copy_page: Callable[[int, int], None],
        place: Callable[[], Place] | None = None,
        queued: QueuedLayers | None = None,
        slots: DeviceSlots | None = None,
        *,
        replica: int = 0,
        ask: Callable[[Executor, Sequence[Share]], None] | None = None,
        pipeline: Pipeline[Any] | None = None,
    ) -> None:
        """`copy_page` copies pages. On a device `place` returns the place after all launched work.
        `queued` are the forward's layers, whose ends are signs of life. With `ask` forwards of the
        host are asked for there, whose caller calls `parts_of` and `take`. With a `pipeline` these
        are begun there, and several are under way, each with other requests."""
        self.counters = Counters()
        self.num_ended = 0  # launches whose results are there
        self.runs_ahead = slots is not None  # a step is launched before the last one is read
        self._forward = forward
        self._copy_page = copy_page
        self._place = place
        self._queued = queued
        self._slots = slots
        self._replica = replica
        self._ask = ask
        self._pipeline = pipeline
        self._begun: deque[_Begun] = deque()  # forwards of the pipeline, oldest first
        self._rests = False  # nothing more can begin before one of them ends
        self._guard, self._slots_guard = ForwardGuard(), ForwardGuard()
        self._results: list[StepResult] = []  # of the host's forwards, and of failed launches
        # Work that may still write pages: those of a request, by transfer id, or named ones.
        self.writing: dict[str | int, Place] = {}

    @property
    def is_full(self) -> bool:
        """Whether results must be read before the next launch."""
        if self._pipeline is not None:
            return len(self._begun) >= self._pipeline.most_begun
        return self._slots is not None and self._slots.stepper.is_full

    @property
    def is_running(self) -> bool:
        """Whether a step was launched whose results were not read."""
        return bool(self._results or self._begun or (self._slots and self._slots.stepper.num_ahead))

    def num_parts(self, num_requests: int) -> int:
        """Parts into which requests are divided, so that each stage of a pipeline has one."""
        return 1 if self._pipeline is None else self._pipeline.num_parts(num_requests)

    def is_under_way(self, request: DecodeRequest) -> bool:
        """Whether it is in a forward of the pipeline that has not been read."""
        return any(share.request is request for one in self._begun for share in one.shares)

    def launch(self, shares: Sequence[Share]) -> bool:
        """Launches a step; False if there was nothing to run. Each share has its pages. Requests
        on the device take part until they end."""
        slots = self._slots
        if self._pipeline is not None:
            self._rests = not shares
            if shares:
                parts = self.parts_of(shares)
                begun = self._pipeline.begin([part for each in parts for part in each])
                self._begun.append(_Begun(list(shares), parts, begun))
            return bool(shares)
        if slots is None:
            self.num_ended += bool(shares)
            return self._launch_from_host(shares)
        from_host = [share for share in shares if share.request.runs_from_host]
        for share in shares:
            if not share.request.runs_from_host:
                slots.bring_up(share.request)
        has_run = self._launch_from_host(from_host)
        if not slots.residents:
            self.num_ended += has_run
            return has_run
        self._launch_slots(slots)
        return True

    def has_results(self) -> bool:
        """Whether results can be read without waiting."""
        if self._queued is not None:
            self._queued.look()
        if self._begun and (self._rests or self.is_full):
            return True
        return bool(self._results) or (self._slots is not None and self._slots.has_ended())

    def read(self) -> list[StepResult]:
        """Results of the oldest running step; waits for it."""
        if self._slots is not None and not self._results:
            return self._read_slots(self._slots)
        if self._pipeline is not None and not self._results:
            self._rests = False
            oldest = self._begun.popleft()
            self.num_ended += 1
            self.take(
                oldest.shares,
                oldest.parts,
                iter(self._pipeline.end(oldest.forward)),
                oldest.removed,
            )
        results, self._results = self._results, []
        return results

    def remove(self, request: DecodeRequest) -> bool:
        """Removes a request from steps that are launched from now on. True if steps with unread
        results may still write its pages; it waits for other writers."""
        if self.writing:
            keys: set[str | int] = {request.transfer_id, *request.page_ids}
            for key in keys & self.writing.keys():
                place = self.writing.pop(key)
                self._wait(place.query)
                place.synchronize()
        for begun in self._begun:
            for share in begun.shares:
                if share.request is request:
                    begun.removed.add(request.transfer_id)
                    return True
        if not all(begun.copied.isdisjoint(request.page_ids) for begun in self._begun):
            return True
        return self._slots is not None and self._slots.remove(request)

    def copy_page(self, source: int, target: int) -> None:
        """Copies the page with this id to another one, after all earlier launches."""
        self._copy_page(source, target)
        self._note([source, target])
        if self._begun:  # behind which the first stage copies
            self._begun[-1].copied.update((source, target))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Shows signs of life while layers end, until all have or `is_over`."""
        if self._queued is not None:
            self._queued.wait(is_over)

    def _note(self, keys: Iterable[str | int]) -> None:
        """Waits for all launched work before the pages of these requests change hands."""
        if self._place is not None:
            writing = {key: place for key, place in self.writing.items() if not place.query()}
            self.writing = writing | dict.fromkeys(keys, self._place())

    def _launch_slots(self, slots: DeviceSlots) -> None:
        """Launches a step of the slots; if that fails, only their requests fail."""
        self.counters.steps += 1
        self.counters.step_requests += len(slots.residents)
        try:
            self._slots_guard.run(slots.stepper.launch, len(slots.residents))
            self.counters.steps_sharing = slots.stepper.num_sharing
        except ForwardFailed as failure:
            self.num_ended += 1
            for resident in list(slots.residents.values()):
                slots.remove(resident.request)
                self._results.append(Broken(resident.request, str(failure), is_retryable=True))
            while slots.stepper.num_ahead:
                # None of its work may still run when pages are released.
                self._wait(slots.stepper.has_ended)
                slots.stepper.read()
                self.num_ended += 1

    def _read_slots(self, slots: DeviceSlots) -> list[StepResult]:
        self._wait(slots.stepper.has_ended)
        self.num_ended += 1
        results: list[StepResult] = []
        for request, plan, outcome in slots.read():
            if outcome is None:
                results.append(Broken(request, NOT_FINITE, is_retryable=False))
            else:
                self.counters.step_tokens += plan.end - plan.start
                results.append(Denoised(request, outcome))
        return results

    def parts_of(self, shares: Sequence[Share]) -> list[list[Part]]:
        """The parts of a forward for each share."""
        parts = [parts_of(share.request, share.num_rows) for share in shares]
        if self._replica:
            parts = [[replace(part, replica=self._replica) for part in each] for each in parts]
        self.counters.steps += 1
        self.counters.step_requests += len(shares)
        self.counters.step_tokens += sum(len(part.token_ids) for each in parts for part in each)
        return parts

    def take(
        self,
        shares: Sequence[Share],
        parts: Sequence[Sequence[Part]],
        results: Iterator[PartResult],
        removed: Container[str] = (),
    ) -> None:
        """Applies a forward's results, which are there for all parts in their order; not those of
        `removed` requests."""
        for share, each in zip(shares, parts, strict=True):
            first, *_ = [next(results) for _ in each]
            if share.request.transfer_id not in removed:
                self._results.append(_apply(share.request, each[0], first))
        self._note([share.request.transfer_id for share in shares])

    def _launch_from_host(self, shares: Sequence[Share]) -> bool:
        if not shares:
            return False
        if self._ask is not None:
            self._ask(self, shares)
            return True
        parts = self.parts_of(shares)
        flat = [part for each in parts for part in each]
        try:
            results = self._guard.run(lambda: self._forward.run(flat), len(shares))
        except ForwardFailed as failure:
            self._results += [
                Broken(share.request, str(failure), is_retryable=True) for share in shares
            ]
            self._note([share.request.transfer_id for share in shares])
        else:
            self.take(shares, parts, iter(results))
        return True


@dataclass(frozen=True, slots=True)
class _Begun:
    """A forward of a pipeline."""

    shares: Sequence[Share]
    parts: Sequence[Sequence[Part]]
    forward: object
    removed: set[str] = field(default_factory=set)  # transfers of requests that have left since
    copied: set[int] = field(default_factory=set)  # pages that other stages copy after it


def _apply(request: DecodeRequest, part: Part, result: PartResult) -> StepResult:
    """Applies a forward's stored tokens and proposals to a request."""
    if result.boundary is not None:
        request.boundary = result.boundary
    if request.num_to_prefill:
        if request.settings.is_canvas:
            request.cache_of = request.canvas_step().block_start
        else:
            request.sequence.store(part.num_stored)
        return Prefilled(request)
    candidates = _candidates_of(result)
    if not candidates.is_finite():
        return Broken(request, NOT_FINITE, is_retryable=False)
    plan = request.close_step()
    before = request.sequence.token_ids[plan.candidates]
    if request.settings.is_canvas:
        step = request.canvas_step()
        if plan.num_stored:
            request.cache_of = step.block_start
        outcome = canvas.apply_step(step, plan, candidates)
    else:
        outcome = denoise.apply_step(request.sequence, request.settings, plan, candidates)
    if result.logprobs is not None:
        _note_logprobs(request, plan.candidates, before, result.logprobs)
    return Denoised(request, outcome)


def _note_logprobs(
    request: DecodeRequest, positions: IntArray, before: IntArray, logprobs: HostLogprobs
) -> None:
    """Keeps log-probabilities of candidates that were written at these positions. `before` are the
    previous ids: an unchanged token keeps its earlier ones.
    """
    for index in np.flatnonzero(request.sequence.token_ids[positions] != before).tolist():
        ids, top = logprobs.top_token_ids[index], logprobs.top[index]
        entry = TokenLogprobs(logprobs.chosen[index], tuple(ids), tuple(top))
        request.logprobs[int(positions[index])] = entry


def _candidates_of(result: PartResult) -> HostCandidates:
    """The runner's lists as arrays."""
    return HostCandidates(
        np.asarray(result.tokens, dtype=np.int64),
        np.asarray(result.confidences, dtype=np.float32),
        np.asarray(result.scores, dtype=np.float32),
    )
