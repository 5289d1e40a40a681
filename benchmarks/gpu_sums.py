"""`python -m effuse.benchmarks.gpu_sums`: sums over ranks, each with the residual and the norm.

Of bf16 rows as wide as Dream-7B's, on groups of GPUs: NCCL's all-reduce, torch's symmetric memory
(its one-shot and two-shot sums, of rows that already lie there), each followed by the fused
add-and-norm; and our own kernel in both of its ways. Rivals take turns, as CUDA graphs of many
calls that begin at the same time on all ranks. The limit is the bytes that a rank must send, over
the rate at which every GPU copies from the next one at the same time. Ranks are processes that end
by themselves.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from effuse.benchmarks.gpu_record import write_record
from effuse.benchmarks.gpu_timing import Call, Stamp
from effuse.kernels import peers_triton
from effuse.kernels.peers import buffer_bytes, map_peers
from effuse.kernels.rowwise import rms_norm_residual
from effuse.models.group import ProcessGroup, join_group

MODULE = "effuse.benchmarks.gpu_sums"
WIDTH, DTYPE, EPS = 3584, torch.bfloat16, 1e-6
ROWS = (32, 132, 512, 1056, 4246)
DEGREES = (2, 4)
AIM_ROWS, AIM = 132, 0.6  # ours over NCCL's sum and the norm
KINDS = ("one-shot", "two-shot", "two-shot ahead")
CALLS, REPEATS = 16, 11  # of a graph; of graphs
DEADLINE_S = 60.0
_AHEAD = 400_000  # cycles that a device sleeps while its host queues a graph


@dataclass(frozen=True, slots=True)
class Result:
    """Microseconds of each way to sum `rows` rows; None if it does not run here."""

    degree: int
    rows: int
    limit_us: float
    us: dict[str, float | None]

    @property
    def ours(self) -> float | None:
        """The faster of our two ways."""
        found = [us for name, us in self.us.items() if name.startswith("ours") and us is not None]
        return min(found, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over NCCL's sum followed by the norm."""
        ours, nccl = self.ours, self.us["nccl"]
        return None if ours is None or nccl is None else ours / nccl


class Rank:
    """One rank's rivals, and their times."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        torch.cuda.set_device(rank)
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank)
        self.group: ProcessGroup = join_group(rank, size, self.device, meeting, DEADLINE_S)
        args = rank, size, WIDTH, DTYPE, self.device
        self.peers = map_peers(*args, self.group.collect)
        self.link = self._link_bytes_per_us()
        self.torch_group = self._torch_group(meeting)
        self._one = torch.ones(8, device=self.device)

    def measure(self, rows: int) -> Result:
        """Every rival that runs here, checked and timed."""
        draw = torch.Generator(self.device).manual_seed(rows)
        of_all = torch.randn(self.size, rows, WIDTH, generator=draw, device=self.device).to(DTYPE)
        residual, weight = (
            torch.randn(*shape, generator=draw, device=self.device).to(DTYPE)
            for shape in ((rows, WIDTH), (WIDTH,))
        )
        own = of_all[self.rank].clone()
        exact = of_all.float().sum(0) + residual.float()
        add_norm = partial(rms_norm_residual, residual=residual, weight=weight, eps=EPS)
        times: dict[str, float | None] = {}
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, Call]] = {}
        for name, (call, fill) in self._rivals(own, residual, weight, add_norm).items():
            fill()
            _, total = call()
            # NCCL rounds between its additions.
            worst = float((total.float() - exact).abs().max())
            assert worst < 0.25, (name, rows, worst)
            graphs[name] = _captured(call), fill
        for name, us in self._timed(graphs, CALLS).items():
            times[name] = us
        sent = min(self.size - 1, 2 * (self.size - 1) / self.size) * own.nbytes
        return Result(self.size, rows, sent / self.link, times)

    def _rivals(
        self, own: Tensor, residual: Tensor, weight: Tensor, add_norm: Callable[..., Any]
    ) -> dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], Call]]:
        """A call of each, and what fills the input that it overwrites."""
        x = own.clone()
        found: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], Call]] = {
            "nccl": (lambda: add_norm(self.group.sum(x)), lambda: x.copy_(own))
        }
        if self.torch_group is not None:
            mapped = _symmetric(own, self.torch_group)
            ops, everyone = torch.ops.symm_mem, self.torch_group
            found["torch one-shot"] = (
                lambda: add_norm(ops.one_shot_all_reduce(mapped, "sum", everyone)),
                lambda: mapped.copy_(own),
            )
            found["torch two-shot"] = (
                lambda: add_norm(ops.two_shot_all_reduce_(mapped, "sum", everyone)),
                lambda: mapped.copy_(own),
            )
        for kind, warps, early in product(KINDS, (8, 16), (False, True)):
            call = partial(
                peers_triton.launch,
                own,
                residual,
                weight,
                EPS,
                self.peers._buffers,
                self.peers._turns,
                rank=self.rank,
                size=self.size,
                shares=kind != "one-shot",
                ahead=kind == "two-shot ahead",
                num_warps=warps,
                starts_early=early,
            )
            found[f"ours {kind} {warps}{' early' * early}"] = call, _nothing
        return found

    def _timed(
        self, graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, Call]], calls: int
    ) -> dict[str, float]:
        """Microseconds of a call: the median replay of the slowest rank."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(-2, REPEATS):
            for name, (graph, fill) in graphs.items():
                fill()
                torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
                self.group.sum(self._one)  # all ranks begin now
                begin = Stamp(self.device)
                graph.replay()
                elapsed = begin.ms_until(Stamp(self.device))
                if turn >= 0:
                    times[name].append(1e3 * elapsed / calls)
        return {name: self._slowest(sorted(each)[len(each) // 2]) for name, each in times.items()}

    def _slowest(self, us: float) -> float:
        return -self.group.least(-round(1e3 * us)) / 1e3

    def _link_bytes_per_us(self) -> float:
        """At which every GPU reads another one's memory at the same time."""
        num_bytes = buffer_bytes(self.size)
        target = torch.empty(num_bytes, dtype=torch.int8, device=self.device)
        source = int(self.peers._buffers[(self.rank + 1) % self.size])
        times = []
        for _ in range(8):
            self.group.least(0)
            begin = Stamp(self.device)
            for _ in range(8):
                if not _copy(target.data_ptr(), source, num_bytes):
                    return math.nan
            times.append(1e3 * begin.ms_until(Stamp(self.device)) / 8)
        return num_bytes / self._slowest(sorted(times)[len(times) // 2])

    def _torch_group(self, meeting: Path) -> Any:
        """Name of torch's own group of these ranks, for its symmetric memory."""
        store = dist.FileStore(f"{meeting}.torch", self.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl", store=store, rank=self.rank, world_size=self.size, device_id=self.device
        )
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        try:
            _symmetric(torch.ones(8, 8, device=self.device), name)
        except (RuntimeError, ImportError, AttributeError) as error:
            print(f"torch's symmetric memory does not run here: {error}", file=sys.stderr)
            return None
        return name


def _symmetric(own: Tensor, group: Any) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric

    mapped = symmetric.empty(*own.shape, dtype=own.dtype, device=own.device)
    symmetric.rendezvous(mapped, group)
    return mapped.copy_(own)


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    return graph


def _copy(target: int, source: int, num_bytes: int) -> bool:
    """Queues a copy between GPUs; whether it could be."""
    # torch would make a context of its own on the other device.
    sizes = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return not ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2(*sizes, stream)


def _nothing() -> None:
    """Its input stays as it is."""


def table(results: Sequence[Result]) -> str:
    """For each degree a line for each rival, microseconds by the number of rows."""
    lines = []
    for degree in dict.fromkeys(result.degree for result in results):
        of_degree = [result for result in results if result.degree == degree]
        names = dict.fromkeys(name for result in of_degree for name in result.us)
        lines.append(_line(f"{degree} GPUs, rows", [str(one.rows) for one in of_degree]))
        lines.append(_line("limit", [_shown(one.limit_us) for one in of_degree]))
        lines += [_line(name, [_shown(one.us.get(name)) for one in of_degree]) for name in names]
        lines.append(_line("ours / nccl", [_shown(one.ratio) for one in of_degree]))
    return "\n".join(lines)


def _line(name: str, columns: Sequence[str]) -> str:
    return f"{name:28}" + "".join(f"{column:>9}" for column in columns)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def aims(results: Sequence[Result]) -> Iterator[str]:
    """Each aim in words, held or missed."""
    for result in results:
        if result.rows == AIM_ROWS and result.ratio is not None:
            word = "holds" if result.ratio <= AIM else "is missed"
            yield (
                f"{result.degree} GPUs, {AIM_ROWS} rows: {result.ratio:.2f} of NCCL, "
                f"aim {AIM} {word}"
            )


def run_degree(degree: int, rows: Sequence[int], deadline: float) -> tuple[list[Result], str]:
    """Runs the ranks of one group: (results, an error if one fails or they take too long). No rank
    is left then."""
    error = ""
    with tempfile.TemporaryDirectory() as home:
        ranks = [_started(rank, degree, Path(home) / "meeting", rows) for rank in range(degree)]
        try:
            while any(statuses := [rank.poll() for rank in ranks]) or None in statuses:
                if any(statuses) or time.monotonic() > deadline:
                    error = f"{degree} ranks failed or took too long: {statuses}"
                    break
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
            output, *_ = [rank.communicate()[0] for rank in ranks]
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return [Result(**json.loads(line)) for line in lines], error


def _started(rank: int, degree: int, meeting: Path, rows: Sequence[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", MODULE, "--rank", str(rank), "--degree", str(degree)]
    command += ["--meeting", str(meeting)]
    for count in rows:
        command += ["--rows", str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE if rank == 0 else None, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case and prints the table; returns 1 if an aim does not hold."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--degree", type=int, action="append", help=f"else {DEGREES}")
    parser.add_argument("--rows", type=int, action="append", help=f"else {ROWS}")
    parser.add_argument("--seconds", type=float, default=DEADLINE_S, help="of a degree at most")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_sums.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    rows = asked.rows or ROWS
    if asked.rank is not None:
        _run_rank(asked.rank, asked.degree[0], asked.meeting, rows)
        return 0
    degrees = [one for one in asked.degree or DEGREES if one <= torch.cuda.device_count()]
    if not degrees:
        parser.error("at least two CUDA devices are needed")
    found = [run_degree(one, rows, time.monotonic() + asked.seconds) for one in degrees]
    results = [result for of_degree, _ in found for result in of_degree]
    errors = [error for _, error in found if error]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(table(results))
    print(*aims(results), sep="\n")
    write_record(asked.json, [asdict(one) | {"ratio": one.ratio} for one in results], [])
    print(*errors, sep="\n")
    return int(any("missed" in line for line in aims(results)) or bool(errors))


def _run_rank(rank: int, degree: int, meeting: Path, rows: Sequence[int]) -> None:
    own = Rank(rank, degree, meeting)
    for count in rows:
        with torch.inference_mode():
            result = own.measure(count)
        if rank == 0:
            print(json.dumps(asdict(result)), flush=True)
        torch.cuda.empty_cache()
    sys.stdout.flush()
    own.group.least(0)
    os._exit(0)  # groups of torch need not be taken apart


if __name__ == "__main__":
    sys.exit(main())
