"""Accuracy and tokens per forward of the bundled model, in batches, to judge training.

Recomputes the whole canvas under a dense block-causal mask at every step, in fp32: no cache, no
serving code. Block diffusion is D2F with one block in flight; one token per forward is block
diffusion with a threshold that nothing passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from effuse.problems.problem import Problem, check, problem
from effuse.training.data import BLOCK
from effuse.training.denoiser import Denoiser
from effuse.training.release import read_release
from effuse.training.tokenizer import EOS_ID, MASK_ID, PAD_ID

MAX_NEW_TOKENS = 176
ADD_THRESHOLD, FULL_THRESHOLD = 0.1, 0.95


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table: most blocks in flight, and the confidence threshold."""

    name: str
    window: int
    threshold: float


SETTINGS = (
    Setting("one token per forward", 1, 1.0),
    Setting("block diffusion 0.9", 1, 0.9),
    Setting("D2F 0.9 window 2", 2, 0.9),
    Setting("D2F 0.9 window 4", 4, 0.9),
    Setting("D2F 0.8 window 4", 4, 0.8),
)


@dataclass(frozen=True, slots=True)
class Solution:
    """Results of one problem: the text, its tokens before EOS, forward passes, verdicts."""

    text: str
    tokens: int
    forwards: int
    exact: bool
    final: bool


class PromptBatch:
    """Prompts and their generation blocks side by side; blocks are absolute multiples of 16.

    `ids` [problems, tokens]; `born` (masks at birth) and `full` (activation) [problems, blocks].
    """

    def __init__(self, prompts: list[list[int]], device: torch.device) -> None:
        """Lay the prompts out; no generation block exists yet."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        blocks = (int(lengths.max()) + MAX_NEW_TOKENS) // BLOCK + 1
        self.ids = torch.full((len(prompts), blocks * BLOCK), PAD_ID, device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        token = torch.arange(blocks * BLOCK, device=device)
        self.lengths = lengths
        self.editable = token >= lengths[:, None]
        self.first = lengths // BLOCK
        self.last = (lengths + MAX_NEW_TOKENS - 1) // BLOCK
        self.newest = self.first - 1
        self.masked = torch.zeros_like(self.editable)
        self.born = _by_block(self.editable).sum(-1)
        self.full = torch.zeros_like(self.born, dtype=torch.bool)
        self.index = torch.arange(blocks, device=device).expand(len(prompts), -1)
        self.visible = (token // BLOCK)[:, None] >= (token // BLOCK)[None, :]

    def left(self) -> Tensor:
        """Masks left per block."""
        return _by_block(self.masked).sum(-1)

    def settled(self) -> Tensor:
        """Blocks that exist, have no mask and no predecessor with one."""
        open_before = self.left().cumsum(1) > 0
        return ~open_before & (self.index <= self.newest[:, None])

    def has_eos(self) -> Tensor:
        """Blocks in which an EOS has been written."""
        return _by_block((self.ids == EOS_ID) & self.editable).any(-1)

    def append(self, window: int) -> None:
        """Add one block of masks if enough of the newest is written, up to `window` in flight."""
        left = self.left()
        exists = self.index <= self.newest[:, None]
        in_flight = (exists & ~self.settled() & (self.index >= self.first[:, None])).sum(1)
        progress = 1 - left / self.born.clamp(min=1)
        newest = progress.gather(1, self.newest.clamp(min=0)[:, None])[:, 0]
        ready = (self.newest < self.first) | (newest >= ADD_THRESHOLD)
        eos = (self.has_eos() & exists).any(1)
        grow = ready & ~eos & (in_flight < window) & (self.newest < self.last)
        self.newest = self.newest + grow.long()
        fresh = grow[:, None] & (self.index == self.newest[:, None])
        masks = fresh.repeat_interleave(BLOCK, 1) & self.editable
        self.masked |= masks
        self.ids[masks] = MASK_ID
        done = torch.ones_like(progress[:, :1])
        before = torch.cat((done, torch.where(exists, progress, 0.0)[:, :-1]), 1)
        first = self.index == self.first[:, None]
        self.full |= (before >= FULL_THRESHOLD) | first

    def write(self, logits: Tensor, threshold: float) -> None:
        """Write confident tokens; a full block without any writes its best one."""
        logits = logits.float()
        logits[..., MASK_ID] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        confidence = confidence.masked_fill(~self.masked, -1.0)
        chosen = confidence > threshold
        blocks = _by_block(confidence)
        stuck = ~_by_block(chosen).any(-1) & self.full & (self.left() > 0)
        best = torch.zeros_like(blocks, dtype=torch.bool)
        best.scatter_(2, blocks.argmax(-1, keepdim=True), stuck[..., None])
        chosen |= best.flatten(1)
        self.ids = torch.where(chosen, token, self.ids)
        self.masked &= ~chosen

    def finished(self) -> Tensor:
        """Bool [problems]: all blocks up to the first EOS, or all blocks, are settled."""
        settled = self.settled()
        ended = (settled & self.has_eos()).any(1)
        return ended | (settled & (self.index == self.last[:, None])).any(1)


def _by_block(x: Tensor) -> Tensor:
    """[problems, tokens] as [problems, blocks, 16]."""
    return x.view(len(x), -1, BLOCK)


@torch.no_grad()
def decode(
    model: Denoiser, prompts: list[list[int]], setting: Setting, device: torch.device
) -> tuple[list[list[int]], list[int]]:
    """Generated ids (cut before EOS) and forward passes of every prompt."""
    canvas = PromptBatch(prompts, device)
    forwards = torch.zeros(len(prompts), dtype=torch.long, device=device)
    positions = torch.arange(canvas.ids.shape[1], device=device).expand_as(canvas.ids)
    running = ~canvas.finished()
    while bool(running.any()):
        canvas.append(setting.window)
        end = (int(canvas.newest.max()) + 1) * BLOCK
        mask = canvas.visible[None, :end, :end]
        logits = model(canvas.ids[:, :end], positions[:, :end], mask)
        wide = logits.new_zeros(*canvas.ids.shape, logits.shape[-1])
        wide[:, :end] = logits
        canvas.write(wide, setting.threshold)
        forwards += running
        running = ~canvas.finished()
    texts = []
    for ids, length in zip(canvas.ids.tolist(), canvas.lengths.tolist(), strict=True):
        new = ids[length:]
        texts.append(new[: new.index(EOS_ID)] if EOS_ID in new else new[:MAX_NEW_TOKENS])
    return texts, forwards.tolist()


def evaluate(
    model: Denoiser,
    tokenizer: Tokenizer,
    problems: list[Problem],
    setting: Setting,
    device: torch.device,
    group: int = 500,
) -> list[Solution]:
    """Decode and check every problem, `group` at a time."""
    outcomes = []
    for at in range(0, len(problems), group):
        chunk = problems[at : at + group]
        prompts = [tokenizer.encode(each.prompt).ids for each in chunk]
        generated, forwards = decode(model, prompts, setting, device)
        for each, ids, count in zip(chunk, generated, forwards, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            verdict = check(each, text)
            outcomes.append(Solution(text, len(ids), count, verdict.exact, verdict.final))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for a released folder."""
    parser = argparse.ArgumentParser(prog="python -m effuse.training.evaluate")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--wrong", type=int, default=0, help="wrong answers to print for each setting"
    )
    options = parser.parse_args(arguments)
    if options.count < 1 or options.seed < 0 or options.wrong < 0:
        parser.error("--count must be at least 1, --seed and --wrong at least 0")
    if not (options.model / "model.safetensors").exists():
        parser.error(f"--model: {options.model}/model.safetensors does not exist")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = read_release(options.model, device)
    problems = [problem(options.seed, index, "held_out") for index in range(options.count)]
    for setting in SETTINGS:
        outcomes = evaluate(model, tokenizer, problems, setting, device)
        _print_row(setting, outcomes)
        _print_kinds(problems, outcomes)
        wrong = [pair for pair in zip(problems, outcomes, strict=True) if not pair[1].exact]
        for each, outcome in wrong[: options.wrong]:
            print(f"    {each.prompt!r}\n    {each.answer!r}\n    {outcome.text!r}")
    return 0


def _print_row(setting: Setting, outcomes: list[Solution]) -> None:
    count = len(outcomes)
    exact = sum(outcome.exact for outcome in outcomes)
    final = sum(outcome.final for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    rate = tokens / sum(outcome.forwards for outcome in outcomes)
    print(
        f"{setting.name:24} exact {exact / count:7.2%} ({exact}/{count})"
        f"  final {final / count:7.2%}  tokens per forward {rate:.2f}",
        flush=True,
    )


def _print_kinds(problems: list[Problem], outcomes: list[Solution]) -> None:
    kinds: dict[str, list[bool]] = {}
    for each, outcome in zip(problems, outcomes, strict=True):
        kind = each.kind if each.kind != "list" else each.phrasing.split("/")[0]
        kinds.setdefault(kind, []).append(outcome.exact)
    print(
        "    " + "  ".join(f"{kind} {sum(ok)}/{len(ok)}" for kind, ok in sorted(kinds.items())),
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
