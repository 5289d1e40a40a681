"""The reference decoder's loops: D2F (arXiv 2508.09192), block diffusion, and vanilla denoising.

A loop asks `predict` for candidates and applies `rules`. `predict` is either a checkpoint's dense
forward or, in the oracle's own tests, a script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from oracle import rules
from oracle.edits import edited
from oracle.forward import RawModel, load_raw, logits, visible
from oracle.rules import Block, Canvas, State
from oracle.sampling import candidate
from oracle.settings import BlockTrace, Candidate, Occurrences, OracleResult, Settings, StepTrace

# (token ids, masked position -> forwards that denoised its block before) -> its candidates
Predict = Callable[[list[int], dict[int, int]], dict[int, Candidate]]


def decode(weights_dir: Path | str, prompt_ids: Sequence[int], settings: Settings) -> OracleResult:
    """The engine's required answer to `prompt_ids` with these weights."""
    return decode_with(load_raw(weights_dir), prompt_ids, settings)


def decode_with(model: RawModel, prompt_ids: Sequence[int], settings: Settings) -> OracleResult:
    """`decode` with weights that are already read."""
    prompt = list(prompt_ids)
    if not prompt or model.mask_token_id in prompt:
        raise ValueError("a prompt holds at least one token and never the mask")
    stops = model.eos_token_ids if settings.stop_token_ids is None else settings.stop_token_ids
    if settings.algorithm == "vanilla":
        predict = _dense(model, settings, origin=len(prompt) + settings.max_tokens, block_size=1)
        return denoise_canvas(predict, prompt, settings, stops, model.mask_token_id)
    origin, block_size = model.block_origin(len(prompt)), settings.block_size or model.block_size
    canvas = new_canvas(prompt, origin, block_size, settings.max_tokens)
    answer: list[int] = []

    def edit(row: torch.Tensor, at: int) -> torch.Tensor:
        return edited(row, settings, stops, prompt=prompt, answer=answer, at=at)

    predict = _dense(model, settings, origin=origin, block_size=block_size, edit=edit)
    return denoise_blocks(predict, canvas, settings, stops, model.mask_token_id, answer)


def new_canvas(prompt: list[int], origin: int, block_size: int, max_tokens: int) -> Canvas:
    """A canvas that holds the prompt and no block."""
    masked = [False] * len(prompt)
    limit = len(prompt) + max_tokens
    return Canvas([*prompt], masked, len(prompt), origin, block_size, limit)


def denoise_blocks(
    predict: Predict,
    canvas: Canvas,
    settings: Settings,
    stops: Sequence[int],
    mask_token_id: int,
    answer: list[int] | None = None,
) -> OracleResult:
    """D2F and block diffusion: append, activate, forward, write, settle, until the answer ends.
    Final text is added to `answer`, for the predictor.
    """
    answer = [] if answer is None else answer
    steps: list[StepTrace] = []
    occurred = _prompt_cases(canvas)
    while True:
        if rules.wants_block(canvas, settings):
            canvas.append(mask_token_id)
        rules.activate(canvas, settings)
        step, text, finish = _step(predict, canvas, settings, stops, occurred)
        steps.append(step)
        answer += text
        if finish is not None:
            occurred.cut_last_blocks += canvas.blocks[-1].end > canvas.limit
            return OracleResult(tuple(answer), finish, len(steps), tuple(steps), occurred)


def _step(
    predict: Predict,
    canvas: Canvas,
    settings: Settings,
    stops: Sequence[int],
    occurred: Occurrences,
) -> tuple[StepTrace, list[int], Literal["stop", "length"] | None]:
    active = [block for block in canvas.blocks if block.state is State.ACTIVE]
    before = tuple(
        BlockTrace(b.start, b.end, len(canvas.masks(b)), b.full, b.denoise_count) for b in active
    )
    wanted = {p: block.denoise_count for block in active for p in canvas.masks(block)}
    candidates = predict([*canvas.tokens], wanted)
    writes: dict[int, int] = {}
    for block in active:
        writes |= _write(canvas, block, candidates, settings, stops, occurred)
    assert writes, "the first block that holds masks is full: every step writes"
    settled = rules.settle(canvas)
    occurred.steps_settling_several += len(settled) > 1
    occurred.blocks_waiting += sum(
        block.state is State.ACTIVE and not canvas.masks(block) for block in active
    )
    text, finish = _emit(canvas, settled, stops)
    starts = tuple(block.start for block in settled)
    return StepTrace(before, candidates, writes, starts, tuple(text)), text, finish


def _write(
    canvas: Canvas,
    block: Block,
    candidates: dict[int, Candidate],
    settings: Settings,
    stops: Sequence[int],
    occurred: Occurrences,
) -> dict[int, int]:
    own = {p: candidates[p] for p in canvas.masks(block)}
    if not own:
        return {}
    writes = {p: own[p].token for p in rules.choose(block, own, settings)}
    for position, token in writes.items():
        canvas.tokens[position], canvas.masked[position] = token, False
    block.denoise_count += 1
    occurred.semi_active_writes += len(writes) * (not block.full)
    occurred.fallback_writes += sum(
        not rules.passes(own[p].confidence, settings.confidence_threshold) for p in writes
    )
    if any(token in stops for token in writes.values()):
        canvas.stop_written = True
        index = canvas.blocks.index(block)
        occurred.stops_before_later_blocks += index + 1 < len(canvas.blocks)
        occurred.stops_behind_unfinished += any(canvas.masks(b) for b in canvas.blocks[:index])
    return writes


def _emit(
    canvas: Canvas, settled: Sequence[Block], stops: Sequence[int]
) -> tuple[list[int], Literal["stop", "length"] | None]:
    text: list[int] = []
    for block in settled:
        piece, stopped = rules.cut(canvas, block, stops)
        text += piece
        if stopped:
            return text, "stop"
        if block.end >= canvas.limit:
            return text, "length"
    return text, None


def denoise_canvas(
    predict: Predict,
    prompt: list[int],
    settings: Settings,
    stops: Sequence[int],
    mask_token_id: int,
) -> OracleResult:
    """Vanilla denoising: the whole answer at once, every step the k most confident masks."""
    canvas = new_canvas(prompt, len(prompt), settings.max_tokens, settings.max_tokens)
    canvas.append(mask_token_id)
    block, steps, finish = canvas.blocks[0], [], None
    while finish is None:
        before = BlockTrace(
            block.start, block.end, len(canvas.masks(block)), True, block.denoise_count
        )
        wanted = dict.fromkeys(canvas.masks(block), block.denoise_count)
        candidates = predict([*canvas.tokens], wanted)
        writes = {p: candidates[p].token for p in rules.best(candidates, settings.tokens_per_step)}
        for position, token in writes.items():
            canvas.tokens[position], canvas.masked[position] = token, False
        block.denoise_count += 1
        settled = rules.settle(canvas)
        text, finish = _emit(canvas, settled, stops)
        starts = tuple(block.start for block in settled)
        steps.append(StepTrace((before,), candidates, writes, starts, tuple(text)))
    return OracleResult(tuple(text), finish, len(steps), tuple(steps), Occurrences())


def _dense(
    model: RawModel,
    settings: Settings,
    *,
    origin: int,
    block_size: int,
    edit: Callable[[torch.Tensor, int], torch.Tensor] = lambda row, at: row,
) -> Predict:
    """`edit` changes the logits [V] of the position `at`."""

    def predict(token_ids: list[int], wanted: dict[int, int]) -> dict[int, Candidate]:
        rows: torch.Tensor = logits(model, token_ids, visible(len(token_ids), origin, block_size))
        return {
            position: candidate(
                edit(rows[position - model.shifts], position),
                settings,
                model.mask_token_id,
                position,
                count,
                top_k_first=model.family == "sdar",
            )
            for position, count in wanted.items()
        }

    return predict


def _prompt_cases(canvas: Canvas) -> Occurrences:
    ragged = (canvas.prompt_len - canvas.origin) % canvas.block_size != 0
    short = canvas.origin == 0 and canvas.prompt_len < canvas.block_size
    return Occurrences(ragged_tails=int(ragged), prompts_shorter_than_block=int(short))
