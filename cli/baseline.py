"""The rows of `effuse bench --baseline` that this process computes, on the fleet's prompts.

`base_model` is the checkpoint without its adapter, by its family's own loop. `single_process` is
the engine of a decode worker, without fleet, wire and handoff. Each row loads its engine and frees
it, so that rows run one after the other. All are greedy and compute with an engine's threads. The
module loads torch, so it is imported only when needed.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from effuse.cli.dataset import fits
from effuse.cli.figures import Sample
from effuse.cli.load import Tally
from effuse.client.answer import Answer
from effuse.client.params import Params
from effuse.config.decoding import Algorithm, DecodeSettings
from effuse.config.flags import CommandError
from effuse.models.config import ModelConfig
from effuse.models.defaults import read_defaults
from effuse.models.preflight import check_checkpoint
from effuse.offline.llm import LLM
from effuse.router.tokenizer import Tokenizer
from effuse.worker.config import DecodeConfig
from effuse.worker.engine_settings import Device, Dtype
from effuse.worker.rank_part import CPU_THREADS

TOO_LONG = "INVALID_ARGUMENT: the prompt does not fit the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """A checked checkpoint, and the prompts for it."""

    directory: Path
    adapter: Path | None
    config: ModelConfig
    prompts: tuple[tuple[int, ...], ...]  # token ids
    params: Params
    concurrency: int

    @property
    def device(self) -> Device:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> Dtype:
        return "bfloat16" if torch.cuda.is_available() else "float32"

    @property
    def num_threads(self) -> int:
        """Threads of each row; more than an engine's would compete with the fleet for cores."""
        return CPU_THREADS if self.device == "cpu" else torch.get_num_threads()

    @property
    def settings(self) -> DecodeSettings:
        """D2F's settings, as requested or by default."""
        known = read_defaults(self.directory, self.config, adapted=self.adapter is not None)
        plain = known.settings_of("d2f", self.config.block_size)
        asked = (
            ("window", self.params.window),
            ("confidence_threshold", self.params.confidence_threshold),
        )
        given = {name: value for name, value in asked if value is not None}
        return msgspec.structs.replace(plain, **given)

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer, if the prompt leaves room for them."""
        default = read_defaults(self.directory, self.config).max_tokens
        return self.params.max_tokens or default

    def begin(self, tally: Tally) -> list[int]:
        """Begins to measure a row whose engine is loaded; returns the indices of its prompts."""
        taken = self.taken()
        tally.begin()
        for _ in range(len(self.prompts) - len(taken)):
            tally.add(TOO_LONG)
        return taken

    def described(self) -> str:
        adapter = "" if self.adapter is None else f" with adapter {self.adapter.name}"
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''} each"
        loop = f"base model: {self.config.family.algorithm}, after {self.config.family.origin}"
        return f"{self.directory.name}{adapter} on {self.device}, {self.dtype}, {threads}; {loop}"

    def taken(self) -> list[int]:
        """Indices of the prompts that fit, by a router's rule."""
        most, asked = self.config.max_position_embeddings, self.params.max_tokens
        return [at for at, ids in enumerate(self.prompts) if fits(len(ids), asked, most)]


def check(
    directory: Path, adapter: Path | None, prompts: Sequence[str], params: Params, concurrency: int
) -> Rivals:
    """Checks a checkpoint by its headers and encodes the prompts. Raises CheckpointError and
    TokenizerError."""
    tokenizer = Tokenizer.load(directory)
    try:
        check_checkpoint(directory, adapter=adapter)
        encoded = asyncio.run(_encode(tokenizer, prompts))
    finally:
        tokenizer.close()
    return Rivals(
        directory=directory,
        adapter=adapter,
        config=ModelConfig.from_dir(directory),
        prompts=encoded,
        params=replace(params, model=None),
        concurrency=concurrency,
    )


def base_model(rivals: Rivals, tally: Tally) -> None:
    """The model without its adapter, greedy, with the defaults of its authors' loop."""
    params = Params(max_tokens=rivals.params.max_tokens, temperature=0.0)
    _answer_and_free(rivals, None, params, rivals.config.family.algorithm, tally)


def single_process(rivals: Rivals, tally: Tally) -> None:
    _answer_and_free(rivals, rivals.adapter, rivals.params, "d2f", tally)


def _answer_and_free(
    rivals: Rivals, adapter: Path | None, params: Params, algorithm: Algorithm, tally: Tally
) -> None:
    """Frees the device's memory for the next row, which may be another process."""
    try:
        _answer(rivals, adapter, params, algorithm, tally)
    finally:
        gc.collect()
        if rivals.device == "cuda":
            torch.cuda.empty_cache()


def _answer(
    rivals: Rivals, adapter: Path | None, params: Params, algorithm: Algorithm, tally: Tally
) -> None:
    """All prompts by an engine of this process. Ctrl-C leaves complete answers in the tally."""
    longest = max((len(rivals.prompts[at]) for at in rivals.taken()), default=1)
    # Only as much as needed, because the fleet may use the same GPU.
    pages_each = -(-(longest + rivals.max_tokens) // DecodeConfig.page_size)
    try:
        llm = LLM(
            rivals.directory,
            adapter=adapter,
            device=rivals.device,
            dtype=rivals.dtype,
            max_num_seqs=rivals.concurrency,
            num_pages=rivals.concurrency * pages_each,
            default_algorithm=algorithm,
        )
    except (ValueError, RuntimeError) as error:  # such as one too large for the device
        raise CommandError(str(error)) from error
    with llm:
        taken = rivals.begin(tally)
        llm.generate(
            [rivals.prompts[at] for at in taken],
            params,
            on_answer=lambda index, answer: tally.add(_sample(taken[index], answer)),
        )


def _sample(at: int, answer: Answer) -> Sample:
    return Sample(
        len(answer.token_ids),
        answer.stats.forward_passes,
        answer.first_block_s,
        answer.total_s,
        prompt=at,
        text=answer.text,
    )


async def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(await tokenizer.encode(prompt)) for prompt in prompts])
