"""Engines of several processes: equal answers, and an end of all if one ends or differs."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from auditing import audit
from checkpoints import TinySizes, architecture_of, write_tiny_checkpoint
from expert_checkpoints import write_expert_checkpoint
from kvtransfer.fixtures import SMALL, boundary, reservation
from slowness import patient
from worker.planted import plant, ranks_of

import effuse
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.replicas import ReplicatedEngine
from effuse.decode_worker.room import Room
from effuse.kvtransfer.connector import FinishPush, PushPages
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import PageRef, ReceiverAddress
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.models.group import ProcessGroup
from effuse.protos.errors import EngineLost
from effuse.worker import assembly, rank_messages, ranks
from effuse.worker.config import WorkerConfig
from effuse.worker.group_parts import GroupHost
from effuse.worker.messages import RankOrders
from effuse.worker.rank_messages import (
    COMMANDS,
    ENCODER,
    CopyPage,
    ForwardProgress,
)
from effuse.worker.watchdog import BROKEN_STATUS, GroupBroken, ended_by

DESCRIPTORS = Path("/proc/self/fd")
QUESTIONS = ["ab", "the second prompt, which is longer", "c" * 40]
PARAMS = [
    effuse.Params(max_tokens=24, ignore_eos=True),
    effuse.Params(max_tokens=20, n=2, temperature=0.8, top_p=0.9, top_k=20, seed=7),
    effuse.Params(max_tokens=16, temperature=0.7, seed=3, logprobs=2, repetition_penalty=1.2),
]


def process_of(llm: effuse.LLM, rank: int = 1) -> subprocess.Popen[bytes]:
    """The process of a rank of this host."""
    process = ranks_of(llm)._others[rank].process
    assert process is not None
    return process


def answers(llm: effuse.LLM) -> list[list[tuple[int, ...]]]:
    made = llm.generate(QUESTIONS, PARAMS)
    return [[one.token_ids for one in (answer, *answer.others)] for answer in made]


@pytest.mark.parametrize(("family", "group_options"), [
    ("dream", {"tensor_parallel_size": 2}),
    ("llada2_moe", {"tensor_parallel_size": 2, "expert_parallel": True}),
    ("llada2_moe", {"data_parallel_size": 2}),
    ("sdar", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    ("dream", {"pipeline_parallel_size": 3}),
])  # fmt: skip
def test_a_group_answers_as_one_process_does(
    tmp_path: Path, family: str, group_options: dict[str, Any]
) -> None:
    sizes = TinySizes(num_heads=8, num_kv_heads=2, head_dim=4)
    size = max(group_options.values())
    path = (
        write_expert_checkpoint(tmp_path, "llada2_moe")
        if family == "llada2_moe"
        else write_tiny_checkpoint(tmp_path, architecture_of(family), seed=2, sizes=sizes)
    )
    # Too few pages for all at once, so that requests are preempted.
    options: dict[str, Any] = {"device": "cpu", "page_size": 8, "max_model_len": 96}
    num_pages = 16 // group_options.get("decode_context_parallel_size", 1)
    with effuse.LLM(path, num_pages=16, **options) as one:
        expected = answers(one)
    with effuse.LLM(path, **group_options, num_pages=num_pages, **options) as group:
        assert answers(group) == expected
        pids = [process_of(group, rank).pid for rank in range(1, size)]
        assert len(pids) == len(ranks_of(group)._others)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_kept_kv_comes_back_from_the_host_memory_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "prompt_s", lambda *_: 0.0)  # computing is never known to be faster
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=2, block_size=4)
    options: dict[str, Any] = {"device": "cpu", "num_pages": 24, "max_model_len": 64}
    prompts = [[20 + seed, *range(30, 69)] for seed in range(4)]
    asked = effuse.Params(max_tokens=8, ignore_eos=True)
    with effuse.LLM(path, enable_prefix_caching=False, page_size=8, **options) as one:
        expected = [one.generate(prompt, asked)[0].token_ids for prompt in prompts]
    cut: dict[str, Any] = {"decode_context_parallel_size": 2, "page_size": 4}
    with effuse.LLM(
        path, tensor_parallel_size=2, kv_offloading_size=0.001, **cut, **options
    ) as group:
        core = group._core
        assert isinstance(core, DecodeEngine) and isinstance(core._cache, TieredCache)
        for loaded, corrupt in ((0, 0), (4 * 4, 0), (4 * 4, 4)):
            assert [group.generate(p, asked)[0].token_ids for p in prompts] == expected
            load, host = core.load(), core._cache.tiers.host
            page_bytes = host.page_bytes
            assert isinstance(host, GroupHost)
            assert core._handoffs.page_bytes == page_bytes, "of all ranks"
            assert load.offload_loaded >= loaded * page_bytes
            assert (load.offload_corrupt >= corrupt) if corrupt else not load.offload_corrupt
            while core._cache.is_copying or core._cache._due:
                core.step()
            pages = core._pool.allocate_committed(24)
            assert pages is not None
            core._pool.release(pages)
            if loaded:
                for kept in core._cache.tiers.kept.values():
                    host._own.views(kept.slots)[0][3] ^= 1


@pytest.fixture
def group(tmp_path: Path) -> Iterator[effuse.LLM]:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=2)
    with effuse.LLM(path, device="cpu", num_pages=64, tensor_parallel_size=2) as made:
        yield made


@pytest.mark.parametrize(("family", "message"), [
    ("sdar", "has no experts"), ("llada2_moe", "experts are not a multiple of 3 replicas"),
])  # fmt: skip
def test_replicas_of_a_model_that_they_cannot_share_are_refused(
    tmp_path: Path, family: str, message: str
) -> None:
    if family == "sdar":
        write_tiny_checkpoint(tmp_path, "sdar")
    else:
        write_expert_checkpoint(tmp_path, "llada2_moe")
    with pytest.raises(ValueError, match=message):
        effuse.LLM(tmp_path, device="cpu", data_parallel_size=3)


def test_replicas_of_several_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="--data-parallel-size: expected --tensor-parallel-size 1"):
        effuse.LLM(device="cpu", data_parallel_size=2, tensor_parallel_size=2)


def test_requests_spread_over_replicas_and_a_lost_one_ends_all(tmp_path: Path) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe")
    # Each replica takes one request at a time, so two run only if both take part.
    options: dict[str, Any] = {"device": "cpu", "num_pages": 64, "max_num_seqs": 1}
    with effuse.LLM(path, data_parallel_size=2, **options) as llm:
        llm.generate(["a", "b", "c", "d"], effuse.Params(max_tokens=8, ignore_eos=True))
        core, collectives = llm._core, ranks_of(llm).group
        assert isinstance(core, ReplicatedEngine)
        assert [engine.counters.step_requests > 0 for engine in core._engines] == [True, True]
        audit(core)
        assert core.load().free_pages == core.load().total_pages == 128
        os.kill(process_of(llm).pid, signal.SIGKILL)
        with pytest.raises(GroupBroken, match="rank 1 has ended with status -9"):
            llm.generate(["a", "b"])
    assert isinstance(collectives, ProcessGroup)
    assert collectives._collectives is None  # an engine with graphs would wait for open ones


def test_a_rank_that_ends_breaks_its_group(group: effuse.LLM) -> None:
    assert answers(group)
    process = process_of(group)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(GroupBroken, match="rank 1 has ended with status -9"):
        group.generate("ab")
    with pytest.raises(GroupBroken):
        group.generate("ab")


def test_a_rank_that_a_signal_has_stopped_breaks_its_group_although_it_is_idle(
    group: effuse.LLM,
) -> None:
    process = process_of(group)
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + patient(10.0)
    while ranks_of(group)._failure is None and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(GroupBroken, match="a signal has stopped rank 1"):
        group.generate("ab")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes of ranks, as they are spawned."""
    spawn, found = rank_messages.spawn, list[subprocess.Popen[bytes]]()

    def spawn_and_keep(orders: RankOrders) -> subprocess.Popen[bytes]:
        found.append(spawn(orders))
        return found[-1]

    monkeypatch.setattr(ranks, "spawn", spawn_and_keep)
    return found


def test_no_rank_is_left_if_the_leader_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawned: list[subprocess.Popen[bytes]]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(assembly, "make_part", fail)
    path = write_tiny_checkpoint(tmp_path, "sdar")
    with pytest.raises(ValueError, match="planted"):
        effuse.LLM(path, device="cpu", tensor_parallel_size=2)
    assert [one.poll() is None for one in spawned] == [False]


@pytest.mark.parametrize(("failing", "num_before"), [
    ("effuse.worker.ranks.spawn", 1), ("os.pidfd_open", 1), ("threading.Thread.start", 0),
    ("os.pidfd_open", 9),
])  # fmt: skip
def test_a_group_leaves_nothing_whatever_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, num_before: int
) -> None:
    processes, homes = list[subprocess.Popen[bytes]](), list[Path]()

    def spawn(_: RankOrders) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(("sleep", "600")))
        return processes[-1]

    def make_home() -> Path:
        homes.append(tmp_path / str(len(homes)))
        homes[-1].mkdir()
        return homes[-1]

    monkeypatch.setattr(ranks, "spawn", spawn)
    monkeypatch.setattr(ranks, "make_home", make_home)
    monkeypatch.setattr(ranks, "_QUIT_S", 0.1)  # these processes read no commands
    works, calls = pkgutil.resolve_name(failing), count()

    def fail(*args: Any) -> Any:
        if next(calls) >= num_before:
            raise OSError("planted")
        return works(*args)

    monkeypatch.setattr(failing, fail)
    config, descriptors = WorkerConfig(tensor_parallel_size=3), list(DESCRIPTORS.iterdir())
    with pytest.raises(OSError, match="planted") if num_before < 9 else contextlib.nullcontext():
        ranks.Ranks(config, "decode", "life-1").close()
    assert len(list(DESCRIPTORS.iterdir())) == len(descriptors)
    assert [one.returncode for one in processes] == [-signal.SIGKILL] * len(processes)
    assert [home.exists() for home in homes] == [False]
    assert "ranks" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_a_signal_stops_as_it_starts_does_not_outlive_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawned: list[subprocess.Popen[bytes]]
) -> None:
    """It has not yet asked to die with its leader."""
    spawn = vars(ranks)["spawn"]  # of the fixture

    def stopped(orders: RankOrders) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = spawn(orders)
        process.send_signal(signal.SIGSTOP)
        return process

    ended: list[int] = []

    def note(_message: str, _ending: str) -> None:
        """Here an engine with a front ends its process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended.append(spawned[0].wait(patient(10.0)))  # before the leader closes its group

    monkeypatch.setattr(ranks, "spawn", stopped)
    monkeypatch.setattr(assembly, "note_only", note)
    path = write_tiny_checkpoint(tmp_path, "sdar")
    with pytest.raises(GroupBroken, match="a signal has stopped rank 1"):
        effuse.LLM(path, device="cpu", tensor_parallel_size=2)
    assert ended == [-signal.SIGKILL]


@pytest.mark.parametrize("kind", ["number", "earlier"])
def test_a_rank_that_reads_another_command_breaks_its_group(kind: str) -> None:
    found = plant(kind, seed=1)
    assert not found.has_answered
    assert found.seconds < patient(60.0)  # `python -m worker.planted` asks for two
    # Its process may also end by itself, if a collective had two sizes.
    assert not found.lines or "rank 1" in found.lines[0] or "forward failed" in found.lines[0]


@pytest.mark.parametrize(
    ("status", "ending", "may_be_outside"),
    [
        (-signal.SIGKILL, "killed", True),
        (-signal.SIGSEGV, "died", False),
        (3, "died", False),
        *((status, how, how != "died") for how, status in BROKEN_STATUS.items()),
    ],
)
def test_an_engine_whose_rank_was_killed_or_stopped_did_not_die_of_its_requests(
    status: int, ending: str, may_be_outside: bool
) -> None:
    """Otherwise two kills of ranks would have each request wait for a worker of its own."""
    assert ended_by(status).ending == ending
    lost = EngineLost("it ended", retry_after_s=1.0, labels={"ending": ending})
    assert lost.may_be_outside == may_be_outside


def test_a_model_that_cannot_be_cut_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar")
    with pytest.raises(ValueError, match=re.escape("--tensor-parallel-size 3: 4 attention heads")):
        effuse.LLM(path, device="cpu", tensor_parallel_size=3)


def test_no_command_is_lost_in_its_encoding() -> None:
    assert COMMANDS.decode(ENCODER.encode(CopyPage(3, 4))) == CopyPage(3, 4)


def test_of_a_push_only_the_forwards_number_and_the_boundary_travel() -> None:
    address = ReceiverAddress(connector="zmq", endpoint="tcp://127.0.0.1:9")
    reserved = reservation(PageMemory(SMALL, 4), address, (PageRef(1, 1),))
    progress = ForwardProgress(7)
    progress.stored = lambda: 3
    pages = PushPages(reserved, (0,), 0, progress)
    found = COMMANDS.decode(ENCODER.encode(pages))
    assert isinstance(found, PushPages) and isinstance(found.num_final, ForwardProgress)
    assert (found.reservation, found.source_pages) == (reserved, (0,))
    assert (found.num_final.number, found.num_final.stored) == (7, None)
    finish = COMMANDS.decode(ENCODER.encode(FinishPush(reserved, boundary)))
    assert isinstance(finish, FinishPush) and finish.boundary() == boundary()
