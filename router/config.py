"""The settings of a router at its start: one frozen value, one flag per field.

Values found at run time (the port taken, the models served) are kept by the parts that find them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, cast, get_args

from effuse.config import checks, flags
from effuse.config.access import Access
from effuse.config.decoding import WITHIN, Priority
from effuse.placement.records import check_name
from effuse.router.measures import NO_GOALS, Goals
from effuse.router.planner import Objectives
from effuse.router.policy import PrefillMode

KVMode = Literal["p2p", "pool"]

END_S: Final = 5.0
"""Longest that a router takes to end after its drain: for last messages to clients and Redis, and
aborts."""

_MOST_CLASSES: Final = 64
_CLASS_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CLASS_FORM: Final = "NAME:first-block=S,gap=S,priority=low|normal|high"


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A class of requests: its objectives and its priority, unless a request sets its own."""

    goals: Goals = NO_GOALS
    priority: Priority = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections(Access):
    """A router's ports for clients, the clients that may call, and its fleet."""

    port: Annotated[int, "port to listen on; 0 takes a free one"] = 50051
    http_port: Annotated[
        int | None, "port of OpenAI's HTTP API; 0 takes a free one (default: no HTTP)"
    ] = None
    share_port: Annotated[
        bool, "allow other routers to listen on the same port, such as one that replaces this one"
    ] = False
    tls_cert: Annotated[Path | None, "PEM certificate for clients; turns on TLS"] = None
    tls_key: Annotated[Path | None, "PEM key of tls-cert"] = None
    tls_client_ca: Annotated[
        Path | None,
        "PEM certificates of the authorities that sign clients' certificates; other clients are "
        "refused",
    ] = None
    keys: Annotated[
        Path | None,
        "file of clients' keys (see effuse token); without it any client may send requests",
    ] = None
    max_message_bytes: Annotated[int, "maximum bytes in a message from a client"] = 4 << 20

    connection_age_s: Annotated[
        float, "age at which a connection closes once its calls have ended, in seconds"
    ] = 60.0

    # The fleet.
    redis_url: Annotated[
        str, "the fleet's Redis, redis://host:port/db, redis+sentinel:// or redis+cluster://"
    ] = "redis://127.0.0.1:6379"
    prefill: Annotated[
        PrefillMode,
        "which workers prefill: prefill workers (remote), the decode worker itself (local), or "
        "prefill workers while any are alive (auto)",
    ] = "auto"
    kv_mode: Annotated[
        KVMode,
        "how a prompt's KV gets from a prefill worker to a decode worker: p2p hands it over, pool "
        "writes it to the workers' --kv-pool and reads it there",
    ] = "p2p"
    steering: Annotated[
        bool, "change the roles of workers that were started as effuse-worker when the load asks"
    ] = True

    def __post_init__(self) -> None:
        Access.__post_init__(self)
        if self.tls_cert is None:
            self.check_plaintext("host", self.host, "calls")
        checks.together(self, "tls_cert", "tls_key")
        for name in ("tls_cert", "tls_key", "tls_client_ca", "keys"):
            checks.file(name, getattr(self, name))
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca: expected --tls-cert and --tls-key with it")
        for name in ("port", "http_port"):
            checks.whole(name, getattr(self, name), 0, 65535)
        checks.whole("max_message_bytes", self.max_message_bytes, 1024, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(Connections):
    """Settings of a router. Raises ValueError naming the accepted form."""

    show_requests: Annotated[
        bool, "show ids, prompts and texts of running requests to every viewer"
    ] = False

    # Text.
    model: Annotated[
        Path | None, "checkpoint with the tokenizer.json to use (default: the bundled one)"
    ] = None
    tokenizer_threads: Annotated[int, "threads that encode long prompts"] = 2

    # Limits.
    max_concurrent_requests: Annotated[
        int, "maximum requests on workers at a time, within the decode workers' max-num-seqs"
    ] = 1024
    max_queue: Annotated[int, "maximum requests that wait for a worker"] = 1024
    max_answers: Annotated[int, "maximum answers to one request (n)"] = 8
    max_losses: Annotated[
        int, "maximum workers that a request may lose in a row without a new block"
    ] = 8
    retry_share: Annotated[
        float,
        "retries that each request adds to a shared budget; an empty budget delays retries",
    ] = 0.2

    # Objectives, for plans, for goodput and for help with prompts.
    first_block_objective_s: Annotated[
        float | None, "time from arrival to the first block that requests should meet, in seconds"
    ] = None
    gap_objective_s: Annotated[
        float | None, "time between two blocks of an answer that requests should meet, in seconds"
    ] = None
    gap_objective_ratio: Annotated[
        float | None, "the same, as a multiple of the shortest gap that was measured"
    ] = None
    request_class: Annotated[
        tuple[str, ...],
        "class of requests, such as chat:first-block=0.5,gap=0.1,priority=high; may be repeated",
    ] = ()

    # Time, in seconds.
    recovery_s: Annotated[
        float, "longest time that a request waits for a worker that can continue it"
    ] = 60.0
    keep_answers_s: Annotated[
        float, "time to keep the answer to a request id that a client chose; 0 keeps none"
    ] = 120.0
    ready_file: Annotated[
        Path | None, "write the address to this file, as JSON, once the router listens"
    ] = None

    def __post_init__(self) -> None:
        Connections.__post_init__(self)
        for name, low, high in (
            ("tokenizer_threads", 1, 64),
            ("max_concurrent_requests", 1, 1 << 20),
            ("max_queue", 0, 1 << 20),
            ("max_answers", 1, 64),
            ("max_losses", 0, 1000),
        ):
            checks.whole(name, getattr(self, name), low, high)
        checks.seconds("recovery_s", self.recovery_s)
        checks.seconds("connection_age_s", self.connection_age_s, 2e6)  # gRPC: int32 ms
        for name in ("first_block_objective_s", "gap_objective_s"):
            if (value := getattr(self, name)) is not None:
                checks.seconds(name, value)
        if self.gap_objective_ratio is not None and not 1 <= self.gap_objective_ratio <= 1000:
            raise ValueError(
                f"--gap-objective-ratio: expected 1 to 1000, got {self.gap_objective_ratio}"
            )
        _parse_classes(self.request_class)
        if not 0 <= self.keep_answers_s <= 86400:
            raise ValueError(f"--keep-answers-s: expected 0 to 86400, got {self.keep_answers_s}")
        if not 0 <= self.retry_share <= 1:
            raise ValueError(f"--retry-share: expected 0 to 1, got {self.retry_share}")
        checks.redis_url("redis_url", self.redis_url)
        checks.directory("model", self.model)
        check_name("fleet", self.fleet)

    @property
    def objectives(self) -> Objectives:
        """The times that requests should keep."""
        return Objectives(
            first_block_s=self.first_block_objective_s,
            gap_s=self.gap_objective_s,
            gap_ratio=self.gap_objective_ratio,
        )

    @property
    def classes(self) -> dict[str, RequestClass]:
        """The classes of requests, by name."""
        return _parse_classes(self.request_class)

    @property
    def longest_end_s(self) -> float:
        """Longest that a router takes from SIGTERM to its end."""
        return self.drain_s + 3 * END_S


def parse(argv: Sequence[str]) -> RouterConfig:
    """The config that `argv` asks for; an unknown flag or a bad value ends the process with
    status 2 and a line that names the accepted form."""
    return flags.parse(
        RouterConfig, argv, prog="effuse-router", about="Routes requests to a fleet."
    )


def _parse_classes(texts: Sequence[str]) -> dict[str, RequestClass]:
    """Classes by name, from texts such as `chat:first-block=0.5,gap=0.1,priority=high`. Raises
    ValueError that names the accepted form."""
    found: dict[str, RequestClass] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        if not _CLASS_NAME.fullmatch(name):
            raise _bad_class("a name of 1 to 64 characters of A-Z a-z 0-9 . _ -", f"{name[:80]!a}")
        if name in found:
            raise _bad_class("different names", f"{name!r} twice")
        found[name] = _parse_class(text, rest)
    if len(found) > _MOST_CLASSES:
        raise _bad_class(f"at most {_MOST_CLASSES} classes", len(found))
    return found


def _parse_class(text: str, settings: str) -> RequestClass:
    given: dict[str, str] = {}
    for one in filter(None, settings.split(",")):
        key, equals, value = one.partition("=")
        if not equals or key in given or key not in ("first-block", "gap", "priority"):
            raise _bad_class(_CLASS_FORM, f"{text[:200]!a}")
        given[key] = value
    priority = given.get("priority", "normal")
    if priority not in get_args(Priority):
        form = f"one of {', '.join(get_args(Priority))} as a priority"
        raise _bad_class(form, f"{priority[:80]!a}")
    times = (_seconds(given[key]) if key in given else math.inf for key in ("first-block", "gap"))
    return RequestClass(Goals(*times), cast(Priority, priority))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value not in WITHIN:
        raise _bad_class(f"{WITHIN.form}, as seconds", f"{text[:80]!a}")
    return value


def _bad_class(expected: str, found: object) -> ValueError:
    return ValueError(f"--request-class: expected {expected}, got {found}")
