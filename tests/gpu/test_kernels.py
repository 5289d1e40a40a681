"""Every Triton kernel on a GPU, in every dtype, under the same checks as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from operators import attention, edits, experts, rows, sampling
from operators.attention import Case, Row
from operators.paths import experts_grouped, public, triton_kernels

from effuse.kernels.attention import block_attention
from effuse.kernels.attention_batch import make_attention_batch
from effuse.kernels.experts import Routes, expert_mlp, own_routes, route, router_logits
from effuse.kernels.experts_routing import Routing
from effuse.kernels.rowwise import lookup, total_of
from effuse.kernels.sampling import edit_logits
from effuse.kernels.step_plan_triton import launch_exchange, launch_gather
from effuse.kernels.values import Candidates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
OPS = public(CUDA)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

DREAM = Case(
    (Row(128, 2048), Row(96, 1000, origin=1000), Row(32, 4097), Row(700, 0, origin=700)),
    q_heads=28,
    kv_heads=4,
    head_dim=128,
    page_size=64,
    block_size=32,
)
LLADA = Case((Row(64, 500), Row(32, 1024)), q_heads=32, kv_heads=32, head_dim=128, page_size=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", attention.CASES)
def test_attention_equals_explicit_mask(name: str, dtype: torch.dtype) -> None:
    attention.check(attention.CASES[name], OPS, dtype)
    attention.check(attention.CASES[name], triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [DREAM, LLADA], ids=["dream", "llada"])
def test_attention_of_released_shapes(case: Case, dtype: torch.dtype) -> None:
    attention.check(case, OPS, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["ragged", "heads_7_to_1", "split_context"])
def test_attention_alone_and_from_other_pages_is_bitwise_equal(
    name: str, dtype: torch.dtype
) -> None:
    attention.check_alone_and_shuffled(attention.CASES[name], triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_parts_of_a_context_equal_explicit_mask(dtype: torch.dtype) -> None:
    for name, case in attention.CASES.items():
        if name != "huge_scores" or dtype != torch.float16:
            attention.check_cut_context(case, OPS, dtype, 2)
            attention.check_cut_context(case, triton_kernels(CUDA), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beginnings_read_together_equal_explicit_mask(dtype: torch.dtype) -> None:
    scaled = [Row(row.rows, row.context * 8, row.origin * 8) for row in attention.SHARED.sequences]
    long = replace(attention.SHARED, sequences=tuple(scaled), page_size=128, head_dim=128)
    # So many heads leave one program to a sequence, which merges.
    many = replace(long, q_heads=64, kv_heads=32)
    for case in (attention.SHARED, replace(attention.SHARED, q_heads=8, head_dim=128), long, many):
        attention.check_shared(OPS, dtype, case, (None,))
        attention.check_shared(triton_kernels(CUDA), dtype, case, (None, 1, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_does_not_depend_on_what_is_cached(dtype: torch.dtype) -> None:
    attention.check_cut(triton_kernels(CUDA), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.SHAPES, ids=str)
@pytest.mark.parametrize("check", [rows.check_norm, rows.check_norm_residual, rows.check_swiglu])
def test_rows(check: Callable[..., None], shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(OPS, dtype, shape)


@pytest.mark.parametrize("stores", [False, True], ids=["alone", "with_store"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rows.HEADS, ids=str)
def test_rotary(shape: tuple[int, int, int, int, int], dtype: torch.dtype, stores: bool) -> None:
    rows.check_rotary(OPS, dtype, shape, stores=stores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_and_pages(dtype: torch.dtype) -> None:
    rows.check_norm_of_heads(OPS, dtype)
    rows.check_store(OPS, dtype)
    rows.check_store_of_nothing(OPS, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sampling.CASES | sampling.TOP_K_FIRST)
def test_sampling_equals_reference(name: str, dtype: torch.dtype) -> None:
    case = (sampling.CASES | sampling.TOP_K_FIRST)[name]
    sampling.check([case], OPS, dtype, vocab_size=97)
    sampling.check([case], triton_kernels(CUDA, max_chunk=64), dtype, 303)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_not_finite_shows_it(dtype: torch.dtype) -> None:
    for cases in (sampling.CASES, sampling.TOP_K_FIRST):
        plain = [case for case in cases.values() if case.logits == "normal"]
        sampling.check_not_finite(plain, OPS, dtype, 97)
        sampling.check_not_finite(plain, triton_kernels(CUDA, max_chunk=64), dtype, 303)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_of_all_settings_over_a_released_vocabulary(dtype: torch.dtype) -> None:
    for cases in (sampling.CASES, sampling.TOP_K_FIRST):
        one_row_each = [replace(case, rows=1) for case in cases.values()]
        sampling.check(one_row_each, OPS, dtype, vocab_size=152_064)


def test_last_rows_are_gathered_and_boundaries_exchanged() -> None:
    rows.check_last_rows(launch_gather, launch_exchange, CUDA)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", experts.ROUTINGS)
def test_routes(name: str, biased: bool) -> None:
    experts.check_route(route, CUDA, experts.ROUTINGS[name], biased=biased)
    experts.check_route_of_no_number(route, CUDA)


@pytest.mark.parametrize("case", experts.SORTED, ids=str)
def test_picks_are_sorted(case: tuple[int, int, int]) -> None:
    from effuse.kernels.experts_routes_triton import launch_sort

    experts.check_sort(launch_sort, CUDA, *case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", experts.LAYERS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    experts.check_mlp(expert_mlp, CUDA, dtype, experts.LAYERS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_crowded_and_of_shuffled_rows(dtype: torch.dtype) -> None:
    experts.check_crowd(expert_mlp, CUDA, dtype)
    spread = experts.Spread(own_routes, expert_mlp, total_of)
    for name in ("many_tiles", "one_row"):
        experts.check_spread(spread, CUDA, dtype, experts.LAYERS[name])
    experts.check_order(expert_mlp, CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_summed(dtype: torch.dtype) -> None:
    rows.check_total(total_of, CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_part_of_a_vocabulary(dtype: torch.dtype) -> None:
    rows.check_lookup(lookup, CUDA, dtype)


def test_experts_by_grouped_products() -> None:
    for name in ("one_row", "odd_sizes", "many_tiles"):
        experts.check_mlp(experts_grouped, CUDA, torch.bfloat16, experts.LAYERS[name])
    experts.check_crowd(experts_grouped, CUDA, torch.bfloat16)
    experts.check_order(experts_grouped, CUDA, torch.bfloat16)


LLADA2 = Routing(
    num_experts=256,
    top_k=8,
    scores="sigmoid",
    renormalises=True,
    scale=2.5,
    num_groups=8,
    top_groups=4,
    num_shared=1,
)


@pytest.mark.parametrize("rows", [1, 32, 256, 1024, 2048])
def test_experts_of_a_released_shape(rows: int) -> None:
    """LLaDA2.0-mini's in bf16, in every size of tile, against products of fp32."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    gate_up = torch.randn(257, 1024, 2048, dtype=torch.bfloat16, device=CUDA, generator=generator)
    down = torch.randn(257, 2048, 512, dtype=torch.bfloat16, device=CUDA, generator=generator)
    gate_up, down = gate_up.mul_(2048**-0.5), down.mul_(512**-0.5)
    x = torch.randn(rows, 2048, dtype=torch.bfloat16, device=CUDA, generator=generator)
    router = torch.randn(256, 2048, dtype=torch.bfloat16, device=CUDA, generator=generator)
    routes = route(router_logits(x, router * 2048**-0.5), None, LLADA2)
    found = expert_mlp(x, gate_up, down, routes).total()
    exact = torch.zeros(rows, 2048, device=CUDA)
    for expert in torch.unique(routes.experts).tolist():
        row, place = (routes.experts == expert).nonzero(as_tuple=True)
        gate, up = (x[row].float() @ gate_up[expert].float().t()).chunk(2, dim=-1)
        given = (torch.nn.functional.silu(gate) * up) @ down[expert].float().t()
        exact.index_add_(0, row, given * routes.weights[row, place, None])
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=0.02 * float(exact.abs().max()))
    assert (found.float() - exact).square().mean() < 1e-4 * exact.square().mean()


def test_experts_replay_in_a_graph_that_chooses_anew() -> None:
    layer = experts.LAYERS["many_tiles"]
    x, gate_up, down = (each.to(CUDA) for each in experts.weights_of(layer, torch.bfloat16))
    router = experts.random(layer.routing.num_experts, layer.hidden).to(CUDA, torch.bfloat16)

    def step() -> tuple[Routes, torch.Tensor]:
        routes = route(router_logits(x, router), None, layer.routing)
        return routes, expert_mlp(x, gate_up, down, routes).total()

    before = step()[0].experts.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routes, found = step()
    x.mul_(-1)
    graph.replay()
    replayed = routes.experts.clone(), found.clone()
    assert not torch.equal(replayed[0], before), "other rows, other experts"
    again = step()
    assert torch.equal(replayed[0], again[0].experts) and torch.equal(replayed[1], again[1])


def test_pages_past_the_reach_of_32_bits() -> None:
    """Offsets of a pool of more than 2**31 elements."""
    page_elements = 2 * 4 * 64 * 128
    last = 2**31 // page_elements + 40
    memory = torch.empty((last + 1, 1, 2, 4, 64, 128), dtype=torch.bfloat16, device=CUDA)
    memory[last].normal_()
    k_cache, v_cache = memory[:, 0, 0].transpose(1, 2), memory[:, 0, 1].transpose(1, 2)
    case = Case((Row(32, 50),), q_heads=28, kv_heads=4, head_dim=128, page_size=64)
    call = attention.build(case, CUDA, torch.bfloat16)
    far = make_attention_batch([32], [50], [[last]], [0], block_size=16, page_size=64, device=CUDA)
    near = make_attention_batch([32], [50], [[0]], [0], block_size=16, page_size=64, device=CUDA)
    small = memory[last:].clone()
    small_k, small_v = small[:, 0, 0].transpose(1, 2), small[:, 0, 1].transpose(1, 2)
    results = [
        block_attention(call.q, call.k, call.v, keys, values, batch, scale=0.1)
        for keys, values, batch in ((k_cache, v_cache, far), (small_k, small_v, near))
    ]
    assert torch.equal(results[0], results[1])
    slots = torch.arange(32, device=CUDA) + last * 64
    OPS.store_kv(call.k, call.v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[last, :32], call.k)


def test_operators_replay_in_a_graph_with_other_inputs() -> None:
    """Nothing waits for the host: attention and sampling can be captured, and see new data."""
    call = attention.build(attention.CASES["split_context"], CUDA, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    case = sampling.CASES["top_p_and_top_k"]
    logits = sampling.make_logits(case, 203, generator).to(CUDA)
    settings = sampling.to_device(sampling.make_sampling([case], generator), CUDA)
    ops = triton_kernels(CUDA)

    def step() -> Candidates:
        ops.attention(call)
        return ops.sample_confidence(logits, settings, sampling.MASK)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    call.q.mul_(-0.5)
    logits.copy_(logits.flip(1).clone())
    graph.replay()
    replayed = call.out.clone(), found.token.clone()
    call.out.fill_(float("nan"))
    again = step()
    assert torch.equal(replayed[0], call.out)
    assert torch.equal(replayed[1], again.token)


@pytest.mark.parametrize("vocab_size", [300, 151_936])
def test_logit_edits_equal_their_reference(vocab_size: int) -> None:
    edits.check(list(edits.CASES.values()), edit_logits, CUDA, vocab_size)
