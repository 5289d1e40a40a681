"""Device steps of a group: the ranks' slots follow the leader's commands, and tokens stay equal."""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from typing import cast

import msgspec
import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, load_tiny, of_length, random_requests
from thread_group import run_ranks

from effuse.decode_worker import device_buckets
from effuse.decode_worker.executor import Executor
from effuse.models.group import RankPlace
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.worker.group_parts import GroupRunner
from effuse.worker.messages import StartDecode
from effuse.worker.rank_messages import (
    COMMANDS,
    ENCODER,
    Command,
    CopyPage,
    LaunchStep,
    Quit,
    RunParts,
    Slots,
)
from effuse.worker.ranks import Ranks

SIZES = TinySizes(num_heads=4, num_kv_heads=2, head_dim=8)
SIZES_OF = {"llada": TinySizes(num_heads=4, num_kv_heads=4, head_dim=8)}


class Followers:
    """The leader's way to ranks that are threads."""

    def __init__(self, queues: list[Queue[bytes]]) -> None:
        self.queues = queues
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)
        for queue in self.queues:
            queue.put(ENCODER.encode(command))

    def confirm(self, count: int | None = None) -> None:
        pass

    def check(self) -> None:
        pass

    def failed(self, error: Exception) -> None:
        raise AssertionError("a forward failed") from error


class LeaderRig(DeviceRig):
    """A rig whose forwards and steps run on all ranks."""

    def __init__(self, model: Transformer, followers: Followers) -> None:
        self.followers = followers
        super().__init__(model, num_pages=64)

    def make_executor(self) -> Executor:
        self.ranks = cast("Ranks", self.followers)
        self.forward = GroupRunner(cast("ModelRunner", self.forward), self.ranks)
        return super().make_executor()


def follow(model: Transformer, queue: Queue[bytes]) -> None:
    rig = DeviceRig(model, num_pages=64)
    while not isinstance(command := COMMANDS.decode(queue.get(timeout=60)), Quit):
        match command:
            case RunParts(parts=parts):
                rig.forward.run(parts)
            case CopyPage(source=source, target=target):
                rig.memory.copy_page(source, target)
            case _:
                assert isinstance(command, Slots)
                rig.stepper.execute(command)


def tokens_of(rig: Rig, requests: list[StartDecode]) -> list[list[int]]:
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    return [list(rig.answers[request.attempt.transfer_id].token_ids) for request in requests]


@pytest.mark.parametrize("algorithm", ["d2f", "block_diffusion"])
@pytest.mark.parametrize(
    ("architecture", "size"), [(one, 2) for one in ARCHITECTURES] + [("sdar", 4)]
)
def test_ranks_take_the_same_steps(
    tmp_path: Path, architecture: Architecture, algorithm: str, size: int
) -> None:
    sizes = SIZES_OF.get(architecture, SIZES)
    directory = write_tiny_checkpoint(tmp_path, architecture, seed=3, sizes=sizes)
    requests = [
        of_length(request, 14)
        for request in random_requests(5, algorithm, block_size=4, sampled=True)
    ]
    expected = tokens_of(Rig(load_tiny(directory), num_pages=64), requests)
    found, followers = in_a_group(directory, size, requests)
    assert found == expected
    kinds = {type(command).__name__ for command in followers.sent}
    assert {"RunParts", "JoinSlot", "LaunchStep", "LeaveSlot"} <= kinds


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_the_same_beginnings_together(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_buckets, "LEAST_SAVED", 1)
    monkeypatch.setattr(device_buckets, "LEAST_SAVED_EACH", 0)
    directory = write_tiny_checkpoint(tmp_path, "sdar", seed=3, sizes=SIZES)
    prompts = [tuple(range(20, 33)), tuple(range(40, 49))]
    requests = [
        msgspec.structs.replace(
            of_length(request, 8 + number),
            prompt_token_ids=prompts[number % 2],
            group=str(number % 2),
        )
        for number, request in enumerate(random_requests(7, "d2f", block_size=4, sampled=True))
    ]
    expected = tokens_of(Rig(load_tiny(directory), num_pages=64), requests)
    found, followers = in_a_group(directory, size, requests)
    assert found == expected
    launches = [command for command in followers.sent if isinstance(command, LaunchStep)]
    assert sum(command.shares for command in launches) > 3


def in_a_group(
    directory: Path, size: int, requests: list[StartDecode]
) -> tuple[list[list[int]], Followers]:
    """Tokens of the requests on ranks that are threads."""
    queues: list[Queue[bytes]] = [Queue() for _ in range(size - 1)]
    followers = Followers(queues)

    def work(place: RankPlace) -> list[list[int]]:
        model = load_model(directory, place=place)
        if place.rank:
            follow(model, queues[place.rank - 1])
            return []
        try:
            return tokens_of(LeaderRig(model, followers), requests)
        finally:
            followers.send(Quit())

    torch.set_num_threads(1)
    return run_ranks(size, work)[0], followers
