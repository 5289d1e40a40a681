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
    """Finds a name of `__all__` where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
