"""`effuse status`: the workers of a running fleet, their load and links, the share of requests that
met their objectives, and its addresses.

The addresses of the page and of metrics are known if this user started the fleet on this machine.
`effuse top` and the page show repeated views (`looks`), which go on after the router was
unreachable.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from effuse.cli.addresses import addresses
from effuse.cli.arguments import (
    add_router,
    calling,
    client_of,
    command,
    credentials_of,
    explain,
)
from effuse.cli.watch import MASK
from effuse.client.client import Client
from effuse.client.credentials import Credentials
from effuse.config.words import counted, split_of
from effuse.protos.channels import fields_of, numbers_of
from effuse.protos.errors import EffuseError
from effuse.v1 import model_pb2, monitor_pb2

_ROLES, _STATES = (
    {number: name for name, number in numbers_of(prefix, items).items() if number}
    for prefix, items in (
        ("WORKER_ROLE_", model_pb2.WorkerRole.items()),
        ("WORKER_STATE_", model_pb2.WorkerState.items()),
    )
)
_HEADINGS = ("worker", "role", "state", "model", "running", "waiting", "pages free", "steps")


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 if a decode worker is ready, 1 if none is."""
    parser = make_parser()
    asked = parser.parse_args(argv)
    shown = credentials_of(parser, asked)
    with calling(asked.target), client_of(asked.target, shown, asked.timeout) as client:
        workers, models, plans = client.workers(), client.models(), client.plans()
    kept = [f"{one.model}: {line}" for one in plans for line in one.kept]
    places = [*kept, *addresses(asked.target)]
    print(as_json(workers) if asked.json else as_text(workers, models, places), end="")
    return 0 if any(_can_answer(worker) for worker in workers) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "status", "Show the workers of a running fleet, their load and links, and its addresses."
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print everything about the workers, as a JSON list")
    add_router(parser, has_timeout=True)
    return parser


def as_json(workers: Sequence[model_pb2.Worker]) -> str:
    """Every field of every worker, including zeros, under its name in `model.proto`."""
    return json.dumps(list(map(fields_of, workers)), indent=1) + "\n"


def as_text(
    workers: Sequence[model_pb2.Worker],
    models: Sequence[model_pb2.Model] = (),
    places: Sequence[str] = (),
) -> str:
    """A table, then a line for each link, quarantine and source of defaults, those of `places`, and
    the number of workers of each kind."""
    width = max(Console().width, 160)
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as drawn:
        console.print(worker_table(workers))
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    taken = [f"{model.name} {line}" for model in models for line in taken_defaults(model)]
    taken += [f"{one.name} is deterministic" for one in models if one.deterministic]
    return "\n".join([*lines, *worker_lines(workers), *taken, *places, _summary(workers)]) + "\n"


def worker_table(workers: Sequence[model_pb2.Worker], width: int | None = None) -> Table:
    """A row for each worker; columns that do not fit into `width` are left out."""
    rows = [_cells(worker) for worker in workers]
    table = fitted_table(_HEADINGS, rows, width, ("role", "steps", "model", "waiting"))
    kept = [_HEADINGS.index(str(column.header)) for column in table.columns]
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def fitted_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    least_first: Sequence[str],
    flexible: int | None = None,
) -> Table:
    """A table without rows whose columns fit into `width`; those of `least_first` may be left out.

    With `flexible` the last column, for which rows have no cell, needs this many characters.
    """
    lengths = [max([len(heading), *(len(row[at]) for row in rows if at < len(row))])
               for at, heading in enumerate(headings)]  # fmt: skip
    if flexible is not None:
        lengths[-1] = max(lengths[-1], flexible)
    kept = dict(zip(headings, lengths, strict=True))
    for heading in least_first:
        if width is not None and sum(kept.values()) + 2 * (len(kept) - 1) > width:
            del kept[heading]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in kept:
        table.add_column(heading, no_wrap=True)
    return table


def worker_lines(workers: Sequence[model_pb2.Worker]) -> list[str]:
    held = [_quarantine(worker, one) for worker in workers for one in worker.quarantines]
    return [*link_lines(workers), *held]


def link_lines(workers: Sequence[model_pb2.Worker]) -> list[str]:
    return [_link(worker, link) for worker in workers for link in worker.links]


def taken_defaults(model: model_pb2.Model) -> list[str]:
    """A line for each source of the model's defaults, such as "took temperature 0.6 and top_k 20
    from generation_config.json"."""
    return [
        f"took {' and '.join([', '.join(knobs[:-1]), knobs[-1]] if knobs[1:] else knobs)} "
        f"from {source}"
        for source, knobs in defaults_by_source(model).items()
    ]


def defaults_by_source(model: model_pb2.Model) -> dict[str, list[str]]:
    """The model's defaults, such as "temperature 0.6", by the source that they are from."""
    by_source: dict[str, list[str]] = {}
    for one in model.defaults.sources:
        value = _default(model, one.knob)
        is_one = one.knob == "eos_token_ids" and " " not in value
        text = f"{'eos_token_id' if is_one else one.knob} {value}".strip()
        by_source.setdefault(one.source, []).append(text)
    return by_source


def _default(model: model_pb2.Model, knob: str) -> str:
    """The value of a setting as users write it; empty for an unknown setting."""
    defaults = model.defaults
    for message in (defaults.sampling, defaults.decoding, defaults, model):
        field = message.DESCRIPTOR.fields_by_name.get(knob)
        if field is None:
            continue
        value = getattr(message, knob)
        if field.enum_type is not None:
            prefix = f"{knob}_".upper()
            return field.enum_type.values_by_number[value].name.removeprefix(prefix).lower()
        if field.is_repeated:
            return " ".join(str(one) for one in value)
        return f"{value:g}"
    return ""


def _cells(worker: model_pb2.Worker) -> tuple[str, ...]:
    quarantined = worker.quarantined_pages
    pages = f"{worker.free_pages} of {worker.total_pages}"
    return (
        worker.worker_id,
        _role(worker),
        _STATES.get(worker.state, "unknown"),
        worker.model,
        f"{worker.running} of {worker.max_num_seqs}",
        str(worker.waiting),
        f"{pages}, {quarantined} in quarantine" if quarantined else pages,
        str(worker.steps),
    )


def _role(worker: model_pb2.Worker) -> str:
    name = _ROLES.get(worker.role, "unknown") + (
        ", set by an operator" if worker.role_is_pinned else ""
    )
    if worker.num_leaving:
        name = f"{name}, finishing {worker.num_leaving} from its former role"
    if worker.ranks > 1:
        name = f"{name} on {worker.ranks} devices"
    if worker.context_ranks > 1:
        name = f"{name}, context split over {worker.context_ranks}"
    if worker.stages > 1:
        name = f"{name} in {worker.stages} stages"
    return name


def _link(worker: model_pb2.Worker, link: model_pb2.WorkerLink) -> str:
    refused = ", refused" if link.refused else ""
    rate = f"{link.gigabytes_per_second:.3g} GB/s"
    return f"{worker.worker_id} to {link.peer}: {link.transport}, {rate}{refused}"


def _quarantine(worker: model_pb2.Worker, held: model_pb2.WorkerQuarantine) -> str:
    pages = f"{held.pages} pages in quarantine"
    age_s = held.age.ToTimedelta().total_seconds()
    return f"{worker.worker_id}: {pages} for {age_s:.0f} s, until {held.writer} releases them"


def _summary(workers: Sequence[model_pb2.Worker]) -> str:
    ready = [worker for worker in workers if worker.state == model_pb2.WORKER_STATE_READY]
    prefill, decode, both = (sum(one.role == role for one in ready) for role in _ROLES)
    text = split_of(prefill, decode)
    if both:  # then no role without workers is named
        roles = ((prefill, "prefill worker"), (decode, "decode worker"))
        shown = [counted(number, noun) for number, noun in roles if number]
        do = "prefills and decodes" if both == 1 else "prefill and decode"
        text = " and ".join([*shown, f"{counted(both, 'worker')} that {do}"])
    text += " is ready" if len(ready) == 1 and both else " are ready"
    return text if any(map(_can_answer, workers)) else f"{text}: no worker can answer a request"


def _can_answer(worker: model_pb2.Worker) -> bool:
    is_ready = worker.state == model_pb2.WORKER_STATE_READY
    decodes = (model_pb2.WORKER_ROLE_DECODE, model_pb2.WORKER_ROLE_BOTH)
    return is_ready and worker.role in decodes


WRITTEN = "\u2588"
_WORKERS_S = 1.0  # seconds between lists of workers, which report no more often
_TIMEOUT_S = 5.0
_AGAIN_S = 1.0

_NOTHING = Credentials()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The fleet at one moment, or why its state is unknown."""

    workers: Sequence[model_pb2.Worker] = ()
    requests: monitor_pb2.WatchRequestsResponse | None = None
    error: str = ""


def looks(target: str, interval_s: float, shown: Credentials = _NOTHING) -> Iterator[Look]:
    """A view every `interval_s` seconds, without end; the first one immediately."""
    while True:
        try:
            with client_of(target, shown, _TIMEOUT_S) as client:
                yield from _looks(client, interval_s)
        except EffuseError as error:
            yield Look(error=explain(error, target))
        time.sleep(_AGAIN_S)


def _looks(client: Client, interval_s: float) -> Iterator[Look]:
    looked_at, workers = time.monotonic(), client.workers()
    for requests in client.watch_requests(interval_s):
        if time.monotonic() - looked_at > _WORKERS_S:
            looked_at, workers = time.monotonic(), client.workers()
        yield Look(workers=workers, requests=requests)


def cells(block: monitor_pb2.RunningBlock) -> str:
    """A block in flight, with one character for each of its tokens: written, or a mask."""
    masks = block.masks
    return "".join(
        MASK if at // 8 < len(masks) and masks[at // 8] >> at % 8 & 1 else WRITTEN
        for at in range(max(0, -block.token_offset), block.num_tokens)
    )


def view_as_json(look: Look) -> str:
    running = look.requests or monitor_pb2.WatchRequestsResponse()
    names = ("router", "num_running", "num_waiting", "num_tokens", "num_first_blocks")
    view: dict[str, object] = {"error": look.error, "workers": list(map(fields_of, look.workers))}
    view |= {name: getattr(running, name) for name in (*names, "first_block_seconds")}
    view["plan"] = list(running.plan)
    view["requests"] = [_request(one) for one in running.requests]
    return json.dumps(view)


def _request(request: monitor_pb2.RunningRequest) -> dict[str, object]:
    names = (
        *("name", "model", "state", "prefill_worker", "decode_worker", "attempt"),
        *("prompt_tokens", "max_tokens", "num_tokens", "block_size", "prompt", "text"),
    )
    return {
        **{name: getattr(request, name) for name in names},
        "age_s": request.age.ToTimedelta().total_seconds(),
        "blocks": [cells(block) for block in request.blocks],
    }
