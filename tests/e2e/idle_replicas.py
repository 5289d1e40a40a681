"""Two replicas with common experts: without load, with load on one, then with load on both.

LLaDA2.0-mini's shape with random weights, in float32 so that answers do not depend on a batch.
Prints how busy each GPU was, and how many answers equal those of one GPU.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.idle_replicas HOME
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import torch
from models.test_load_memory import published
from safetensors.torch import save_file

import effuse
from effuse.benchmarks.random_checkpoint import random_tensors, word_tokenizer
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.models.config import ModelConfig
from effuse.worker.gpus import gpus_here

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
FLAGS = {"dtype": "float32", "max_model_len": 512, "num_pages": 1024, "max_num_seqs": 16}
PARAMS = effuse.Params(max_tokens=64, ignore_eos=True)
PROMPT_TOKENS = 96


def write(path: Path, layers: int, *, tiny: bool) -> Path:
    """A checkpoint of the shape, with so many of its layers."""
    path.mkdir(parents=True)
    changes = {"num_hidden_layers": layers, **(TINY if tiny else {})}
    (path / "config.json").write_text(json.dumps(published("LLaDA2.0-mini", **changes)))
    config = ModelConfig.from_dir(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = random_tensors(config, device, torch.bfloat16)
    save_file({name: one.cpu() for name, one in tensors}, path / "model.safetensors")
    word_tokenizer(config).save(str(path / "tokenizer.json"))
    return path


def prompts(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(10, 5000, (count, PROMPT_TOKENS), generator=draw).tolist()


def reference(path: Path, device: str, count: int) -> None:
    """Prints the tokens of one GPU."""
    with effuse.LLM(path, device=device, **FLAGS) as llm:  # type: ignore[arg-type]
        found = [list(one.token_ids) for one in llm.generate(prompts(count), PARAMS)]
    print(json.dumps(found))


class Busy:
    """The share of time in which each GPU of these ran a kernel, sampled by the driver."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus

    def during(self, seconds: float) -> list[float]:
        """Per cent of each GPU in the next seconds."""
        found: list[list[float]] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._gpus:
                found.append(self._sample())
            time.sleep(0.25)
        return [mean(one) for one in zip(*found, strict=True)]

    def _sample(self) -> list[float]:
        query = "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"
        command = ["nvidia-smi", "-i", ",".join(self._gpus), *query]
        return [float(line) for line in subprocess.check_output(command, text=True).split()]


def flags(device: str) -> tuple[str, ...]:
    """A worker's flags with the same meaning."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in FLAGS.items()]
    return ("--device", device, *(word for pair in pairs for word in pair))


def serve(asked: argparse.Namespace, path: Path, expected: list[list[int]]) -> bool:
    """Serves with two replicas; whether all answers are right."""
    gpus = tuple(gpus_here())[:2]
    config = FleetConfig(
        prefill=0,
        decode=1,
        connector="zmq",
        model=path,
        worker_flags=flags(asked.device),
        decode_flags=("--data-parallel-size", "2"),
        gpus=gpus or None,
        log_dir=asked.home / "logs",
    )
    busy = Busy(gpus)
    num_equal = 0
    with Fleet(config) as fleet, effuse.Client(fleet.address, timeout_s=120) as client:

        def answer(prompt: list[int]) -> list[int]:
            return list(client.generate(prompt, PARAMS).token_ids)

        print(f"without load: GPUs busy {busy.during(asked.idle_s)} %", flush=True)
        with ThreadPoolExecutor(len(expected)) as pool:
            watched = pool.submit(busy.during, asked.one_s)
            began, count = time.monotonic(), 0
            while not watched.done():
                num_equal += answer(prompts(1)[0]) == expected[0]
                count += 1
            took = (time.monotonic() - began) / count
            print(f"one request at a time ({took:.2f} s each): busy {watched.result()} %")
            print(f"  {num_equal} of {count} equal", flush=True)
            began, watched = time.monotonic(), pool.submit(busy.during, 1.5)
            found = list(pool.map(answer, prompts(len(expected))))
            took = time.monotonic() - began
            equal = sum(map(list.__eq__, found, expected))
            print(f"{len(found)} at the same time in {took:.1f} s: busy {watched.result()} %")
            print(f"  {equal} of {len(found)} equal", flush=True)
    return num_equal == count and equal == len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--one-s", type=float, default=5.0)
    parser.add_argument("--tiny", action="store_true", help="a small shape, for trying it")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.reference is not None:
        reference(asked.reference, asked.device, asked.requests)
        return 0
    path = write(asked.home / "model", asked.layers, tiny=asked.tiny)
    command = [sys.executable, "-P", "-m", "e2e.idle_replicas", *sys.argv[1:]]
    told = subprocess.check_output([*command, "--reference", str(path)], text=True)
    expected: list[list[int]] = json.loads(told.splitlines()[-1])
    return int(not serve(asked, path, expected))


if __name__ == "__main__":
    sys.exit(main())
