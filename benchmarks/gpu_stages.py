"""`python -m effuse.benchmarks.gpu_stages`: tokens a second of pipelines against one GPU.

Each case is an `effuse.LLM` in a process of its own, over a checkpoint of random weights in a
published shape. N stages with N times the requests of one GPU should give N times its tokens. Each
case is measured with graphs and without any. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import effuse
from effuse.benchmarks.gpu_models import MODELS
from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.random_checkpoint import word, write_checkpoint

MODULE = "effuse.benchmarks.gpu_stages"
CASES = ((1, 8), (1, 16), (1, 32), (2, 16), (4, 32))
WARMED_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesResult:
    """One batch of answers."""

    stages: int
    requests: int
    has_graphs: bool
    tokens: int
    seconds: float
    steps: int  # forwards

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measure(path: Path, asked: argparse.Namespace) -> StagesResult:
    """The second batch of answers; the first one compiles and warms up."""
    on_cuda = torch.cuda.is_available()
    prompts = [
        " ".join(word(100 + (31 * at + place) % 100) for place in range(asked.prompt))
        for at in range(asked.requests)
    ]
    with effuse.LLM(
        path,
        device="cuda" if on_cuda else "cpu",
        dtype="bfloat16" if on_cuda else "float32",
        pipeline_parallel_size=asked.stages,
        enforce_eager=asked.eager,
        max_num_seqs=asked.requests,
        max_model_len=asked.prompt + asked.tokens + 64,
        enable_prefix_caching=False,
    ) as llm:
        for tokens in (WARMED_TOKENS, asked.tokens):
            params = effuse.Params(max_tokens=tokens, ignore_eos=True)
            before, began = llm._core.load().steps, time.perf_counter()
            answers = llm.generate(prompts, params)
            seconds = time.perf_counter() - began
        return StagesResult(
            stages=asked.stages,
            requests=asked.requests,
            has_graphs=on_cuda and not asked.eager,
            tokens=sum(len(answer.token_ids) for answer in answers),
            seconds=seconds,
            steps=llm._core.load().steps - before,
        )


def table(results: Sequence[StagesResult]) -> str:
    """A line for each case, with its tokens a second over those of one GPU times the stages: of one
    GPU with the requests of a stage, and with all of them."""
    alone = {(one.requests, one.has_graphs): one for one in results if one.stages == 1}
    head = "stages requests graphs    tok/s  steps  of N x one GPU: same share, same total"
    lines = [head]
    for one in results:
        shares = []
        for requests in (one.requests // one.stages, one.requests):
            for has_graphs in (False, True):
                found = alone.get((requests, has_graphs))
                ratio = one.tokens_per_s / (one.stages * found.tokens_per_s) if found else None
                shares.append("   -" if ratio is None else f"{ratio:4.2f}")
        graphs = "yes" if one.has_graphs else "no"
        figures = (
            f"{one.stages:6} {one.requests:8} {graphs:>6} {one.tokens_per_s:8.0f} {one.steps:6}"
        )
        lines.append(f"{figures}   {shares[0]} {shares[1]}   {shares[2]} {shares[3]}")
    return "\n".join(lines)


def run_case(argv: Sequence[str], seconds: float) -> StagesResult | None:
    """One case in a process of its own; None if it fails or takes longer."""
    words = (sys.executable, "-P", "-m", MODULE, *argv)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=seconds, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"no result: {error}", file=sys.stderr)
        return None
    return StagesResult(**json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for; the exit status is 1 if a case is missing."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--model", choices=sorted(MODELS), default="dream-7b")
    parser.add_argument("--case", type=_case, action="append", metavar="STAGESxREQUESTS")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=500, help="for each case")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_stages.json"))
    for name, kind in (("path", Path), ("stages", int), ("requests", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.path is not None:
        print(json.dumps(asdict(measure(asked.path, asked))))
        return 0
    on_cuda, cases, results = torch.cuda.is_available(), asked.case or CASES, []
    forms = [(*case, eager) for case in cases for eager in ((False, True) if on_cuda else (False,))]
    with tempfile.TemporaryDirectory(prefix="effuse-stages-") as home:
        device = torch.device("cuda" if on_cuda else "cpu")
        dtype = torch.bfloat16 if on_cuda else torch.float32
        path = write_checkpoint(Path(home) / "model", MODELS[asked.model], device, dtype)
        torch.cuda.empty_cache()
        for stages, requests, eager in forms:
            words = ["--path", path, "--stages", stages, "--requests", requests]
            words += ["--prompt", asked.prompt, "--tokens", asked.tokens, *["--eager"] * eager]
            found = run_case([str(one) for one in words], asked.seconds)
            results += [] if found is None else [found]
            write_record(asked.json, [asdict(each) for each in results], [])
    print(table(results))
    return int(len(results) < len(forms))


def _case(text: str) -> tuple[int, int]:
    stages, _, requests = text.partition("x")
    return int(stages), int(requests)


if __name__ == "__main__":
    sys.exit(main())
