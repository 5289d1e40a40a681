"""effuse serves diffusion language models with prefill and decode on separate workers.

`effuse.Client` and `effuse.AsyncClient` ask a running fleet, `effuse.LLM` answers in this process;
`effuse.Chat` is a conversation, `effuse.Params` what can be set. Nothing heavy is imported before
it is used.

Each package is a folder at the top of the repository; the links beside this file give them their
name, so that one path is enough for an interpreter, a type checker and an editor.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from effuse.client.answer import Answer, StreamBroken
    from effuse.client.chat import Chat
    from effuse.client.client import AsyncClient, Client
    from effuse.client.params import Params
    from effuse.offline.llm import LLM
    from effuse.protos.errors import EffuseError
    from effuse.protos.tls import TlsFiles

_HOMES = {
    "Answer": "effuse.client.answer",
    "AsyncClient": "effuse.client.client",
    "Chat": "effuse.client.chat",
    "Client": "effuse.client.client",
    "EffuseError": "effuse.protos.errors",
    "LLM": "effuse.offline.llm",
    "Params": "effuse.client.params",
    "StreamBroken": "effuse.client.answer",
    "TlsFiles": "effuse.protos.tls",
}
__all__ = [
    "LLM",
    "Answer",
    "AsyncClient",
    "Chat",
    "Client",
    "EffuseError",
    "Params",
    "StreamBroken",
    "TlsFiles",
]


def __getattr__(name: str) -> object:
    """Finds a name of `__all__` in its module. Raises ModuleNotFoundError that names the extra to
    install if that module needs one."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from effuse.config.extras import lacking

        if (line := lacking(error.name, "worker")) is None:
            raise
        raise ModuleNotFoundError(f"effuse.{name}: {line}", name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    # Imported only here: it takes a tenth of a short process's start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("effuse")
    except PackageNotFoundError:  # a checkout on the path, which nothing has installed
        return "unknown"
