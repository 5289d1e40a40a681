"""Rotary embedding on the torch path, alone and with the KV store."""

from __future__ import annotations

import pytest
import torch
from operators import rows
from operators.paths import public

from effuse.kernels.rowwise import make_cos_sin_cache

OPS = public(torch.device("cpu"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("stores", [False, True], ids=["alone", "with_store"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.HEADS, ids=str)
def test_equals_rotation_of_pairs(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, stores: bool
) -> None:
    rows.check_rotary(OPS, dtype, shape, stores=stores)


def test_position_zero_changes_nothing() -> None:
    q, k = rows.random(2, 3, 16), rows.random(2, 1, 16)
    table = make_cos_sin_cache(16, 4, rows.THETA, OPS.device)
    new_q, new_k = OPS.rotary(q, k, table, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(new_q, q)
    assert torch.equal(new_k, k)


def test_scores_depend_on_distance_alone() -> None:
    q, k = rows.random(1, 1, 32), rows.random(1, 1, 32).flip(-1)
    table = make_cos_sin_cache(32, 200, rows.THETA, OPS.device)
    scores = []
    for first, second in ((3, 17), (150, 164)):
        new_q, _ = OPS.rotary(q, k, table, torch.tensor([first]))
        _, new_k = OPS.rotary(q, k, table, torch.tensor([second]))
        scores.append(float((new_q * new_k).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("rotated", [4, 6, 64, 128])
def test_a_position_has_the_same_numbers_in_a_table_of_any_length(rotated: int) -> None:
    table = make_cos_sin_cache(rotated, 40000, rows.THETA, OPS.device)
    for length in (1, 5, 131, 32772):
        assert torch.equal(
            make_cos_sin_cache(rotated, length, rows.THETA, OPS.device), table[:length]
        )
