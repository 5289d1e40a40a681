"""What a router is told at its start: one frozen value, one flag per field.

Values found at run time (the port taken, the models served) live where they are found.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from effuse.placement.keys import check_name
from effuse.router.policy import PrefillMode

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of a router. Raises ValueError naming the accepted form."""

    # The network.
    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 50051
    metrics_port: Annotated[int | None, "serve Prometheus text here; 0 takes a free one"] = None
    max_message_bytes: Annotated[int, "largest message taken from a client"] = 4 << 20

    # The fleet.
    redis_url: Annotated[str, "Redis of the fleet, redis://host:port/db"] = "redis://127.0.0.1:6379"
    fleet: Annotated[str, "fleet to route for; fleets that share a Redis never meet"] = "effuse"
    prefill: Annotated[
        PrefillMode,
        "who prefills: prefill workers (remote), the decode worker itself (local), or prefill "
        "workers as long as there are any (auto)",
    ] = "auto"

    # Text.
    model: Annotated[Path | None, "checkpoint directory whose tokenizer.json to use"] = None
    tokenizer_threads: Annotated[int, "threads that encode long prompts"] = 2

    # Limits.
    max_concurrent_requests: Annotated[int, "requests on workers at once"] = 1024
    max_queue: Annotated[int, "requests that wait behind them"] = 1024
    max_retries: Annotated[int, "attempts after the first that a request may take"] = 2

    # Time, in seconds.
    max_request_s: Annotated[float, "longest that one request may take"] = 3600.0
    drain_s: Annotated[float, "longest that running requests are waited for at the end"] = 30.0

    ready_file: Annotated[Path | None, "write the address here, as JSON, once listening"] = None
    log_level: Annotated[LogLevel, "least severe messages to log"] = "info"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_message_bytes", 1024, 1 << 30),
            ("tokenizer_threads", 1, 64),
            ("max_concurrent_requests", 1, 1 << 20),
            ("max_queue", 0, 1 << 20),
            ("max_retries", 0, 10),
        ):
            value: int = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{_flag(name)}: expected {low} to {high}, got {value}")
        for name in ("max_request_s", "drain_s"):
            seconds: float = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{_flag(name)}: expected seconds above 0, got {seconds:g}")
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--redis-url: expected redis://host:port/db, got {self.redis_url!r}")
        if self.model is not None and not self.model.is_dir():
            raise ValueError(f"--model: expected a directory, got {str(self.model)!r}")
        check_name("fleet", self.fleet)


def parse(argv: Sequence[str]) -> RouterConfig:
    """The config that `argv` asks for; an unknown flag or a bad value ends the process with
    status 2 and a line that names the accepted form."""
    parser = argparse.ArgumentParser(
        prog="effuse-router", description="Routes requests to a fleet.", allow_abbrev=False
    )
    hints = get_type_hints(RouterConfig, include_extras=True)
    for one in fields(RouterConfig):
        _add(parser, one.name, hints[one.name], one.default)
    found = parser.parse_args(argv)
    try:
        return RouterConfig(**vars(found))
    except ValueError as error:
        parser.error(str(error))


def _add(parser: argparse.ArgumentParser, name: str, hint: object, default: object) -> None:
    kind, text = get_args(hint)
    if default is not None:
        text += f" (default: {default})"
    if get_origin(kind) is Literal:
        parser.add_argument(_flag(name), choices=get_args(kind), default=default, help=text)
        return
    kinds = [k for k in (get_args(kind) or (kind,)) if k is not type(None)]
    metavar = {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "TEXT")
    parser.add_argument(_flag(name), type=kinds[0], default=default, metavar=metavar, help=text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
