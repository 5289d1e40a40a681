"""Sums over peers' memory against a sum in fp64: cases, and ranks as processes with one memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from slowness import patient
from torch import Tensor

from effuse.kernels import peers_triton
from effuse.kernels.values import WeightedParts
from operators.references import rms_norm_ref
from operators.tolerance import assert_close

EPS = 1e-6
WAIT_S = patient(60.0)


@dataclass(frozen=True, slots=True)
class Case:
    """Sums one after another: rows of each, and whether one rank adds up a row for all."""

    size: int
    width: int
    dtype: torch.dtype
    sums: tuple[tuple[int, bool], ...]
    late: tuple[int, ...] = ()  # the rank that sleeps before each sum, in turns
    most: int = 8  # rows of a kernel


MIXED = ((3, False), (2, True), (4, True), (1, False), (4, False), (4, True), (2, False))
CASES = {
    "two_ranks": Case(2, 64, torch.float32, tuple((rows, False) for rows in (3, 1, 8, 2, 2, 5))),
    "two_ranks_late": Case(2, 100, torch.float16, MIXED, late=(0, 1, 1, 0)),
    "three_ranks_late": Case(3, 100, torch.float32, MIXED, late=(2,), most=3),
    "four_ranks_late": Case(4, 192, torch.float16, MIXED[:5], late=(0, 2, 1, 3, 1)),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one sum; x has all ranks' rows."""

    x: Tensor  # [N, T, H]
    residual: Tensor  # [T, H]
    weight: Tensor  # [H]


def inputs_of(case: Case, number: int, rows: int) -> Inputs:
    """Random rows, among them both zeros and NaN with the bits of a free place."""
    draw = torch.Generator().manual_seed(1000 * case.size + number)
    x = torch.randn(case.size, rows, case.width, generator=draw).to(case.dtype)
    x[:, 0, :2] = torch.tensor([0.0, -0.0], dtype=case.dtype)
    if number % 3 == 2:
        bits = x.view(peers_triton.BITS[x.element_size()])
        bits[number % case.size, -1, 5] = -1
    residual = torch.randn(rows, case.width, generator=draw).to(case.dtype)
    return Inputs(x, residual, torch.randn(case.width, generator=draw).to(case.dtype))


def in_parts(x: Tensor) -> WeightedParts:
    """Two halves of each row of x [T, H], and a part of weight 0 that is a NaN."""
    count, device = len(x), x.device
    parts = torch.cat([x, torch.full_like(x, torch.nan)])
    weights = torch.tensor([0.5, 0.0, 0.5], device=device).expand(count, 3).contiguous()
    places = torch.arange(count, device=device)[:, None] + count * (weights == 0)
    return WeightedParts(parts, places.int().contiguous(), weights)


def check_sum(given: Inputs, normed: Tensor, total: Tensor) -> None:
    """Against fp64. A sum has its NaN in the same places, and normalised rows of these are NaN."""
    exact = given.x.double().sum(0) + given.residual.double()
    plain = (given.x.float().sum(0) + given.residual.float()).to(total.dtype)
    normed, total = normed.to(exact.device), total.to(exact.device)
    assert torch.equal(total.isnan(), exact.isnan())
    is_number = ~exact.isnan().any(1)
    assert normed[~is_number].isnan().all()
    assert_close(total[is_number], exact[is_number], plain[is_number])
    rounded = total[is_number]
    assert_close(
        normed[is_number],
        rms_norm_ref(rounded.double(), given.weight.double(), EPS),
        rms_norm_ref(rounded, given.weight, EPS),
    )


def check(case: Case, *, waits: bool = True) -> None:
    """Each rank is a process that runs the kernel in the interpreter; all share their buffers.

    Without `waits` every place has a value at first, so that no rank waits for its peers.
    """
    most = case.most
    bits = peers_triton.BITS[case.dtype.itemsize]
    shape = case.size, 2, case.size, most, case.width
    buffers = shared(torch.full(shape, -1 if waits else 0, dtype=bits))
    turns = shared(torch.zeros(case.size, most, dtype=torch.int32))
    shape = case.size, len(case.sums), 2, max(rows for rows, _ in case.sums), case.width
    results = shared(torch.zeros(shape, dtype=case.dtype))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])

    def rank_main(rank: int) -> None:
        for number, (rows, shares) in enumerate(case.sums):
            given = inputs_of(case, number, rows)
            if case.late and case.late[number % len(case.late)] == rank:
                time.sleep(0.05)
            found = peers_triton.launch(
                in_parts(given.x[rank]) if number % 3 == 1 else given.x[rank].contiguous(),
                given.residual,
                given.weight,
                EPS,
                addresses,
                turns[rank],
                rank=rank,
                size=case.size,
                shares=shares,
                ahead=shares and number % 2 == 1,
            )
            for at, result in enumerate(found):
                results[rank, number, at, :rows] = result

    run_ranks(case.size, rank_main)
    for number, (rows, _) in enumerate(case.sums):
        normed, total = results[0, number, :, :rows]
        check_sum(inputs_of(case, number, rows), normed, total)
        assert_same_bits(results[:, number])
    assert (buffers == -1).all()


def check_without_waiting(case: Case) -> None:
    """The check finds out that no rank waits."""
    try:
        check(case, waits=False)
    except AssertionError:
        return
    raise AssertionError("ranks that do not wait pass")


def shared(memory: Tensor) -> Tensor:
    """The same memory in all processes that are forked later."""
    return memory.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def assert_same_bits(results: Tensor) -> None:
    """Of all ranks [N, ...]."""
    bits = results.view(peers_triton.BITS[results.element_size()])
    assert (bits == bits[0]).all()


def run_ranks(size: int, main: Callable[[int], None]) -> None:
    """Forks a process for each rank and waits for all. AssertionError if one fails or hangs."""
    children = [_forked(main, rank) for rank in range(size)]
    try:
        deadline = time.monotonic() + WAIT_S
        left = set(children)
        while left:
            left -= {child for child in left if _has_ended(child)}
            assert time.monotonic() < deadline, f"{len(left)} of {size} ranks still run"
            time.sleep(0.01)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _forked(main: Callable[[int], None], rank: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            main(rank)
            status = 0
        finally:
            os._exit(status)
    return child


def _has_ended(child: int) -> bool:
    ended, status = os.waitpid(child, os.WNOHANG)
    assert not status, f"a rank ended with {status}"
    return bool(ended)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, case in CASES.items():
        yield name, partial(check, case)
    yield "without_waiting", partial(check_without_waiting, CASES["two_ranks_late"])
