"""Each row's bits with `batch_invariant`, whatever else a forward has, on a Hopper GPU.

Every check is also run on operators that depend on the batch, and must find that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from effuse.benchmarks.gpu_models import DREAM_7B, LLADA2_MINI, random_model
from effuse.kernels import products_hopper
from effuse.kernels.attention_batch import make_attention_batch
from effuse.kernels.products_hopper import TILES, Plan
from effuse.kernels.rowwise import halves
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.models.config import ModelConfig
from effuse.models.transformer import ModelWeights, Transformer

CUDA = torch.device("cuda")
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
PAGE = 16
MOST_ROWS = 2304

Product = Callable[[Tensor, Tensor], Tensor]


def in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """As the MLP's last product, whose halves the next norm adds."""
    return halves(x, weight, batch_invariant=True).sum(0)


def rows_that_differ(product: Product, columns: int, inner: int, dtype: torch.dtype) -> list[int]:
    """Numbers of rows up to MOST_ROWS with other bits than the same rows of the largest product."""
    generator = torch.Generator(CUDA).manual_seed(columns)
    x = torch.randn(MOST_ROWS, inner, generator=generator, device=CUDA).to(dtype)
    weight = (torch.randn(columns, inner, generator=generator, device=CUDA) * 0.02).to(dtype)
    for shares in (1, 2):
        products_hopper.measure([weight], shares=shares)
    expected = product(x, weight)
    exact = functional.linear(x.double(), weight.double())
    assert (expected.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    return [
        rows for rows in range(1, MOST_ROWS + 1)
        if not torch.equal(product(x[:rows], weight), expected[:rows])
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(512, 3584), (192, 168), (2048, 512)])
def test_all_numbers_of_rows_give_the_same_bits(
    columns: int, inner: int, dtype: torch.dtype
) -> None:
    assert rows_that_differ(products_hopper.launch, columns, inner, dtype) == []


@pytest.mark.parametrize(("columns", "inner"), [(512, 3584), (64, 48)])
def test_so_do_halves_of_the_sum(columns: int, inner: int) -> None:
    assert rows_that_differ(in_halves, columns, inner, torch.bfloat16) == []


def test_products_that_choose_by_rows_are_found() -> None:
    assert rows_that_differ(functional.linear, 512, 3584, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 132, 700])
def test_all_plans_give_the_same_bits(rows: int) -> None:
    x = torch.randn(rows, 1000, device=CUDA).bfloat16()
    weight, bias = torch.randn(1000, 1000, device=CUDA).bfloat16(), torch.randn(1000, device=CUDA)
    bias = bias.bfloat16()
    plans = [Plan(tile) for tile in TILES]
    results = [products_hopper.launch(x, weight, bias, plan=plan) for plan in plans]
    assert all(torch.equal(result, results[0]) for result in results)
    plans += [Plan(tile, is_apart=True) for tile in TILES]
    results = [products_hopper.launch(x, weight, shares=2, plan=plan).sum(0) for plan in plans]
    assert all(torch.equal(result, results[0]) for result in results)


@dataclass(frozen=True, slots=True)
class Text:
    """Ids, and the block-aligned lengths in which they are computed."""

    ids: Tensor
    cuts: tuple[int, ...] = ()


BUNDLED = replace(
    DREAM_7B,
    num_layers=2,
    hidden_size=192,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    vocab_size=1000,
    mask_token_id=999,
    eos_token_ids=(998,),
)
MODELS = {
    "dream": replace(DREAM_7B, num_layers=2, vocab_size=8192, mask_token_id=1, eos_token_ids=(2,)),
    "llada2": replace(
        LLADA2_MINI, num_layers=3, vocab_size=8192, mask_token_id=1, eos_token_ids=(2,)
    ),
    "bundled": BUNDLED,
}


class Computed:
    """Computes texts together, step by step: those with fewer steps end earlier."""

    def __init__(self, model: Transformer, texts: Sequence[Text]) -> None:
        config = model.config
        sizes = [-(-len(text.ids) // PAGE) for text in texts]
        ends = list(accumulate(sizes))
        self._pages = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        layout = KVLayout(
            "unified",
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            PAGE,
            str(model.dtype).removeprefix("torch."),
        )
        memory = PageMemory(layout, ends[-1], CUDA)
        self._model, self._kv = model, memory.layer_views()
        self.hidden: list[list[Tensor]] = [[] for _ in texts]
        spans = [list(pairwise((0, *text.cuts, len(text.ids)))) for text in texts]
        for step in range(max(map(len, spans))):
            self._step(texts, [(i, *own[step]) for i, own in enumerate(spans) if step < len(own)])

    def result(self, index: int) -> Tensor:
        """Hidden rows of a text, then its stored keys and values."""
        stored = [
            cache[self._pages[index]].flatten().to(self._model.dtype)
            for layer in self._kv
            for cache in layer
        ]
        count = sum(len(rows) for rows in self.hidden[index])
        width = self._model.config.num_kv_heads * self._model.config.head_dim
        return torch.cat(
            [torch.cat(self.hidden[index]).flatten(), *(one[: count * width] for one in stored)]
        )

    def _step(self, texts: Sequence[Text], spans: Sequence[tuple[int, int, int]]) -> None:
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in spans])
        ids = torch.cat([texts[i].ids[begin:end] for i, begin, end in spans])
        slots = torch.cat(
            [torch.arange(begin, end) + self._pages[i][0] * PAGE for i, begin, end in spans]
        )
        batch = make_attention_batch(
            [end - begin for _, begin, end in spans],
            [begin for _, begin, _ in spans],
            [self._pages[i] for i, _, _ in spans],
            [0] * len(spans),
            block_size=32,
            page_size=PAGE,
            device=CUDA,
        )
        hidden = self._model.forward(
            ids.to(CUDA), positions.to(CUDA), batch, self._kv, slots.to(CUDA), last_rows=None
        )
        logits = self._model.logits(hidden)
        lengths = [end - begin for _, begin, end in spans]
        for (i, _, _), rows in zip(spans, torch.split(logits, lengths), strict=True):
            self.hidden[i].append(rows)


def texts_of(config: ModelConfig) -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    lengths = (700, 1, 31, 33, 257, 1500, 64, 700, 700)
    ids = [torch.randint(3, config.vocab_size, (n,), generator=generator) for n in lengths]
    ids[7] = ids[8] = ids[0]
    cuts = {7: (32, 64, 480), 8: (352,), 5: (1024, 1056), 4: (128,)}
    return [Text(one, cuts.get(i, ())) for i, one in enumerate(ids)]


def texts_that_differ(model: Transformer) -> list[int]:
    """The texts whose results change if others run beside them, or by the cuts."""
    texts = texts_of(model.config)
    together = Computed(model, texts)
    differ = []
    for i, text in enumerate(texts):
        alone = Computed(model, [Text(text.ids)]).result(0)
        assert alone.isfinite().all()
        if not torch.equal(together.result(i), alone):
            differ.append(i)
    return differ


@pytest.fixture(scope="module", params=MODELS)
def weights(request: pytest.FixtureRequest) -> tuple[ModelConfig, ModelWeights]:
    config = MODELS[request.param]
    return config, random_model(config, CUDA, torch.bfloat16).weights


def test_texts_do_not_depend_on_others_or_on_cached_beginnings(
    weights: tuple[ModelConfig, ModelWeights],
) -> None:
    assert texts_that_differ(Transformer(*weights, batch_invariant=True)) == []


def test_a_forward_that_chooses_by_the_batch_is_found(
    weights: tuple[ModelConfig, ModelWeights],
) -> None:
    assert texts_that_differ(Transformer(*weights)) != []
