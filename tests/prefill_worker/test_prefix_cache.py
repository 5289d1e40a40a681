"""Prompts with the same beginning: skipped computation, owners of pages, and evictions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from auditing import audit
from checkpoints import TinySizes, write_tiny_checkpoint
from paged_model import PagedModel
from prefill_worker.rig import Rig, attempt_of

from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool, PageState
from effuse.kvtransfer.units import HeldUnits, Ids, UnitCache
from effuse.prefill_worker.executor import mark_of
from effuse.worker.messages import (
    AbortDone,
    Failed,
    PrefillDone,
    PromptPushed,
    PushRehearsal,
    StartPrefill,
)

BLOCK = 4
COMMON = [3 + (7 * i) % 200 for i in range(24)]


def prompt_of(seed: int, common: int, length: int) -> list[int]:
    """`length` tokens that begin with so many that others have, too."""
    rng = random.Random(seed)
    return [*COMMON[:common], *(rng.randrange(3, 203) for _ in range(length - common))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {
        name: write_tiny_checkpoint(root / name, name, seed=3, block_size=BLOCK)
        for name in ("sdar", "dream", "fast_dllm_v2")
    }


Make = Callable[..., Rig]


@pytest.fixture
def make(checkpoints: dict[str, Path]) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_rig(architecture: str = "sdar", **sizes: int) -> Rig:
        rigs.append(Rig(checkpoints[architecture], **sizes))  # type: ignore[arg-type]
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


def hand_over(rig: Rig, name: str, prompt: Sequence[int]) -> torch.Tensor:
    """KV of the prompt as it arrives; its pages are free again afterwards."""
    num_paged = len(prompt) // BLOCK * BLOCK
    rig.push_to(rig.start(name, prompt), -(-num_paged // rig.layout.page_size))
    rig.settle()
    (arrived,) = rig.arrived()
    kv = rig.handed(arrived, num_paged).clone()
    rig.target_pool.release(rig.pages_of(arrived))
    rig.take(PrefillDone)
    rig.take(PromptPushed)
    return kv


def computed(rig: Rig) -> list[tuple[int, int]]:
    """Start and number of tokens of each part that was run since the last call."""
    parts = [(part.start, len(part.token_ids)) for ran in rig.forward.ran for part in ran]
    rig.forward.ran.clear()
    return parts


def expected_kv(path: Path, prompt: Sequence[int], page_size: int) -> torch.Tensor:
    """The same by a model that computes all of it at once."""
    count = len(prompt) // BLOCK * BLOCK
    model = PagedModel(path, page_size=page_size, block_size=BLOCK)
    pages = model.pages(count)
    model.forward(list(prompt[:count]), 0, pages, count, 0)
    layers = range(model.model.config.num_layers)
    kv = torch.stack([torch.stack(model.stored(layer, pages, count)) for layer in layers])
    return kv.transpose(2, 3)


@pytest.mark.parametrize(("page_size", "found"), [(4, 16), (2, 16), (8, 16), (3, 12), (16, 16)])
@pytest.mark.parametrize("architecture", ["sdar", "fast_dllm_v2"])
def test_only_what_follows_a_known_beginning_is_computed(
    make: Make, checkpoints: dict[str, Path], architecture: str, page_size: int, found: int
) -> None:
    rig = make(architecture, page_size=page_size)
    first, second = prompt_of(1, 18, 22), prompt_of(2, 18, 30)
    hand_over(rig, "a", first)
    assert computed(rig) == [(0, 20)]
    kv = hand_over(rig, "b", second)
    assert computed(rig) == [(found, 28 - found)]
    expected = expected_kv(checkpoints[architecture], second, page_size)
    assert float((kv - expected).abs().max()) <= 1e-5
    load = rig.engine.load()
    assert (load.prefix_queries, load.prefix_hits) == (20 + 28, found)
    rig.check_idle()


@pytest.mark.parametrize(("architecture", "end"), [("sdar", []), ("fast_dllm_v2", [(20, 4)])])
def test_of_the_same_prompt_again_only_a_needed_boundary_is_computed(
    make: Make, architecture: str, end: list[tuple[int, int]]
) -> None:
    rig = make(architecture)
    first, *others = (hand_over(rig, name, COMMON) for name in ("a", "b", "c"))
    for other in others:
        assert float((first - other).abs().max()) <= 1e-5
    assert computed(rig) == [(0, 24), *end, *end]
    rig.check_idle()


def test_the_boundary_row_goes_with_a_prompt_whose_beginning_is_known(make: Make) -> None:
    rig = make("fast_dllm_v2")
    rows = []
    for name in ("a", "b"):
        rig.push_to(rig.start(name, COMMON), 6)
        rig.settle()
        (arrived,) = rig.arrived()
        hidden = arrived.manifest.boundary.hidden
        assert hidden is not None
        rows.append(torch.frombuffer(bytearray(hidden), dtype=torch.float32))
    assert computed(rig) == [(0, 24), (20, 4)]
    assert float((rows[0] - rows[1]).abs().max()) <= 1e-5


def test_prompts_of_another_salt_share_nothing(make: Make) -> None:
    """A client that must not know another's prompts cannot detect them by the time of its own."""
    rig = make()
    for name, salt in (("a", ""), ("b", "acme"), ("c", "other"), ("d", "acme")):
        attempt = attempt_of(name)
        rig.engine.handle(
            StartPrefill(attempt=attempt, prompt_token_ids=tuple(COMMON), cache_salt=salt)
        )
        rig.settle()
        (done,) = rig.take(PrefillDone)
        assert done.cached_tokens == (24 if name == "d" else 0)
        rig.abort(attempt)
        rig.settle()
    assert computed(rig) == [(0, 24), (0, 24), (0, 24)]


def test_a_bidirectional_prompt_is_computed_whole(make: Make) -> None:
    """Its KV also depends on later tokens."""
    rig = make("dream")
    for name in ("a", "b"):
        rig.push_to(rig.start(name, COMMON), 6)
        rig.settle()
    assert computed(rig) == [(0, 24), (0, 24)]
    assert rig.engine.load().prefix_queries == 0


def test_without_prefix_caching_nothing_is_kept(make: Make) -> None:
    rig = make(caches=False)
    for name in ("a", "b"):
        hand_over(rig, name, COMMON)
    assert computed(rig) == [(0, 24), (0, 24)]
    assert rig.pool.num_free == rig.pool.num_pages
    rig.check_idle()


def test_a_beginning_is_found_while_its_prompt_still_waits_to_be_pushed(make: Make) -> None:
    rig = make(num_pages=8)
    first = rig.start("a", COMMON)
    rig.settle()
    second = rig.start("b", COMMON)
    rig.settle()
    assert computed(rig) == [(0, 24)]
    assert rig.engine.load().free_pages == 8 - 6
    rig.abort(first)  # its pages are the second one's, too
    rig.settle()
    rig.push_to(second, 6)
    rig.settle()
    assert len(rig.arrived()) == 1
    rig.take(PrefillDone), rig.take(PromptPushed), rig.take(AbortDone)
    rig.check_idle()


def test_prompts_computed_at_once_keep_one_of_them(make: Make) -> None:
    rig = make()
    rig.start("a", COMMON)
    second = rig.start("b", COMMON)
    rig.settle()
    assert computed(rig) == [(0, 24), (0, 24)]
    audit(rig.engine)
    rig.abort(second)
    rig.settle()
    hand_over(rig, "c", COMMON)
    assert not computed(rig)


def test_nothing_is_kept_of_a_forward_that_failed(make: Make) -> None:
    rig = make()
    rig.forward.fails = 1
    rig.start("a", COMMON)
    rig.settle()
    assert len(rig.take(Failed)) == 1
    computed(rig)
    hand_over(rig, "b", COMMON)
    assert computed(rig) == [(0, 24)]
    rig.check_idle()


def test_chunks_are_kept_as_they_are_computed(make: Make) -> None:
    rig = make(budget=8)
    rig.start("a", COMMON)
    rig.step()
    rig.step()
    ended = rig.start("b", COMMON)  # begins behind the first, knows what that has by then
    rig.settle()
    parts = computed(rig)
    assert parts[:2] == [(0, 8), (8, 8)]
    assert sum(count for _, count in parts) < 2 * 24
    rig.abort(ended)
    audit(rig.engine)


def test_others_take_the_pages_of_what_was_used_longest_ago(make: Make) -> None:
    rig = make(num_pages=12)
    old, newer = prompt_of(1, 0, 24), prompt_of(2, 0, 24)
    hand_over(rig, "old", old)
    hand_over(rig, "newer", newer)
    assert rig.pool.count(PageState.FREE) == 0
    hand_over(rig, "third", prompt_of(3, 0, 16))  # its 4 are the end of the oldest
    computed(rig)
    hand_over(rig, "newer again", newer)
    hand_over(rig, "old again", old)
    assert computed(rig) == [(8, 16)]
    rig.check_idle()


def test_what_a_prompt_finds_is_not_taken_to_make_room_for_it(make: Make) -> None:
    rig = make(num_pages=8)
    hand_over(rig, "a", COMMON)
    longer = [*COMMON, *prompt_of(5, 0, 8)]
    hand_over(rig, "b", longer)
    assert computed(rig) == [(0, 24), (24, 8)]
    rig.check_idle()


def test_what_a_prompt_finds_counts_once_and_not_as_room_as_well(make: Make) -> None:
    rig = make(num_pages=8)
    hand_over(rig, "a", COMMON)
    other = rig.start("b", prompt_of(6, 0, 8))
    rig.settle()
    last = rig.start("c", [*COMMON, *prompt_of(5, 0, 8)])  # finds six pages, and needs two more
    rig.settle()
    assert rig.engine.load().waiting == 1
    rig.abort(other)
    rig.settle()
    assert [done.attempt for done in rig.take(PrefillDone)] == [other, last]


def test_a_rehearsal_has_the_pages_that_only_the_cache_holds(make: Make) -> None:
    rig = make(num_pages=8)
    hand_over(rig, "a", prompt_of(1, 0, 32))
    assert rig.pool.count(PageState.FREE) == 0
    rig.engine.handle(PushRehearsal(reservation=rig.reserve(AttemptId("r", 1, "t"), 4)))
    rig.settle()
    assert len(rig.take(PromptPushed)) == 1
    rig.check_idle()


@pytest.mark.parametrize(
    ("sizes", "free", "num_waiting"),
    [([2, 2, 2], 5, 1), ([3, 3, 1], 5, 2), ([1, 1, 1, 1], 9, 1), ([5], 5, 0)],
    ids=str,
)
def test_admission_is_first_come_first_served_by_free_pages(
    make: Make, sizes: list[int], free: int, num_waiting: int
) -> None:
    rig = make(num_pages=free, max_num_seqs=3)
    for at, pages in enumerate(sizes):
        rig.start(str(at), prompt_of(at, 0, 4 * pages))
    rig.step()
    assert rig.engine.load().waiting == num_waiting


# The accounting by itself.


def cached(cache: UnitCache, tokens: Sequence[int]) -> None:
    """Computes a prompt and ends it."""
    units = cache.begin("", tokens, len(tokens))
    pages = cache.take(units, len(tokens))
    new = cache._pool.allocate_committed(len(tokens) // 4 - len(pages))
    assert new is not None
    cache.add(units, pages + new, len(tokens))
    cache.end(units)
    cache._pool.release(pages + new)


def test_ends_of_prompts_make_room_before_their_beginnings() -> None:
    pool = PagePool(8)
    cache = UnitCache(pool, page_size=4, unit_size=4)
    cached(cache, COMMON)
    assert (pool.count(PageState.FREE), pool.num_free) == (2, 8)
    taken = pool.allocate_committed(4)  # two free ones and the last two
    assert taken is not None
    keys = cache.begin("", COMMON, 24).keys
    assert [key in cache._units for key in keys] == [True] * 4 + [False] * 2
    assert pool.allocate_committed(5) is None
    assert pool.num_free == 4, "what cannot be had takes nothing"


def test_a_unit_goes_by_all_tokens_up_to_its_end() -> None:
    cache = UnitCache(PagePool(8), page_size=2, unit_size=4)
    assert cache.unit_size == 4
    keys = cache.begin("", [1, 2, 3, 4, 5, 6, 7, 8, 9], 9).keys
    others = cache.begin("", [9, 2, 3, 4, 5, 6, 7, 8], 8).keys
    assert len(keys) == 2 and not set(keys) & set(others)
    assert cache.begin("", [1, 2, 3, 4, 0, 6, 7, 8], 8).keys[0] == keys[0]


def storm(path: Path, seed: int, device: str = "cpu", tolerance: float = 1e-5) -> None:
    """Prompts with and without the same beginning, handed over or abandoned; every arrived page is
    compared with a model that computes all of it.
    """
    rng = random.Random(seed)
    page_size = rng.choice([2, 3, 4, 8]) if device == "cpu" else 16
    rig = Rig(
        path,
        page_size=page_size,
        budget=rng.choice([8, 16, 64]),
        num_pages=rng.choice([20, 32]) if device == "cpu" else 6,
        mark=mark_of(torch.device(device)),
        device=device,
    )
    for name in range(30):
        length = rng.randrange(1, 37)
        prompt = prompt_of(rng.randrange(6), rng.randrange(min(length, 24) + 1), length)
        num_paged = length // BLOCK * BLOCK
        attempt = rig.start(str(name), prompt)
        for _ in range(rng.randrange(3)):
            rig.step()
            audit(rig.engine)
        if rng.random() < 0.2:
            rig.abort(attempt)
            continue
        rig.push_to(attempt, -(-num_paged // page_size))
        rig.settle()
        (arrived,) = rig.arrived()
        if num_paged:
            expected = expected_kv(path, prompt, page_size)
            assert float((rig.handed(arrived, num_paged) - expected).abs().max()) <= tolerance
        rig.target_pool.release(rig.pages_of(arrived))
        audit(rig.engine)
    rig.settle()
    assert rig.engine.load().prefix_hits > 0
    rig.take(PrefillDone), rig.take(PromptPushed), rig.take(AbortDone)
    rig.check_idle()
    rig.close()


@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_arrives_as_if_all_of_it_were_computed(
    checkpoints: dict[str, Path], seed: int
) -> None:
    storm(checkpoints["sdar"], seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", range(6))
def test_on_a_device_as_well(tmp_path: Path, seed: int) -> None:
    sizes = TinySizes(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    path = write_tiny_checkpoint(tmp_path, "sdar", gain=0.5, sizes=sizes, block_size=BLOCK)
    storm(path, seed, "cuda", 1e-4)


def test_the_storm_finds_units_that_go_by_their_own_tokens_alone(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def extend(cache: UnitCache, one: HeldUnits, tokens: Ids, num_tokens: int) -> None:
        size = cache.unit_size
        one.keys[:] = [repr(tokens[at : at + size]).encode() for at in range(0, num_tokens, size)]

    monkeypatch.setattr(UnitCache, "extend", extend)
    with pytest.raises(AssertionError):
        for seed in range(12):
            storm(checkpoints["sdar"], seed)
