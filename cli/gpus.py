"""The GPU of each worker of a fleet, as a function of values.

A GPU has the name from CUDA_VISIBLE_DEVICES, a number or an id (GPU-.. or MIG-..), and is passed on
under that name. `worker/gpus.py` lists the GPUs of a machine.
"""

import argparse
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from effuse.worker.gpus import NAME


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's GPU, or its GPUs."""

    gpu: str  # its name, or names with commas between them, as in CUDA_VISIBLE_DEVICES
    share: float  # this worker's share of it: all, or an equal part for each of its workers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its GPUs, by rank."""
        return tuple(self.gpu.split(","))

    def __str__(self) -> str:
        several = len(self.names) > 1
        name = f"GPUs {self.gpu}" if several else _label(self.gpu)
        return name if self.share == 1 else f"{name} (1/{round(1 / self.share)} of its memory)"


def assign(
    prefill: int,
    decode: int,
    workers: int = 0,
    *,
    gpus: Sequence[str] | None,
    prefill_gpus: Sequence[str] | None = None,
    decode_gpus: Sequence[str] | None = None,
    sharing: bool = False,
    prefill_size: int = 1,
    decode_size: int = 1,
    size: int = 1,
) -> dict[str, Assignment]:
    """The GPUs of each of so many workers, by their names: prefill-0, decode-0, worker-0 and so on.

    A worker of a role gets as many as that role's size, the last ones `size`. A role's own list
    names the GPUs of its workers in order. The others get, in order, the first neighbours of `gpus`
    with the fewest workers on them, and none that has one already unless `sharing`. `gpus` of None
    is the GPUs of the roles' lists. Raises ValueError that names the wrong or helpful flag.
    """
    sizes = {f"prefill-{at}": prefill_size for at in range(prefill)}
    sizes |= {f"decode-{at}": decode_size for at in range(decode)}
    sizes |= {f"worker-{at}": size for at in range(workers)}
    named = _named("prefill", prefill, prefill_size, prefill_gpus)
    named |= _named("decode", decode, decode_size, decode_gpus)
    taken = [gpu for own in named.values() for gpu in own]
    allowed = list(dict.fromkeys(taken)) if gpus is None else list(gpus)
    _check_names(allowed)
    if outside := [gpu for gpu in taken if gpu not in allowed]:
        raise ValueError(
            f"{_label(outside[0])} is not one of the fleet's GPUs: {', '.join(allowed)}"
        )
    needed = max(sizes.values()) if sharing else sum(sizes.values())
    if not allowed or needed > len(allowed):
        raise ValueError(_too_few(sizes, needed, allowed))
    on = Counter(taken)
    if not sharing and (twice := [gpu for gpu in on if on[gpu] > 1]):
        holders = [one for one in sizes if twice[0] in named.get(one, ())]
        raise ValueError(
            f"{_label(twice[0])} is given to {' and '.join(holders)}; --gpu-sharing lets workers "
            "share a GPU and its memory"
        )
    for worker, own in sizes.items():
        if worker not in named:
            named[worker] = _neighbours(allowed, own, on, worker, sharing=sharing)
            on.update(named[worker])
    return {
        worker: Assignment(",".join(named[worker]), 1 / max(on[gpu] for gpu in named[worker]))
        for worker in sizes
    }


def _neighbours(
    allowed: Sequence[str], size: int, on: Counter[str], worker: str, *, sharing: bool
) -> tuple[str, ...]:
    """The first `size` GPUs side by side with the fewest workers on them."""
    windows = [tuple(allowed[at : at + size]) for at in range(len(allowed) - size + 1)]
    best = min(windows, key=lambda window: max(on[gpu] for gpu in window))
    if not sharing and any(on[gpu] for gpu in best):
        raise ValueError(
            f"{worker}: expected {size} free GPUs side by side among {_listed(allowed)}; "
            "--prefill-gpus and --decode-gpus name each worker's"
        )
    return best


def fleet_gpus(
    here: Sequence[str], gpus: Sequence[str] | None, named: Sequence[str]
) -> tuple[str, ...]:
    """The GPUs that a fleet may use: the requested ones, otherwise all of this machine.

    `named` are those requested by role. An id is accepted unchecked if the machine's GPUs are known
    by number, because the two cannot be compared. Raises ValueError for a GPU that is not on this
    machine.
    """
    if gpus is None and set(named) <= set(here):
        return tuple(here)
    asked = tuple(dict.fromkeys(named)) if gpus is None else tuple(gpus)
    by_number = all(gpu.isdigit() for gpu in here)
    if missing := [one for one in asked if one not in here and (one.isdigit() or not by_number)]:
        raise ValueError(
            f"{_label(missing[0])} is not on this machine, which has {', '.join(here)}"
        )
    return asked


def gpu_list(text: str) -> tuple[str, ...]:
    """The GPUs of a command-line flag; raises ArgumentTypeError with the form."""
    names = tuple(text.split(","))
    if not all(NAME.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"expected GPUs such as 0,1 or GPU-.., got {text!r}")
    return names


def _named(
    role: str, count: int, size: int, gpus: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    if gpus is None:
        return {}
    if len(gpus) != count * size:
        each = "one" if size == 1 else str(size)
        raise ValueError(
            f"--{role}-gpus: expected {count * size}, {each} for each {role} worker, "
            f"got {_listed(gpus)}"
        )
    return {f"{role}-{at}": tuple(gpus[at * size : (at + 1) * size]) for at in range(count)}


def _check_names(gpus: Sequence[str]) -> None:
    """Refuses a list that may hold the same GPU twice."""
    if twice := [gpu for gpu, times in Counter(gpus).items() if times > 1]:
        raise ValueError(f"--gpus: {_label(twice[0])} is named twice")
    if len({gpu.isdigit() for gpu in gpus}) > 1:
        raise ValueError(f"expected GPUs by number or by id, not both, got {_listed(gpus)}")


def _too_few(workers: Collection[str], needed: int, gpus: Sequence[str]) -> str:
    count, roles = len(workers), Counter(worker.split("-")[0] for worker in workers)
    parts = ", ".join(f"{roles[role]} {role}" for role in ("prefill", "decode"))
    fleet = f"{count} worker{'s' * (count > 1)}" + (f" ({parts})" if not roles["worker"] else "")
    if needed != count:
        return f"{fleet} need {needed} GPUs by their parallel sizes, got {_listed(gpus)}"
    return (
        f"{fleet} on {_listed(gpus)}: each worker needs its own GPU; start fewer workers, or let "
        "them share GPUs and memory with --gpu-sharing"
    )


def _label(gpu: str) -> str:
    return f"GPU {gpu}" if gpu.isdigit() else gpu


def _listed(gpus: Sequence[str]) -> str:
    number = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    return f"{number} ({', '.join(gpus)})" if gpus else number
