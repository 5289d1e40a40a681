"""Chooses the connector of an engine's pages for `--connector auto`.

Workers choose by the same rule, each for itself. Their records name the choice, and a link between
two different ones carries no prompt.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import Literal

from effuse.worker.config import WorkerConfig

LOG = logging.getLogger(__name__)


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
    if not (on_gpu or _is_loopback(config.host)):
        LOG.info(
            "connector: zmq, because pages are in host memory and workers are on several hosts"
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
