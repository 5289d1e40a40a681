"""The two baselines of `effuse bench --baseline`, in this process, on the fleet's prompts.

Single-process D2F is the same engine without fleet, wire and handoff; vanilla denoising is what
the published base models do. Loads weights, so it is imported only when asked for.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from effuse.cli.evaluate import Way, settings_of
from effuse.cli.figures import Run, Sample
from effuse.cli.local import Ask, LocalAnswer, LocalEngine, pick_device
from effuse.cli.vanilla import run_vanilla
from effuse.models.weights import load_model


class Baseline:
    """A loaded model and the requests to answer with it."""

    def __init__(
        self,
        directory: Path,
        adapter: Path | None,
        prompts: Sequence[Sequence[int]],
        *,
        way: Way,
        max_tokens: int,
        concurrency: int,
    ) -> None:
        device, dtype = pick_device()
        self._model = load_model(directory, adapter=adapter, device=device, dtype=dtype)
        settings = settings_of(way, self._model.config.block_size)
        self._max_model_len = self._model.config.max_position_embeddings
        rooms = [self._max_model_len - len(prompt) for prompt in prompts]
        self._asks = [
            Ask(prompt_token_ids=tuple(prompt), max_tokens=min(max_tokens, room), settings=settings)
            for prompt, room in zip(prompts, rooms, strict=True)
            if room > 0
        ]
        self._too_long = len(prompts) - len(self._asks)  # a fleet refuses them
        self._concurrency = concurrency

    def size(self) -> tuple[int, int]:
        """Requests, and tokens that vanilla denoising writes for them."""
        return len(self._asks), sum(ask.max_tokens for ask in self._asks)

    def single_process(self, on_done: Callable[[], None]) -> Run:
        """The same engine, prefilling for itself."""
        engine = LocalEngine(
            self._model, max_num_seqs=self._concurrency, max_model_len=self._max_model_len
        )
        began = time.monotonic()
        answers = engine.run(self._asks, on_done)
        return self._run("single-process D2F", time.monotonic() - began, answers)

    def vanilla(self, on_token: Callable[[], None]) -> Run:
        """The whole canvas at every step, one token a forward; `on_token` is called for each."""
        began = time.monotonic()
        answers = run_vanilla(
            self._model, self._asks, max_num_seqs=self._concurrency, on_token=on_token
        )
        return self._run("vanilla denoising", time.monotonic() - began, answers)

    def _run(self, name: str, total_s: float, answers: Sequence[LocalAnswer]) -> Run:
        samples = [
            Sample(len(one.token_ids), one.forward_passes, one.first_block_s, one.total_s)
            for one in answers
        ]
        return Run(name, total_s, samples, failed=self._too_long)
