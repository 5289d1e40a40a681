"""Vanilla denoising: no cache, one token a forward, every forward over the whole canvas. Greedy.

A baseline of `effuse bench --baseline`. It is LLaDA's own loop with as many steps as tokens and one
block; it is not Dream's, whose steps write a share of the masks that follows from a schedule of
times, none in some and several in others. Models that attend to everything may write anywhere;
block-causal ones only into the first block that has masks, since they never saw a later one behind
an empty one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.models.part import Part
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer

_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt, and how many tokens to write behind it."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class Written:
    """What came of it. Nothing is final before `total_s`, in seconds from `began_s` on."""

    began_s: float
    token_ids: list[int] = field(default_factory=list)
    forward_passes: int = 0
    total_s: float = 0.0


class _Canvas:
    """A prompt and its answer, masks where nothing is written yet."""

    def __init__(self, ask: Ask, model: Transformer) -> None:
        config = model.config
        self.answer = Written(began_s=time.monotonic())
        self._prompt_len = len(ask.prompt_token_ids)
        self._ids = [*ask.prompt_token_ids, *[config.mask_token_id] * ask.max_tokens]
        self._masked = list(range(self._prompt_len, len(self._ids)))
        self._block_size: int | None = None
        self._origin = len(self._ids)  # before the first block: everything sees everything
        if config.prompt_attention == "causal_blocks":
            self._block_size, self._origin = config.block_size, 0
        self._stops = config.eos_token_ids

    def part(self) -> Part:
        """The whole canvas, with a candidate wanted for every mask that may be written."""
        open_masks = self._open_masks()
        return Part(
            token_ids=self._ids,
            start=0,
            pages=(),
            num_stored=0,
            block_origin=self._origin,
            candidates=open_masks,
            denoise_counts=[self.answer.forward_passes] * len(open_masks),
        )

    def _open_masks(self) -> list[int]:
        if self._block_size is None:
            return self._masked
        first = self._masked[0] // self._block_size
        return [at for at in self._masked if at // self._block_size == first]

    def write(self, tokens: Sequence[int], scores: Sequence[float]) -> bool:
        """Write the most confident candidate, ties to the left; whether that was the last mask."""
        best = max(range(len(scores)), key=lambda at: (scores[at], -at))
        self._ids[self._masked.pop(best)] = tokens[best]
        self.answer.forward_passes += 1
        if self._masked:
            return False
        self.answer.token_ids = list(self._before_stop())
        self.answer.total_s = time.monotonic() - self.answer.began_s
        return True

    def _before_stop(self) -> Iterator[int]:
        for token in self._ids[self._prompt_len :]:
            if token in self._stops:
                return
            yield token


def run_vanilla(
    model: Transformer, asks: Sequence[Ask], *, max_num_seqs: int, on_token: Callable[[], None]
) -> list[Written]:
    """Answer every request, `max_num_seqs` at a time; answers are in their order.

    `on_token` is called for each token written.
    """
    config = model.config
    dtype = str(model.dtype).removeprefix("torch.")
    layout = KVLayout(
        "unified", config.num_layers, config.num_kv_heads, config.head_dim, _PAGE_SIZE, dtype
    )
    memory = PageMemory(layout, 1, model.device)  # nothing is ever stored in it
    runner = ModelRunner(
        model, memory.layer_views(), page_size=_PAGE_SIZE, block_size=config.block_size
    )
    waiting = iter(asks)
    answers: list[Written] = []
    running: list[_Canvas] = []
    while True:
        joining = [_Canvas(ask, model) for ask in islice(waiting, max_num_seqs - len(running))]
        running += joining
        answers += [canvas.answer for canvas in joining]
        if not running:
            return answers
        results = runner.run([canvas.part() for canvas in running])
        still = []
        for canvas, result in zip(running, results, strict=True):
            is_full = canvas.write(result.tokens, result.scores)
            on_token()
            if not is_full:
                still.append(canvas)
        running = still
