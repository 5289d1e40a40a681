"""From a StartDecode message to a request, or to the reason why it cannot be served here.

Checks values against the model and the engine's limits; nothing is reserved and nothing is kept.
"""

from collections.abc import Collection
from dataclasses import dataclass

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.scheduler import DecodeLimits, check_fits
from effuse.decode_worker.sequence import RequestError, Sequence
from effuse.models.config import ModelConfig
from effuse.worker.messages import Resume, StartDecode


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes requests for one model under one engine's limits."""

    model: ModelConfig
    limits: DecodeLimits

    def make_request(self, message: StartDecode, *, arrival: int, now: float) -> DecodeRequest:
        """A request that can finish here. Raises RequestError with what is wrong."""
        self._check_steps(message.settings)
        request = DecodeRequest(
            attempt=message.attempt,
            arrival=arrival,
            arrived_s=now,
            sequence=self._sequence(message),
            settings=message.settings,
            sampling=message.sampling,
            writer=message.writer,
            drafts=message.drafts,
            group="" if message.settings.is_canvas else message.group,
            num_logprobs=message.num_logprobs,
            eos_token_ids=self.model.eos_token_ids,
            shifts=self.model.shift_logits,
        )
        if message.num_logprobs is not None and message.resume is not None:
            _resume_logprobs(request, message.resume)
        self._check_algorithm(request)
        _check_window(request, self.limits)
        _check_stops(request, self.limits)
        check_fits(request.footprint(), self.limits)
        return request

    def _check_steps(self, settings: DecodeSettings) -> None:
        if settings.denoising_steps > self.limits.block_size:
            raise RequestError(
                f"denoising_steps must be at most the block size {self.limits.block_size}, "
                f"got {settings.denoising_steps}"
            )

    def _check_algorithm(self, request: DecodeRequest) -> None:
        name = request.settings.algorithm
        if name == "fast_dllm_v2" and self.model.architecture != "fast_dllm_v2":
            raise RequestError(f"{name} needs a model that was tuned for it")
        if not request.settings.is_canvas:
            return
        if self.model.prompt_attention != "bidirectional":
            raise RequestError(f"{name} needs a model whose prompt attends to all of itself")
        if request.writer is not None:
            raise RequestError(f"{name} computes prompt and answer together: no prefill worker")

    def _sequence(self, message: StartDecode) -> Sequence:
        prompt = message.prompt_token_ids
        self._check_length(len(prompt), message.stopping.max_tokens)
        self._check_ids("prompt_token_ids", prompt)
        self._check_ids("stop_token_ids", message.stopping.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in message.sampling.logit_bias])
        resume = message.resume or Resume(committed_token_ids=(), frontier=())
        self._check_ids("committed_token_ids", resume.committed_token_ids)
        for block in resume.frontier:
            self._check_ids("token_ids of the frontier", block.token_ids)
        is_canvas = message.settings.is_canvas
        sequence = Sequence(
            prompt,
            origin=self.model.block_origin(len(prompt)),
            block_size=self.limits.block_size,
            mask_token_id=self.model.mask_token_id,
            stopping=message.stopping,
            is_canvas=is_canvas,
        )
        committed, frontier = resume.committed_token_ids, resume.frontier
        return sequence.resume(committed, frontier, is_canvas=is_canvas)

    def _check_length(self, prompt_len: int, max_tokens: int) -> None:
        """Refuses absurd lengths before anything of that size is made."""
        most = self.limits.max_model_len
        if prompt_len + max_tokens > most:
            raise RequestError(
                f"a prompt of {prompt_len} tokens and max_tokens {max_tokens} make "
                f"{prompt_len + max_tokens} tokens; max_model_len is {most}"
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.model.vocab_size:
            raise RequestError(
                f"{name} must lie in 0..{self.model.vocab_size - 1}, "
                f"got {min(token_ids)}..{max(token_ids)}"
            )


def _resume_logprobs(request: DecodeRequest, resume: Resume) -> None:
    """Takes over those of tokens that are written in the frontier."""
    sequence = request.sequence
    for block, state in zip(sequence.blocks, resume.frontier, strict=True):
        first = max(block.start, sequence.prompt_len)
        told = state.logprobs or (None,) * sequence.block_size
        for position in range(first, block.end):
            entry = told[position - block.start]
            if entry is not None and not sequence.masked[position]:
                request.logprobs[position] = entry
            elif entry is None and not sequence.masked[position]:
                raise RequestError("the frontier lacks log-probabilities of what is written in it")


def _check_window(request: DecodeRequest, limits: DecodeLimits) -> None:
    if request.settings.is_canvas:
        return  # all its blocks are in flight at once, in no slot of a device
    most_active = request.settings.most_active
    if most_active > limits.max_window:
        raise RequestError(
            f"the window must be at most this worker's max_window {limits.max_window}, "
            f"got {most_active}"
        )
    if request.sequence.num_active > most_active:
        raise RequestError(
            f"the frontier holds {request.sequence.num_active} blocks; "
            f"the settings allow {most_active} in flight"
        )


def _check_stops(request: DecodeRequest, limits: DecodeLimits) -> None:
    num_stops = len(request.sequence.stopping.stop_token_ids)
    if num_stops > limits.max_stop_ids:
        raise RequestError(
            f"stop ids, end-of-sequence ids included, must be at most this worker's "
            f"max_stop_ids {limits.max_stop_ids}, got {num_stops}"
        )
