"""Chats whose next turns begin with all tokens before them, through real processes."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from e2e.client import all_at_once
from e2e.processes import engine_of
from e2e.test_metrics import scrape
from e2e.tiny import TINY, tiny_fleet

import effuse
from effuse.cli.fleet import Fleet

TURNS, USER, ANSWER, PAGE = 8, 8, 20, 8
Turns = list[tuple[list[int], tuple[int, ...]]]


def params(chat: int) -> effuse.Params:
    heat = 0.8 if chat % 2 else 0.0
    return effuse.Params(max_tokens=ANSWER, ignore_eos=True, temperature=heat, seed=chat)


def said(chat: int) -> list[int]:
    return random.Random(chat).choices(TINY.plain_ids, k=USER * TURNS)


def talk(
    fleet: Fleet, chats: Sequence[int], kills: Mapping[int, str] = MappingProxyType({})
) -> tuple[list[Turns], int]:
    """Prompts and answers of these chats, and the KV bytes that were handed over. A worker of
    `kills`, or with "engine of" its engine, is killed in the turn with this number.
    """
    turns, moved = [Turns() for _ in chats], 0
    with effuse.Client(fleet.address, timeout_s=120) as client:
        for turn in range(TURNS):
            for at, (chat, own) in enumerate(zip(chats, turns, strict=True)):
                if at == 1 and turn in kills:
                    process = fleet.processes[kills[turn].split()[-1]]
                    if kills[turn].startswith("engine"):
                        engine_of(process.pid).kill()
                    else:
                        process.send(signal.SIGKILL)
                before = [*own[-1][0], *own[-1][1]] if own else []
                prompt = [*before, *said(chat)[turn * USER : (turn + 1) * USER]]
                answer = client.generate(prompt, params(chat))
                moved += answer.stats.kv_bytes
                own.append((prompt, tuple(answer.token_ids)))
    return turns, moved


def counted(fleet: Fleet, name: str) -> float:
    """A counter of decode-0."""
    samples = scrape(fleet).items()
    return sum(n for key, n in samples if key[:2] == (f"effuse_{name}_total", "decode-0"))


def check_tokens(model: Path | str | None, chats: Sequence[int], turns: Sequence[Turns]) -> None:
    """The same prompts in one process, without a cache and with one."""
    for caches in (False, True):
        with effuse.LLM(
            model, device="cpu", block_size=TINY.block_size, enable_prefix_caching=caches
        ) as llm:
            for chat, own in zip(chats, turns, strict=True):
                found = llm.generate([prompt for prompt, _ in own], params(chat))
                assert [tuple(one.token_ids) for one in found] == [one for _, one in own]


def test_only_the_rest_of_a_chat_is_handed_over() -> None:
    chats = range(4)
    with tiny_fleet("sdar", connector="zmq", worker_flags=("--page-size", str(PAGE))) as fleet:
        turns, moved = talk(fleet, chats)
        held, hits = counted(fleet, "kv_held_bytes"), counted(fleet, "prefix_cache_hits")
        check_tokens(fleet.config.model, chats, turns)
    page_bytes = TINY.page_bytes * PAGE // TINY.page_size
    pages = sum(len(prompt) // TINY.block_size for own in turns for prompt, _ in own)
    assert 0 < moved <= pages * page_bytes / 3
    assert held == pages * page_bytes - moved
    assert hits > 0


def test_chats_go_on_from_host_memory_and_files(tmp_path: Path) -> None:
    """Of a decode worker with pages for little more than one chat. Its second engine finds the
    files of the first one."""
    chats = range(4)
    flags = ["--kv-offloading-size", "0.0002", "--kv-offloading-dir", str(tmp_path)]
    with tiny_fleet("sdar", connector="zmq", num_pages=20, worker_flags=tuple(flags)) as fleet:
        turns, _ = talk(fleet, chats, {5: "engine of decode-0"})
        loaded, read = (counted(fleet, f"kv_offload_{name}_bytes") for name in ("loaded", "read"))
        assert counted(fleet, "kv_offload_corrupt") == 0
        check_tokens(fleet.config.model, chats, turns)
    assert loaded > 0 and read > 0


def test_a_worker_by_itself_computes_only_the_rest() -> None:
    """Seven eighths in common."""
    rng = random.Random(7)
    common = rng.choices(TINY.plain_ids, k=112)
    prompts = [[*common, *rng.choices(TINY.plain_ids, k=16)] for _ in range(9)]
    asked = effuse.Params(max_tokens=8, ignore_eos=True)
    with (
        tiny_fleet("sdar", connector="zmq", prefill=0) as fleet,
        effuse.Client(fleet.address, timeout_s=120) as client,
    ):
        answers = [client.generate(prompts[0], asked)]
        answers += all_at_once(lambda prompt: client.generate(prompt, asked), prompts[1:])
        computed = counted(fleet, "own_prompt_tokens")
        model = fleet.config.model
        assert [one.stats.cached_prompt_tokens for one in answers] == [0] + 8 * [112]
        assert computed == 128 + 8 * 16
        with effuse.LLM(model, device="cpu", block_size=8, enable_prefix_caching=False) as llm:
            assert [a.token_ids for a in answers] == [
                one.token_ids for one in llm.generate(prompts, asked)
            ]
