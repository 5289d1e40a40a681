"""FlexAttention compiled on a GPU, packed and not, one compilation for all lengths."""

from __future__ import annotations

import pytest
import torch
from operators import attention
from operators.attention import Case, Row, build
from operators.tolerance import assert_close

pytestmark = [
    # Of torch's compiler, when it is imported and when it runs.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = Case(
    (Row(128, 2048), Row(96, 1000, origin=1000), Row(32, 4097), Row(70, 0, origin=70)),
    q_heads=28,
    kv_heads=4,
    head_dim=128,
    page_size=32,
    block_size=32,
)
SHORT = Case((Row(32, 500), Row(64, 64)), q_heads=28, kv_heads=4, head_dim=128, block_size=32)


def test_equals_explicit_mask() -> None:
    from effuse.kernels.attention_flex import FlexAttention

    attend = FlexAttention()
    for case in (LONG, SHORT):
        call = build(case, torch.device("cuda"), torch.bfloat16)
        out = attend(
            call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch, scale=call.scale
        )
        exact = attention.reference(case, call, torch.float64)
        plain = attention.reference(case, call, torch.bfloat16)
        assert_close(out, exact, plain)
