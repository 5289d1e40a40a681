"""Trains the bundled model: `python -m effuse.training.train --out DIR`.

Resumable: a run stopped after `--minutes` and continued with `--resume` ends with the parameters of
a run that was never stopped. Batches come from worker processes, a pure function of (seed, step).
Writes `DIR/checkpoint` on the way and the released files (bf16) at every checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from effuse.training.data import NO_LABEL, BatchShape, Rows, SourceOptions, batches
from effuse.training.denoiser import TILE, Denoiser, DenoiserConfig, Mask, Visibility
from effuse.training.optimizer import Optimizer, Rates
from effuse.training.release import adopt, padded_vocabulary, write_release
from effuse.training.tokenizer import build_tokenizer

EMA_DECAY = 0.998
GRADIENT_NORM = 1.0
REPORT_STEPS = 100
SAVE_SECONDS = 120.0
LONGEST_DOCUMENT = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run, which determine the final parameters."""

    seed: int = 0
    steps: int = 21_000
    warmup: int = 200
    cooldown: float = 0.5
    shape: BatchShape = field(default_factory=BatchShape)
    rates: Rates = field(default_factory=Rates)

    def scale(self, step: int) -> float:
        """Learning-rate factor of a step: linear warm-up, flat, linear to zero."""
        rising = (step + 1) / max(1, self.warmup)
        falling = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return max(0.0, min(1.0, rising, falling))


class Trainer:
    """Parameters, their moving average, the optimiser and the count of steps done."""

    def __init__(self, config: DenoiserConfig, plan: Plan, device: torch.device) -> None:
        """Fresh parameters drawn from the plan's seed."""
        torch.manual_seed(plan.seed)
        self.model = Denoiser(config).to(device)
        self.config = config
        self.plan = plan
        self.device = device
        self.step = 0
        self._parameters = dict(self.model.named_parameters())
        self.average = {name: value.data.clone() for name, value in self._parameters.items()}
        self._optimizer = Optimizer(self._parameters, plan.rates)
        self._loss = _loss_function(self.model, device)

    def learn(self, rows: Rows) -> Tensor:
        """One step on one batch; returns the mean cross-entropy of the masked tokens (scalar
        tensor).
        """
        loss = self._loss(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = list(self._parameters.values())
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM, foreach=True)
        scale = self.plan.scale(self.step)
        self.step += 1
        self._optimizer.step(self.step, scale)
        self.model.zero_grad(set_to_none=True)
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        average = list(self.average.values())
        torch._foreach_lerp_(average, [value.data for value in parameters], 1 - decay)
        return loss.detach()

    def adopt(self, folder: Path, tokenizer: Path) -> None:
        """Begin from the weights of a released folder instead of random ones."""
        adopt(folder, self.model, tokenizer)
        for name, value in self._parameters.items():
            self.average[name].copy_(value.data)

    def save(self, folder: Path) -> None:
        """Write the whole state beside `folder`, then put it in its place."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for kind, tensors in self._state().items():
            whole = {name: value.contiguous() for name, value in tensors.items()}
            save_file(whole, partial / f"{kind}.safetensors")
        state = {"step": self.step, "plan": asdict(self.plan)}
        (partial / "state.json").write_text(json.dumps(state))
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)

    def load(self, folder: Path) -> None:
        """Continue from `save`; ValueError names the differences from this run's plan."""
        state = json.loads((folder / "state.json").read_text())
        for name, value in json.loads(json.dumps(asdict(self.plan))).items():
            if state["plan"][name] != value:
                saved_value = state["plan"][name]
                raise ValueError(f"{folder} was made with {name} {saved_value}, not {value}")
        for kind, tensors in self._state().items():
            saved = load_file(folder / f"{kind}.safetensors", device=str(self.device))
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])
        self.step = state["step"]

    def _state(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: value.data for name, value in self._parameters.items()}
        return {"weights": weights, "average": self.average, "optimizer": self._optimizer.state}


def _loss_function(model: Denoiser, device: torch.device) -> Callable[[Rows], Tensor]:
    """Rows to loss; compiled, in bf16 and with sparse tiles on a GPU."""
    on_gpu = device.type == "cuda"

    def loss(ids: Tensor, labels: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(ids, positions, mask)
        return functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten().long(), ignore_index=NO_LABEL
        )

    compiled = torch.compile(loss) if on_gpu else loss

    def on_rows(rows: Rows) -> Tensor:
        ids, labels, positions, *seen = _to_device(rows, device)
        visibility = Visibility(*seen)
        # Tiles made inside the compiled function gave wrong sums on a GPU (torch 2.11).
        mask = visibility.tiles() if on_gpu else visibility.dense()
        return compiled(ids, labels, positions, mask)

    return on_rows


def _to_device(rows: Rows, device: torch.device) -> list[Tensor]:
    """Int32 [rows, length] for each field."""
    fields = torch.from_numpy(np.stack(rows))
    if device.type == "cuda":
        fields = fields.pin_memory()
    return [field.int() for field in fields.to(device, non_blocking=True)]


def train(trainer: Trainer, out: Path, tokenizer: Path, minutes: float, workers: int) -> bool:
    """Train until the plan or the time is used up; returns True if the plan is finished."""
    started = saved = time.monotonic()
    plan = trainer.plan
    losses: list[Tensor] = []
    options = SourceOptions(tokenizer, plan.seed, plan.shape)
    with closing(batches(options, trainer.step, plan.steps, workers)) as stream:
        for rows in stream:
            losses.append(trainer.learn(rows))
            if trainer.step % REPORT_STEPS == 0:
                loss = torch.stack(losses).mean().item()
                losses.clear()
                _report(trainer, loss, started)
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(trainer, out, tokenizer)
                saved = time.monotonic()
            if time.monotonic() - started > minutes * 60:
                break
    _save(trainer, out, tokenizer)
    return trainer.step >= plan.steps


def _save(trainer: Trainer, out: Path, tokenizer: Path) -> None:
    trainer.save(out / "checkpoint")
    write_release(out, trainer.average, trainer.config, tokenizer)


def _report(trainer: Trainer, loss: float, started: float) -> None:
    plan = trainer.plan
    elapsed = time.monotonic() - started
    print(
        f"step {trainer.step}/{plan.steps}  loss {loss:.4f}  rate x{plan.scale(trainer.step):.2f}"
        f"  {elapsed:.0f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parse(arguments)
    torch.set_float32_matmul_precision("high")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = out / "tokenizer.json"
    if not tokenizer.exists():
        build_tokenizer().save(str(tokenizer))
    plan = Plan(
        seed=options.seed, steps=options.steps, shape=BatchShape(options.rows, options.length)
    )
    config = DenoiserConfig(vocab_size=padded_vocabulary(tokenizer))
    trainer = Trainer(config, plan, torch.device(options.device))
    if options.resume:
        try:
            trainer.load(out / "checkpoint")
        except ValueError as error:
            raise SystemExit(f"--resume: {error}") from error
    elif options.start is not None:
        trainer.adopt(options.start, tokenizer)
    finished = train(trainer, out, tokenizer, options.minutes, options.workers)
    print(f"{'finished' if finished else 'stopped'} at step {trainer.step}: {out}", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m effuse.training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and release")
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint")
    parser.add_argument("--start", type=Path, help="start from the weights of a released folder")
    parser.add_argument("--minutes", type=_positive, default=60.0, help="stop after this long")
    parser.add_argument(
        "--steps", type=_count, default=Plan().steps, help="steps of the whole plan"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="0 or more")
    parser.add_argument("--rows", type=_count, default=64, help="rows per batch")
    parser.add_argument("--length", type=_length, default=2048, help="tokens per row")
    parser.add_argument("--workers", type=_count, default=14, help="processes that make batches")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device")
    state = options.out / "checkpoint" / "state.json"
    if options.resume and not state.exists():
        parser.error(f"--resume: {state} does not exist")
    if options.start is not None and not (options.start / "model.safetensors").exists():
        parser.error(f"--start: {options.start}/model.safetensors does not exist")
    if not options.resume and state.exists():
        parser.error(f"{state} exists: add --resume to continue, or choose another --out")
    return options


def _number(text: str, accepted: str, low: float, whole: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= low and (value.is_integer() or not whole)):
        raise argparse.ArgumentTypeError(f"expected {accepted}, got {text!r}")
    return value


def _positive(text: str) -> float:
    return _number(text, "minutes of at least 0.1", 0.1, whole=False)


def _count(text: str) -> int:
    return int(_number(text, "a whole number of at least 1", 1, whole=True))


def _seed(text: str) -> int:
    return int(_number(text, "a whole number of at least 0", 0, whole=True))


def _length(text: str) -> int:
    value = _count(text)
    if value % TILE or value < LONGEST_DOCUMENT:
        raise argparse.ArgumentTypeError(
            f"expected a multiple of {TILE} of at least {LONGEST_DOCUMENT}, got {text!r}"
        )
    return value


if __name__ == "__main__":
    raise SystemExit(main())
