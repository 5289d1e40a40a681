"""A worker that replaces another one while that still serves: its command, and whether its device
has memory for both.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from effuse.cli.commands import value_of
from effuse.cli.gpus import Assignment
from effuse.worker.config import WorkerConfig
from effuse.worker.gpus import Memory, gpus_here, memory_of

_MORE_MIB = 2048  # in addition to a worker's share: CUDA's context, captured graphs


def renamed(command: Sequence[str], worker_id: str, before: Path, after: Path) -> list[str]:
    """The command of a worker with another id, and `after` as ready file instead of `before`."""
    words = [str(after) if word == str(before) else word for word in command]
    if "--worker-id" in words:
        words[words.index("--worker-id") + 1] = worker_id
    return words


def has_room_beside(
    command: Sequence[str],
    gpu: Assignment | None,
    *,
    gpus: Callable[[], Sequence[str]] = gpus_here,
    memory: Callable[[str], Memory | None] = memory_of,
) -> bool:
    """Whether a worker's device has memory for a second one with this command.

    A CPU always has it. A worker on a GPU takes its share of all memory, so that much must be free
    now according to the driver; without the driver's figure there is no room.
    """
    if value_of(command, "--device") == "cpu" or not (gpu or gpus()):
        return True
    found = [] if gpu is None else [memory(name) for name in gpu.names]
    share = value_of(command, "--gpu-memory-utilization") or WorkerConfig.gpu_memory_utilization
    return bool(found) and all(
        one is not None and one.free_mib >= float(share) * one.total_mib + _MORE_MIB
        for one in found
    )
