"""Training batches for the bundled model: problems, tokenised, noised and packed into rows.

Pure numpy and a pure function of (seed, step), so worker processes need no torch, and a resumed run
sees the same batches as an uninterrupted one.

A problem becomes one *document*: a clean copy of prompt and answer, then two noisy copies of the
blocks that hold the answer. Blocks of a noisy copy come in groups of one or more: a block sees the
clean blocks before its group and the noisy ones of its group up to itself. Groups of one train
block diffusion, longer groups with rising noise train pipelined decoding (D2F, arXiv 2508.09192).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from effuse.problems.problem import problem
from effuse.training.tokenizer import EOS_ID, MASK_ID, PAD_ID, load_tokenizer

BLOCK = 16
LONGEST_GROUP = 4
NO_LABEL = -1
QUEUE_SECONDS = 120.0
_INDEX_STRIDE = 1 << 20

Ints = NDArray[np.int16]
Flags = NDArray[np.bool_]


class Rows(NamedTuple):
    """One batch; every field is int16 [rows, length].

    `labels` is NO_LABEL for tokens without a loss. `document`, `copy` (0 is the clean one), `block`
    and `start` define which tokens see which; `start` is the first block of the group, or for clean
    tokens one past their own block.
    """

    ids: Ints
    labels: Ints
    positions: Ints
    document: Ints
    copy: Ints
    block: Ints
    start: Ints


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Rows per batch and tokens per row (a multiple of the block size)."""

    rows: int = 64
    length: int = 2048


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Settings of a `Source`."""

    tokenizer: Path
    seed: int
    shape: BatchShape


class Noise(NamedTuple):
    """Masked positions and the group start (block index) of every position of a noisy copy."""

    masked: Flags
    start: Ints


class Source:
    """Makes batches; one per worker process."""

    def __init__(self, options: SourceOptions) -> None:
        """Read the tokenizer file; the seed names the stream of problems and noise."""
        self._tokenizer: Tokenizer = load_tokenizer(options.tokenizer)
        self._digits = np.zeros(self._tokenizer.get_vocab_size(), dtype=np.bool_)
        for digit in "0123456789":
            self._digits[self._tokenizer.token_to_id(digit)] = True
        self._seed = options.seed
        self._shape = options.shape

    def batch(self, step: int) -> Rows:
        """The batch of training step `step`: as many whole documents as its rows hold."""
        rng = np.random.default_rng((self._seed, step))
        room = self._shape.rows * self._shape.length
        documents: list[Rows] = []
        for index in range(step * _INDEX_STRIDE, (step + 1) * _INDEX_STRIDE):
            documents.append(self.document(index, rng))
            room -= len(documents[-1].ids)
            if room < 0:
                break
        return pack(documents, self._shape)

    def document(self, index: int, rng: np.random.Generator) -> Rows:
        """Problem `index` as one document; fields are int16 [tokens]."""
        drawn = problem(self._seed, index)
        prompt = self._tokenizer.encode(drawn.prompt).ids
        answer = self._tokenizer.encode(drawn.answer, add_special_tokens=False).ids
        blocks = (len(prompt) + len(answer)) // BLOCK + 1 + int(rng.random() < 0.25)
        clean = np.full(blocks * BLOCK, EOS_ID, dtype=np.int16)
        clean[: len(prompt) + len(answer)] = prompt + answer
        return _document(clean, len(prompt), self._digits[clean], rng)


def _document(clean: Ints, prompt: int, digits: Flags, rng: np.random.Generator) -> Rows:
    first = prompt // BLOCK
    positions = np.arange(len(clean), dtype=np.int16)
    block = (positions // BLOCK).astype(np.int16)
    tail = slice(first * BLOCK, None)
    editable = positions[tail] >= prompt
    noises = [
        draw_noise(block[tail], editable, digits[tail], 1, rng),
        draw_noise(block[tail], editable, digits[tail], LONGEST_GROUP, rng),
    ]
    noisy = [np.where(noise.masked, np.int16(MASK_ID), clean[tail]) for noise in noises]
    labels = [np.where(noise.masked, clean[tail], np.int16(NO_LABEL)) for noise in noises]
    tokens = len(editable)
    copies = np.repeat(np.arange(3), (len(clean), tokens, tokens))
    return Rows(
        ids=np.concatenate((clean, *noisy)),
        labels=np.concatenate((np.full_like(clean, NO_LABEL), *labels)),
        positions=np.concatenate((positions, positions[tail], positions[tail])),
        document=np.zeros(len(copies), dtype=np.int16),
        copy=copies.astype(np.int16),
        block=np.concatenate((block, block[tail], block[tail])),
        start=np.concatenate((block + np.int16(1), *(noise.start for noise in noises))),
    )


def draw_noise(
    block: Ints, editable: Flags, digits: Flags, longest: int, rng: np.random.Generator
) -> Noise:
    """Cut the blocks into groups of up to `longest` and mask more and more within each group."""
    first, last = int(block[0]), int(block[-1])
    masked = np.zeros(len(block), dtype=np.bool_)
    starts = np.zeros(len(block), dtype=np.int16)
    at = first
    while at <= last:
        size = min(1 if longest == 1 else int(rng.integers(2, longest + 1)), last + 1 - at)
        levels = np.sort(rng.random(size))
        if rng.random() < 0.25:
            levels[-1] = 1.0
        for offset, level in enumerate(levels):
            here = slice((at + offset - first) * BLOCK, (at + offset - first + 1) * BLOCK)
            masked[here] = _mask_block(editable[here], digits[here], float(level), rng)
            starts[here] = at
        at += size
    return Noise(masked, starts)


def _mask_block(editable: Flags, digits: Flags, level: float, rng: np.random.Generator) -> Flags:
    """Mask about `level` of the editable positions: anywhere, from the right, or digits first.

    The last two resemble what confident decoding leaves masked.
    """
    style = rng.random()
    draws = rng.random(len(editable))
    if style < 0.5:
        hidden: Flags = draws < level
    elif style < 0.75:
        keep = round((1.0 - level) * int(editable.sum()))
        hidden = np.cumsum(editable) > keep
    else:
        hidden = draws < np.where(digits, level**0.5, level**2)
    return hidden & editable


def pack(documents: list[Rows], shape: BatchShape) -> Rows:
    """Put documents into rows, longest first, each into the fullest row that still has room."""
    free = np.full(shape.rows, shape.length)
    count = np.zeros(shape.rows, dtype=np.int16)
    rows = _empty_rows(shape)
    for document in sorted(documents, key=lambda each: -len(each.ids)):
        size = len(document.ids)
        fits = np.where(free >= size, free, shape.length + 1)
        row = int(np.argmin(fits))
        if fits[row] > shape.length:
            continue
        here = slice(shape.length - int(free[row]), shape.length - int(free[row]) + size)
        for field, values in zip(rows, document, strict=True):
            field[row, here] = values
        rows.document[row, here] = count[row]
        free[row] -= size
        count[row] += 1
    return rows


def _empty_rows(shape: BatchShape) -> Rows:
    """Rows of padding: a separate document (-1) in which every token sees every other."""

    def full(value: int) -> Ints:
        return np.full((shape.rows, shape.length), value, dtype=np.int16)

    return Rows(full(PAD_ID), full(NO_LABEL), full(0), full(-1), full(0), full(0), full(1))


def batches(
    options: SourceOptions, first: int, last: int, workers: int
) -> Generator[Rows, None, None]:
    """Batches of the steps first to last - 1, in order, made ahead by worker processes.

    Worker w makes every `workers`-th batch and waits once two of them are not yet taken.
    """
    context = get_context("spawn")
    queues: list[Queue[Rows]] = [context.Queue(maxsize=2) for _ in range(workers)]
    processes = [
        context.Process(
            target=_produce, args=(options, range(first + w, last, workers), queue), daemon=True
        )
        for w, queue in enumerate(queues)
    ]
    for process in processes:
        process.start()
    try:
        for step in range(first, last):
            yield queues[(step - first) % workers].get(timeout=QUEUE_SECONDS)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(QUEUE_SECONDS)


def _produce(options: SourceOptions, steps: range, queue: Queue[Rows]) -> None:
    source = Source(options)
    for step in steps:
        queue.put(source.batch(step))
