"""The two baselines of `effuse bench --baseline`, in this process, on the fleet's prompts.

Single-process D2F is the same engine without fleet, wire and handoff; vanilla denoising is one
token a forward without a cache. Loads weights, so it is imported only when asked for.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from effuse.cli.figures import Run, Sample
from effuse.cli.vanilla import Ask, run_vanilla
from effuse.client.params import Params
from effuse.config.decoding import DEFAULT_MAX_TOKENS
from effuse.models.weights import DTYPES, load_model
from effuse.offline.llm import LLM
from effuse.worker.config import DecodeConfig, Dtype


class Baseline:
    """A loaded model and the requests to answer with it."""

    def __init__(
        self,
        directory: Path,
        adapter: Path | None,
        prompts: Sequence[tuple[int, ...]],
        params: Params,
        *,
        concurrency: int,
    ) -> None:
        """params: of these max_tokens, window and confidence_threshold are heeded. Raises
        CheckpointError and TokenizerError."""
        most = params.max_tokens or DEFAULT_MAX_TOKENS
        self._directory, self._adapter, self._concurrency = directory, adapter, concurrency
        self._on_gpu = torch.cuda.is_available()
        self._dtype: Dtype = "bfloat16" if self._on_gpu else "float32"
        self._llm = LLM(
            directory,
            adapter=adapter,
            device="cuda" if self._on_gpu else "cpu",
            dtype=self._dtype,
            max_num_seqs=concurrency,
            # No more than is needed: the fleet may be on the same GPU.
            num_pages=concurrency * _pages_of(max(map(len, prompts)) + most),
        )
        rooms = [self._llm.model.max_model_len - len(prompt) for prompt in prompts]
        self._asks = [
            Ask(prompt_token_ids=prompt, max_tokens=min(most, room))
            for prompt, room in zip(prompts, rooms, strict=True)
            if room > 0
        ]
        # Greedy, whatever the model's defaults are.
        self._params = replace(
            params, model=None, algorithm="d2f", temperature=0.0, top_p=1.0, top_k=0
        )
        self._too_long = len(prompts) - len(self._asks)  # a fleet refuses them

    def size(self) -> tuple[int, int]:
        """Requests, and tokens that vanilla denoising writes for them."""
        return len(self._asks), sum(ask.max_tokens for ask in self._asks)

    def single_process(self, on_done: Callable[[], None]) -> Run:
        """The same engine, prefilling for itself. It is gone afterwards, and its memory free."""
        prompts = [ask.prompt_token_ids for ask in self._asks]
        params = [replace(self._params, max_tokens=ask.max_tokens) for ask in self._asks]
        began = time.monotonic()
        with self._llm as llm:
            answers = llm.generate(prompts, params, progress=lambda _, __: on_done())
        total_s = time.monotonic() - began
        del self._llm, llm
        samples = [
            Sample(len(one.token_ids), one.stats.forward_passes, one.first_block_s, one.total_s)
            for one in answers
        ]
        return Run("single-process D2F", total_s, samples, failed=self._too_long)

    def vanilla(self, on_token: Callable[[], None]) -> Run:
        """The whole canvas at every step, one token a forward; `on_token` is called for each."""
        device = torch.device("cuda" if self._on_gpu else "cpu")
        model = load_model(
            self._directory, adapter=self._adapter, device=device, dtype=DTYPES[self._dtype]
        )
        began = time.monotonic()
        answers = run_vanilla(model, self._asks, max_num_seqs=self._concurrency, on_token=on_token)
        total_s = time.monotonic() - began
        samples = [
            Sample(len(one.token_ids), one.forward_passes, one.total_s, one.total_s)
            for one in answers
        ]
        return Run("vanilla denoising", total_s, samples, failed=self._too_long)


def _pages_of(num_tokens: int) -> int:
    return -(-num_tokens // DecodeConfig.page_size)
