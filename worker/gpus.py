"""The GPUs of this machine, found without torch, which takes seconds and may start CUDA.

A GPU has the name from CUDA_VISIBLE_DEVICES: its number or its id (GPU-.. or MIG-..).
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
NAME: Final = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")

_LISTED = re.compile(r"^GPU \d+:", re.MULTILINE)
_DEVICE_FILE = re.compile(r"nvidia\d+")
_LISTING_S = 30.0  # an unused driver may take seconds for each GPU


def check_device(device: str) -> None:
    """Raises ValueError for the device cuda if no GPU can be used here.

    Device files are checked first, because the driver may take seconds to answer.
    """
    if device == "cuda" and not (gpus_here(listing=str) or gpus_here()):
        raise ValueError(no_gpu("--device cuda"))


def no_gpu(flag: str) -> str:
    """The error of a flag that needs a GPU, with the variable that may hide one."""
    hidden = f" ({VARIABLE} is {os.environ[VARIABLE]!r})" if VARIABLE in os.environ else ""
    return f"{flag}: no GPU was found on this machine{hidden}"


def gpus_here(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    listing: Callable[[], str] | None = None,
) -> tuple[str, ...]:
    """Names of the GPUs that child processes can use; none on a machine without GPUs.

    The driver's own list (`nvidia-smi -L`) has the GPUs that a container may use. Without it, this
    counts the container's device files, and last the driver's entries for the whole machine. Only
    the number matters, because CUDA counts usable GPUs from 0.
    """
    count = (
        len(_LISTED.findall((listing or (lambda: _ask_driver("-L")))()))
        or sum(bool(_DEVICE_FILE.fullmatch(one.name)) for one in (root / "dev").glob("nvidia*"))
        or len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    )
    return visible(count, environment.get(VARIABLE))


def visible(count: int, variable: str | None) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of this many: all if it is not set (None),
    otherwise those before the first that does not exist, as CUDA reads it.
    """
    if variable is None or not count:
        return tuple(str(at) for at in range(count))
    kept: dict[str, None] = {}
    for word in variable.split(","):
        name = word.strip()
        if not NAME.fullmatch(name) or (name.isdigit() and int(name) >= count):
            break
        kept[name] = None
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Memory:
    total_mib: int
    free_mib: int


def memory_of(gpu: str) -> Memory | None:
    """A GPU's memory from its driver; None if it is not reported, as for a MIG part."""
    query = "--query-gpu=memory.total,memory.free"
    words = _ask_driver(query, "--format=csv,noheader,nounits", "-i", gpu).split(",")
    try:
        total, free = (int(word) for word in words)
    except ValueError:
        return None
    return Memory(total, free)


def _ask_driver(*words: str) -> str:
    """The output of the driver's own command; empty if there is none or it does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_LISTING_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
