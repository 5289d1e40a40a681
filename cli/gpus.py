"""The GPU of each worker of a fleet, as a function of values.

A GPU has the name from CUDA_VISIBLE_DEVICES, a number or an id (GPU-.. or MIG-..), and is passed on
under that name. `worker/gpus.py` lists the GPUs of a machine.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from effuse.worker.gpus import NAME
from effuse.worker.gpus import VARIABLE as VARIABLE


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's GPU."""

    gpu: str  # its name
    share: float  # this worker's share of it: all, or an equal part for each of its workers

    def __str__(self) -> str:
        name = _label(self.gpu)
        return name if self.share == 1 else f"{name} (1/{round(1 / self.share)} of its memory)"


def assign(
    prefill: int,
    decode: int,
    *,
    gpus: Sequence[str] | None,
    prefill_gpus: Sequence[str] | None = None,
    decode_gpus: Sequence[str] | None = None,
    sharing: bool = False,
) -> dict[str, Assignment]:
    """The GPU of each of these workers, by name: prefill-0, .., decode-0, ..

    A role's own list names the GPUs of its workers in order. The other workers get, in order, the
    first of `gpus` with the fewest workers, and none that already has one unless `sharing`. `gpus`
    of None is the GPUs of the roles' lists. Raises ValueError that names the wrong or helpful flag.
    """
    named = _named("prefill", prefill, prefill_gpus) | _named("decode", decode, decode_gpus)
    workers = [f"prefill-{at}" for at in range(prefill)] + [f"decode-{at}" for at in range(decode)]
    allowed = list(dict.fromkeys(named.values())) if gpus is None else list(gpus)
    _check_names(allowed)
    if outside := [gpu for gpu in named.values() if gpu not in allowed]:
        raise ValueError(
            f"{_label(outside[0])} is not one of the fleet's GPUs: {', '.join(allowed)}"
        )
    if not allowed or (len(workers) > len(allowed) and not sharing):
        raise ValueError(_too_few(prefill, decode, allowed))
    on = Counter(named.values())
    if not sharing and (twice := [gpu for gpu in on if on[gpu] > 1]):
        raise ValueError(_shared(twice[0], [one for one in workers if named.get(one) == twice[0]]))
    for worker in workers:
        if worker not in named:
            named[worker] = min(allowed, key=lambda gpu: on[gpu])
            on[named[worker]] += 1
    return {worker: Assignment(named[worker], 1 / on[named[worker]]) for worker in workers}


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


def _named(role: str, count: int, gpus: Sequence[str] | None) -> dict[str, str]:
    """Workers of a role with the GPUs named for them."""
    if gpus is None:
        return {}
    if len(gpus) != count:
        raise ValueError(
            f"--{role}-gpus: expected {count}, one for each {role} worker, got {_listed(gpus)}"
        )
    return {f"{role}-{at}": gpu for at, gpu in enumerate(gpus)}


def _check_names(gpus: Sequence[str]) -> None:
    """Refuses a list that may hold the same GPU twice."""
    if twice := [gpu for gpu, times in Counter(gpus).items() if times > 1]:
        raise ValueError(f"--gpus: {_label(twice[0])} is named twice")
    if len({gpu.isdigit() for gpu in gpus}) > 1:
        raise ValueError(f"expected GPUs by number or by id, not both, got {_listed(gpus)}")


def _too_few(prefill: int, decode: int, gpus: Sequence[str]) -> str:
    count = prefill + decode
    return (
        f"{count} worker{'s' * (count > 1)} ({prefill} prefill, {decode} decode) on "
        f"{_listed(gpus)}: each worker needs its own GPU; start fewer workers, or let them share "
        "GPUs and memory with --gpu-sharing"
    )


def _shared(gpu: str, workers: Sequence[str]) -> str:
    return (
        f"{_label(gpu)} is given to {' and '.join(workers)}; --gpu-sharing lets workers share a "
        "GPU and its memory"
    )


def _label(gpu: str) -> str:
    return f"GPU {gpu}" if gpu.isdigit() else gpu


def _listed(gpus: Sequence[str]) -> str:
    """The number of GPUs, and their names."""
    number = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    return f"{number} ({', '.join(gpus)})" if gpus else number
