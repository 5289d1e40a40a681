"""Chooses the connector of an engine's pages for `--connector auto`, and opens it.

Workers choose by the same rule, each for itself. Their records name the choice, and a link between
two different ones carries no prompt.
"""

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, Literal

from effuse.config.checks import is_loopback
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.layout import Fingerprint, KVLayout, PageMemory
from effuse.kvtransfer.messages import MAX_PAGE_BYTES, MAX_PAGES
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Transport
from effuse.kvtransfer.zmq_sockets import CurveKeys
from effuse.placement.records import Role
from effuse.protos.fleet_secret import FleetSecret
from effuse.worker.config import WorkerConfig

LOG = logging.getLogger(__name__)

_WAYS: Final = "UCX_TLS"
_ALL_MAPPING: Final = ("sm", "cuda_ipc", "rocm_ipc")
_MAPPING: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"), ()),
    **dict.fromkeys(("cuda_ipc", "rocm_ipc"), ()),
    "cuda": ("cuda_copy", "gdr_copy"),
    "rocm": ("rocm_copy", "rocm_gdr"),
}
"""Ways through memory of other processes, and what is left of them."""


def choose_connector(
    config: WorkerConfig, *, on_gpu: bool, why_no_nixl: Callable[[], str]
) -> Literal["nixl", "zmq"]:
    """The connector of an engine whose pages are on a GPU or not; logs it with the reason.

    `why_no_nixl` tries NIXL and returns why it does not work here, or nothing.
    """
    if config.connector != "auto":
        return config.connector
    if config.encrypt_pages:
        LOG.info("connector: zmq, because only zmq encrypts pages")
        return "zmq"
    if not (on_gpu or is_loopback(config.host)):
        LOG.info(
            "connector: zmq, because pages are in host memory and --host is not a loopback address"
        )
        return "zmq"
    why = "pages are on a GPU" if on_gpu else "all workers are on this host"
    if problem := why_no_nixl():
        level = logging.WARNING if on_gpu else logging.INFO
        LOG.log(level, "connector: zmq. %s, but NIXL does not work here: %s", why, problem)
        return "zmq"
    LOG.info("connector: nixl, because %s", why)
    return "nixl"


def why_no_nixl(host: str) -> str:
    """Why no NIXL agent starts that listens on the interface of `host`; empty if one does."""
    try:
        from effuse.kvtransfer.nixl_transport import why_unusable
    except (ImportError, OSError) as error:  # not installed, or it lacks a library
        return str(error)
    return why_unusable(host)


def connect(
    config: WorkerConfig,
    memory: PageMemory,
    max_model_len: int,
    incarnation: str,
    agreed: Fingerprint,
    role: Role,
    rank: int = 0,
) -> Connector:
    """Starts the connector of a rank's pages. Raises ValueError if it cannot be opened."""
    _check_reservable(memory.layout, max_model_len)
    if config.nnodes > 1:
        map_nothing()
    transport = _transport(config, memory, incarnation, role, rank)
    connector = ThreadConnector(transport, memory, incarnation, agreed)
    connector.start()
    return connector


def _check_reservable(layout: KVLayout, max_model_len: int) -> None:
    """Raises ValueError if a reservation could not name a page, or all pages of a prompt."""
    size, page_bytes = layout.page_size, layout.page_bytes
    if page_bytes > MAX_PAGE_BYTES:
        most = MAX_PAGE_BYTES * size // page_bytes
        raise ValueError(
            f"--page-size: expected at most {most}, because the limit is {MAX_PAGE_BYTES} bytes a "
            f"page and a page of {size} tokens takes {page_bytes}"
        )
    if -(-max_model_len // size) > MAX_PAGES:  # of the writer, also if ranks cut the context
        raise ValueError(
            f"--page-size: expected at least {-(-max_model_len // MAX_PAGES)}, because a handoff "
            f"has at most {MAX_PAGES} pages and a prompt may have {max_model_len} tokens, got "
            f"{size}; a lower --max-model-len also helps"
        )


def _transport(
    config: WorkerConfig, memory: PageMemory, incarnation: str, role: Role, rank: int
) -> Transport:
    """Imports only the chosen one, because NIXL needs a library that ZMQ does not."""
    if config.connector == "nixl":
        from effuse.kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(
            memory,
            incarnation,
            role=role,
            rank=rank,
            host=config.host,
            maps=config.nnodes == 1,
        )
    from effuse.kvtransfer.zmq_transport import ZmqTransport

    return ZmqTransport(
        memory,
        host=config.host,
        advertised_host=config.connector_host or config.reachable_host(),
        keys=_curve_keys(config),
    )


def map_nothing(environment: MutableMapping[str, str] = os.environ) -> None:
    """Takes away UCX's ways through memory of other processes, for a worker of several hosts.

    Peers ask its leader's host whether a writer has ended, and a rank of another host may be beside
    them. Without such ways closing their own end of a connection keeps every rank out.
    """
    given = environment.get(_WAYS, "all").replace(" ", "")
    if given.startswith("^"):
        environment[_WAYS] = f"{given},{','.join(_ALL_MAPPING)}"
        return
    ways = given.split(",")
    if "all" in ways:
        environment[_WAYS] = f"^{','.join(_ALL_MAPPING)}"
        return
    kept = [one for way in ways for one in _MAPPING.get(way, (way,))]
    environment[_WAYS] = ",".join(kept or ["tcp", "self"])


def _curve_keys(config: WorkerConfig) -> CurveKeys | None:
    if not config.encrypt_pages:
        return None
    if config.fleet_secret is None:
        raise ValueError("--encrypt-pages: expected --fleet-secret with it")
    return CurveKeys.of(FleetSecret.read(config.fleet_secret).derive("pages"))
