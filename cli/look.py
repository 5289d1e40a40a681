"""Repeated views of a running fleet: its workers, its requests and their progress.

`effuse top` and the page show them. They continue automatically after the router was unreachable.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from effuse.cli.arguments import client_of, explain
from effuse.cli.status import all_fields
from effuse.cli.watch import MASK
from effuse.client.client import Client
from effuse.client.credentials import Credentials
from effuse.protos.errors import EffuseError
from effuse.v1 import model_pb2, monitor_pb2

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


def as_json(look: Look) -> str:
    """The view as one JSON object, on one line."""
    running = look.requests or monitor_pb2.WatchRequestsResponse()
    names = ("router", "num_running", "num_waiting", "num_tokens", "num_first_blocks")
    told: dict[str, object] = {"error": look.error, "workers": all_fields(look.workers)}
    told |= {name: getattr(running, name) for name in (*names, "first_block_seconds")}
    told["requests"] = [_request(one) for one in running.requests]
    return json.dumps(told)


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
