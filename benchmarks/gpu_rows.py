"""Kernels limited by memory, compared with the memory: sampling, norms, SwiGLU, rotary, pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from effuse.benchmarks.gpu_read_triton import read_once
from effuse.benchmarks.gpu_timing import Call, median_us, medians_us
from effuse.kernels.pages import store_kv
from effuse.kernels.rowwise import (
    make_cos_sin_cache,
    rms_norm,
    rms_norm_residual,
    rotary_store_kv,
    swiglu,
)
from effuse.kernels.sampling import sample_confidence
from effuse.kernels.values import RowSampling, ScoreCode
from effuse.kvtransfer.layout import KVLayout, PageMemory

CUDA = torch.device("cuda")
VOCABULARY = 152_064
HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM = 3584, 18_944, 28, 4, 128
ROWS = 4096
PAGE_SIZE = 32
SETS = 4  # inputs that are rotated


@dataclass(frozen=True, slots=True)
class Mode:
    """Settings of every row of a sampling call."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    score: ScoreCode = ScoreCode.CONFIDENCE


MODES = {
    "greedy": Mode(),
    "entropy": Mode(score=ScoreCode.NEG_ENTROPY),
    "drawn": Mode(temperature=1.0),
    "top-p 0.9, drawn": Mode(temperature=1.0, top_p=0.9),
    "top-k 50, drawn": Mode(temperature=1.0, top_k=50),
    "both, drawn": Mode(temperature=0.8, top_p=0.95, top_k=50),
}


# Modes with torch's chain, with and without the entropy.
BESIDE_CHAIN = {"greedy": False, "entropy": True}


@dataclass(frozen=True, slots=True)
class Pair:
    """Microseconds of a mode and of torch's chain for the same results, in turns."""

    ours: float
    chain: float

    @property
    def ratio(self) -> float:
        """How many times as long the chain takes."""
        return self.chain / self.ours


@dataclass(frozen=True, slots=True)
class Sampled:
    """Microseconds of sampling and of its rivals."""

    rows: int
    read: float  # of the logits, in turns with greedy
    modes: dict[str, float]  # greedy in turns with the read, others by themselves
    chains: dict[str, Pair]  # by mode


@dataclass(frozen=True, slots=True)
class Moved:
    """A kernel's time, and the bytes that it must read and write."""

    name: str
    us: float
    num_bytes: int


def measure_sampling(rows: int, deviation: float = 2.0) -> Sampled:
    """Sampling of ``rows`` rows of normal logits; the worst case for a draw, because none stands
    out.
    """
    logits = torch.randn(rows, VOCABULARY, dtype=torch.bfloat16, device=CUDA) * deviation
    settings = {name: row_sampling(mode, rows) for name, mode in MODES.items()}

    def ours(name: str) -> list[Call]:
        return [lambda: sample_confidence(logits, settings[name], 5)] * 3

    short = medians_us({"read": [lambda: read_once(logits)] * 4, "greedy": ours("greedy")})
    modes = {name: short.get(name) or median_us(ours(name)) for name in MODES}
    # Last, because the chains run long enough to lower the clock of later work.
    chains = {}
    for name, with_entropy in BESIDE_CHAIN.items():
        chain = [partial(torch_chain, logits, with_entropy=with_entropy)] * 2
        chains[name] = Pair(**medians_us({"ours": ours(name), "chain": chain}))
    return Sampled(rows, short["read"], modes, chains)


def torch_chain(logits: Tensor, *, with_entropy: bool) -> tuple[Tensor, ...]:
    """An engine without a kernel: softmax in fp32 and its maximum; the entropy if needed."""
    probability = logits.float().softmax(dim=-1)
    confidence, token = probability.max(dim=-1)
    if not with_entropy:
        return token, confidence
    return token, confidence, (probability * (probability + 1e-10).log()).sum(dim=-1)


def row_sampling(mode: Mode, rows: int) -> RowSampling:
    def all_rows(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=CUDA)

    return RowSampling(
        temperature=all_rows(mode.temperature, torch.float32),
        top_p=all_rows(mode.top_p, torch.float32),
        top_k=all_rows(mode.top_k, torch.int32),
        seed=torch.arange(rows, device=CUDA) * 7919,
        answer_index=all_rows(0, torch.int32),
        position=torch.arange(rows, dtype=torch.int32, device=CUDA),
        denoise_count=all_rows(3, torch.int32),
        score=all_rows(int(mode.score), torch.int8),
    )


def measure_rows() -> list[Moved]:
    """Row-wise kernels over 4096 rows of Dream-7B's widths, bf16."""
    weight = _random(HIDDEN)
    rows, halves = ROWS * HIDDEN * 2, ROWS * INNER * 2
    return [
        _moved("norm", 2 * rows, lambda: _norm(weight)),
        _moved("norm with residual", 4 * rows, lambda: _norm_residual(weight)),
        _moved("SwiGLU", 3 * halves, _swiglu),
    ]


def measure_pages() -> list[Moved]:
    """Rotary and store over 4096 rows, all of them stored."""
    row = KV_HEADS * HEAD_DIM * 2
    heads = Q_HEADS * HEAD_DIM * 2
    found = []
    for layout in ("unified", "distinct"):
        found += [
            _moved(
                f"rotary and store, {layout}",
                ROWS * (2 * heads + 5 * row),
                lambda layout=layout: _rotary(layout),  # type: ignore[misc]
            ),
            _moved(
                f"store, {layout}",
                ROWS * 4 * row,
                lambda layout=layout: _store(layout),  # type: ignore[misc]
            ),
        ]
    return found


def _moved(name: str, num_bytes: int, make: Callable[[], Call]) -> Moved:
    """Times the calls that ``make`` returns, each with its own inputs."""
    sets = max(SETS, (200 << 20) // num_bytes)
    found = Moved(name, median_us([make() for _ in range(sets)]), num_bytes)
    torch.cuda.empty_cache()
    return found


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA)


def _norm(weight: Tensor) -> Call:
    x = _random(ROWS, HIDDEN)
    return lambda: rms_norm(x, weight, 1e-6)


def _norm_residual(weight: Tensor) -> Call:
    x, residual = _random(ROWS, HIDDEN), _random(ROWS, HIDDEN)
    return lambda: rms_norm_residual(x, residual, weight, 1e-6)


def _swiglu() -> Call:
    gate_up = _random(ROWS, 2 * INNER)
    return lambda: swiglu(gate_up)


def _rotary(layout: str) -> Call:
    q, k, v = _heads()
    table = make_cos_sin_cache(HEAD_DIM, 8192, 1e6, CUDA)
    positions, cache, slots = torch.arange(ROWS, device=CUDA), _cache(layout), _slots()
    return lambda: rotary_store_kv(q, k, v, table, positions, *cache, slots)


def _store(layout: str) -> Call:
    (_, k, v), cache, slots = _heads(), _cache(layout), _slots()
    return lambda: store_kv(k, v, *cache, slots)


def _heads() -> tuple[Tensor, Tensor, Tensor]:
    fused = _random(ROWS, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = torch.split(fused, [Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def _cache(layout: str) -> tuple[Tensor, Tensor]:
    sizes = 2, KV_HEADS, HEAD_DIM, PAGE_SIZE
    memory = PageMemory(KVLayout(layout, *sizes, "bfloat16"), ROWS // PAGE_SIZE, CUDA)
    memory.tensor.normal_()
    return memory.layer_views()[1]


def _slots() -> Tensor:
    """Slots of whole blocks, their pages in random order."""
    pages = torch.randperm(ROWS // PAGE_SIZE, device=CUDA)
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=CUDA)).flatten()
