"""The lines that `effuse up` prints once its fleet is ready: the model, the workers, the addresses.

At most eight rows, also on a terminal of 60 columns; `--verbose` prints more of them. Functions of
values, apart from `greeting`, which asks the router.
"""

import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

from effuse.cli.commands import FleetConfig, http_url, value_of
from effuse.cli.fleet import Fleet
from effuse.cli.gpus import Assignment
from effuse.cli.status import defaults_by_source, link_lines
from effuse.client.client import Client
from effuse.protos.errors import EffuseError
from effuse.v1 import model_pb2

MOST_ROWS: Final = 8
_LABEL: Final = 9  # columns
_CUT: Final = " .."
_ASK_S: Final = 5.0  # the longest that the router may take to describe its models
_LINKS_S: Final = 2.0  # the longest that a fleet waits until its links are measured
_POLL_S: Final = 0.1

Entry = tuple[str, str]
"""A label, and the text behind it."""


def greeting(fleet: Fleet, page: str | None, *, width: int | None, verbose: bool) -> list[str]:
    """The lines about a fleet that is ready, for a terminal of `width` columns or, with None, a
    file. `page` is the address of the page about it."""
    config, (models, workers) = fleet.config, _ask(fleet)
    entries = [
        ("model", model_text(config, models)),
        ("workers", workers_text(config, fleet.gpus, workers)),
        ("gRPC", f"effuse is ready on {fleet.address} after {fleet.ready_s:.1f} s"),
        ("HTTP", http_url(config) or ""),
        ("page", page or ""),
        ("metrics", metrics_text(fleet.metrics(), None if verbose else width)),
    ]
    if verbose:
        entries += [(name, f"on {gpu}") for name, gpu in fleet.gpus.items()]
        entries += [("link", line) for line in link_lines(workers)]
        entries += [("redis", fleet.redis_url), ("logs", str(fleet.log_dir))]
    entries = [(label, text) for label, text in entries if text]
    return laid_out(entries, None if verbose else width)


def laid_out(entries: Sequence[Entry], width: int | None) -> list[str]:
    """A row for each entry or, within `MOST_ROWS`, as many as it needs: short ones first. An entry
    that needs more is cut."""
    if width is None:
        return [f"{label:<{_LABEL}}{text}" for label, text in entries]
    wrapped = {label: _wrapped(text, width - _LABEL) for label, text in entries}
    left = MOST_ROWS - len(entries)
    for label in sorted(wrapped, key=lambda one: len(wrapped[one])):
        rows = wrapped[label]
        wrapped[label] = _cut(rows, 1 + left, width - _LABEL)
        left -= len(wrapped[label]) - 1
    return [
        f"{'' if at else label:<{_LABEL}}{row}"
        for label, rows in wrapped.items()
        for at, row in enumerate(rows)
    ]


def _wrapped(text: str, width: int) -> list[str]:
    """An address is never broken."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _cut(rows: list[str], most: int, width: int) -> list[str]:
    if len(rows) <= most:
        return rows
    last = textwrap.shorten(rows[most - 1], width - len(_CUT), placeholder="")
    return [*rows[: most - 1], last + _CUT]


def model_text(config: FleetConfig, models: Sequence[model_pb2.Model]) -> str:
    """Each model with its settings and, in brackets, the source of each."""
    described = [f"{model.name}: {_settings(model)}".removesuffix(": ") for model in models]
    return "; ".join(described) or (config.model or Path("the bundled model")).name


def _settings(model: model_pb2.Model) -> str:
    by_source = defaults_by_source(model)
    # The algorithm comes first, because the end is cut if there is no room.
    sources = sorted(by_source, key=lambda one: not by_source[one][0].startswith("algorithm "))
    return ", ".join(f"{', '.join(by_source[one])} ({one})" for one in sources)


def workers_text(
    config: FleetConfig, gpus: Mapping[str, Assignment], workers: Sequence[model_pb2.Worker]
) -> str:
    """The GPUs of each role or, on the CPU, how many workers it has; and the speed of the links."""
    counts = {"prefill": config.prefill, "decode": config.decode}
    if gpus:
        roles = [f"{role} {_places(gpus, role)}" for role, count in counts.items() if count]
    else:
        told = [f"{count} {role}" for role, count in counts.items() if count]
        roles = [f"{', '.join(told)} on the CPU"]
    links = [link for worker in workers for link in worker.links]
    return "; ".join(filter(None, [*roles, _links_text(links)]))


def _places(gpus: Mapping[str, Assignment], role: str) -> str:
    return ", ".join(str(gpu) for name, gpu in gpus.items() if name.startswith(f"{role}-"))


def _links_text(links: Sequence[model_pb2.WorkerLink]) -> str:
    if not links:
        return ""
    rates = sorted(link.gigabytes_per_second for link in links)
    slowest, fastest = f"{rates[0]:.3g}", f"{rates[-1]:.3g}"
    rate = fastest if slowest == fastest else f"{slowest} to {fastest}"
    kinds = " or ".join(dict.fromkeys(link.transport for link in links))
    refused = sum(link.refused for link in links)
    told = f"{kinds}, {rate} GB/s" + (f", {refused} refused" if refused else "")
    return f"link {told}" if len(links) == 1 else f"{len(links)} links {told}"


def metrics_text(metrics: Mapping[str, str], width: int | None) -> str:
    """The address of each process's metrics; on a narrow terminal only that of the first one."""
    text = ", ".join(f"{name} {at}" for name, at in metrics.items())
    if width is None or len(text) <= width - _LABEL or len(metrics) < 2:
        return text
    name, at = next(iter(metrics.items()))
    return f"{name} {at}; `effuse status` has {len(metrics) - 1} more"


def _ask(fleet: Fleet) -> tuple[Sequence[model_pb2.Model], Sequence[model_pb2.Worker]]:
    """The models and workers that the router lists, once its links are measured or after
    `_LINKS_S`; none if it answers only clients that it knows."""
    if asks_who_calls(fleet.config):
        return (), ()
    pairs = set(product(fleet.names("prefill"), fleet.names("decode")))
    deadline = time.monotonic() + _LINKS_S
    try:
        with Client(fleet.address, timeout_s=_ASK_S) as client:
            while True:
                workers = client.workers()
                linked = {(one.worker_id, link.peer) for one in workers for link in one.links}
                if pairs <= linked or time.monotonic() > deadline:
                    return client.models(), workers
                time.sleep(_POLL_S)
    except EffuseError:
        return (), ()


def asks_who_calls(config: FleetConfig) -> bool:
    """Whether a fleet's routers answer only clients that they know, or only by TLS."""
    return any(value_of(config.router_flags, flag) for flag in ("--tls-cert", "--keys"))
