"""Device steps of replicas: each advances its own slots in steps of all, and tokens stay equal."""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from typing import Any, cast

import pytest
import torch
from decode_worker.test_group_steps import Followers, tokens_of
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, make_request, of_length, random_requests
from expert_checkpoints import write_expert_checkpoint
from thread_group import run_ranks

from effuse.decode_worker.build import replicated
from effuse.decode_worker.device_stepper import Launched
from effuse.decode_worker.replica_steps import ReplicaStepper
from effuse.decode_worker.replicas import ReplicatedEngine
from effuse.kvtransfer.units import unit_tokens_of
from effuse.models.group import RankPlace
from effuse.models.part import PartResult
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.worker.assembly import Assembly
from effuse.worker.config import DecodeConfig
from effuse.worker.group_parts import GroupRunner
from effuse.worker.messages import StartDecode
from effuse.worker.rank_messages import (
    COMMANDS,
    CopyPage,
    ForReplica,
    Prepare,
    Quit,
    RunParts,
    Slots,
)
from effuse.worker.ranks import Ranks

NUM_PAGES = 20  # of each replica: so few that they preempt


class Replicas(Followers):
    """The leader's way to replicas that are threads."""

    def __init__(self, size: int) -> None:
        super().__init__([Queue() for _ in range(size - 1)])
        self.results: list[Queue[list[PartResult]]] = [Queue() for _ in range(size - 1)]
        self.event_signal = -1

    def computed(self, _number: int) -> list[list[PartResult]]:
        return [queue.get(timeout=60) for queue in self.results]


class ReplicatedRig(DeviceRig):
    """A rig around the engines of all replicas."""

    def __init__(self, model: Transformer, replicas: Replicas, size: int) -> None:
        super().__init__(model, num_pages=NUM_PAGES)
        ranks = cast("Ranks", replicas)
        parts: Any = Assembly(
            model=model,
            memory=self.memory,
            runner=GroupRunner(cast("ModelRunner", self.forward), ranks),
            queued=None,
            fingerprint=self.fingerprint,
            connect=lambda: None,  # type: ignore[arg-type, return-value]
            max_model_len=self.limits.max_model_len,
            ready=None,  # type: ignore[arg-type]
            ranks=ranks,
            caches=True,
            tiers=None,
            unit_tokens=unit_tokens_of(self.memory.layout.span, model.config.block_size),
        )
        config = DecodeConfig(data_parallel_size=size)
        built = replicated(config, "1ab", parts, self.limits, None, on_device=True)
        self.engine = built.core  # type: ignore[assignment]


def follow(model: Transformer, rank: int, replicas: Replicas) -> None:
    rig = DeviceRig(model, num_pages=NUM_PAGES)
    queue, results = replicas.queues[rank - 1], replicas.results[rank - 1]
    while not isinstance(command := COMMANDS.decode(queue.get(timeout=60)), Quit):
        if isinstance(command, ForReplica):
            if command.replica != rank:
                continue
            command = command.command
        match command:
            case RunParts(parts=parts):
                results.put(rig.forward.run(parts))
            case CopyPage(source=source, target=target):
                rig.memory.copy_page(source, target)
            case Prepare():
                pass
            case _:
                assert isinstance(command, Slots)
                rig.stepper.execute(command)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
def test_replicas_step_together(tmp_path: Path, algorithm: str, size: int) -> None:
    directory = write_expert_checkpoint(tmp_path, "llada2_moe", 5)
    requests: list[StartDecode] = [
        of_length(request, 14)
        for request in random_requests(7, algorithm, block_size=4, sampled=True)
    ]
    expected = tokens_of(Rig(load_tiny(directory), num_pages=64), requests)
    replicas = Replicas(size)

    def work(place: RankPlace) -> tuple[list[list[int]], list[int]]:
        model = load_model(directory, place=place)
        if place.rank:
            follow(model, place.rank, replicas)
            return [], []
        try:
            rig = ReplicatedRig(model, replicas, size)
            tokens = tokens_of(rig, requests)
            core = cast("ReplicatedEngine", rig.engine)
            return tokens, [engine.counters.step_requests for engine in core._engines]
        finally:
            replicas.send(Quit())

    torch.set_num_threads(1)
    tokens, shares = run_ranks(size, work, data_parallel=True)[0]
    assert tokens == expected
    assert all(shares)
    joined = [
        one.replica
        for one in replicas.sent
        if isinstance(one, ForReplica) and type(one.command).__name__ == "JoinSlot"
    ]
    assert set(joined) == set(range(1, size))


def test_a_step_that_waits_for_another_replica_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_expert_checkpoint(tmp_path, "llada2_moe", 5)
    replicas, is_slow, ended = Replicas(2), [False], Launched.has_ended
    monkeypatch.setattr(Launched, "has_ended", lambda self: not is_slow[0] and ended(self))

    def work(place: RankPlace) -> list[int]:
        model = load_model(directory, place=place)
        if place.rank:
            follow(model, place.rank, replicas)
            return []
        try:
            rig = ReplicatedRig(model, replicas, 2)
            core = cast("ReplicatedEngine", rig.engine)
            for name, num_steps in (("a", 6), ("b", 20)):
                is_slow[0] = name == "b"  # on the other replica
                core.handle(make_request(name, [30, 31, 32], max_tokens=40, stop_token_ids=()))
                for _ in range(num_steps):
                    core.step()
            slots = core._engines[1]._executor._slots
            assert slots is not None
            assert isinstance(slots.stepper, ReplicaStepper)
            running = slots.stepper.num_ahead + slots.stepper.asks
            return [len(core._engines[1].room._launched), running]
        finally:
            replicas.send(Quit())

    torch.set_num_threads(1)
    noted, running = run_ranks(2, work, data_parallel=True)[0]
    assert noted == running <= 2
