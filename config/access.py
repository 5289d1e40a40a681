"""Settings of routers and workers alike, such as which machines and clients may reach them.

By default each process listens on loopback in plain text. Plain text on any other address must be
allowed by a flag, so that no port opens to a network by mistake.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from effuse.config import checks

LogLevel = Literal["debug", "info", "warning", "error"]
"""Lowest level of messages that a process logs."""
LogFormat = Literal["text", "json"]
Plaintext = Literal["none", "pages", "all"]
"""Services that other machines may reach in plain text: none, pages and metrics, or also calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Settings of any process of a fleet. Raises ValueError naming the accepted form."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    metrics_host: Annotated[str, "address to serve metrics on"] = "127.0.0.1"
    metrics_port: Annotated[
        int, "port of the metrics, in Prometheus text format; 0 takes a free one"
    ] = 0
    metrics: Annotated[bool, "serve metrics"] = True
    allow_plaintext: Annotated[
        Plaintext,
        "services that other machines may reach in plain text: none, pages (and metrics), or all "
        "(also calls)",
    ] = "none"
    health_port: Annotated[
        int | None, "plain-text port that answers only gRPC health checks; for probes"
    ] = None
    fleet_cert: Annotated[
        Path | None, "PEM certificate of this process for the fleet; turns on TLS within the fleet"
    ] = None
    fleet_key: Annotated[Path | None, "PEM key of fleet-cert"] = None
    fleet_ca: Annotated[
        Path | None, "PEM certificates of the authorities that sign the fleet's certificates"
    ] = None
    fleet_secret: Annotated[
        Path | None, "file with a secret by which the fleet's processes recognise each other"
    ] = None
    redis_credentials: Annotated[
        Path | None,
        "file with user:password of Redis (default: the variable EFFUSE_REDIS_CREDENTIALS)",
    ] = None
    sentinel_credentials: Annotated[
        Path | None, "file with user:password of Redis's Sentinels, if they need it"
    ] = None
    redis_ca: Annotated[
        Path | None,
        "PEM certificates of the authorities that sign Redis's certificate, for rediss URLs",
    ] = None
    fleet: Annotated[str, "name of the fleet; several fleets can share a Redis"] = "effuse"
    drain_s: Annotated[
        float, "longest time for running requests to end at shutdown, in seconds"
    ] = 30.0
    max_request_s: Annotated[float, "longest time for one request, in seconds"] = 3600.0
    log_level: Annotated[LogLevel, "lowest level of messages to log"] = "info"
    log_format: Annotated[LogFormat, "log lines as text, or as JSON objects"] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        "send OpenTelemetry spans to this address, such as http://host:4317 (extra `traces`)",
    ] = None

    def __post_init__(self) -> None:
        checks.whole("health_port", self.health_port, 0, 65535)
        checks.seconds("drain_s", self.drain_s)
        checks.seconds("max_request_s", self.max_request_s, 1e9)  # gRPC counts in int64 ns
        checks.together(self, "fleet_cert", "fleet_key", "fleet_ca")
        for name in (
            *("fleet_cert", "fleet_key", "fleet_ca", "fleet_secret"),
            *("redis_credentials", "sentinel_credentials", "redis_ca"),
        ):
            checks.file(name, getattr(self, name))
        checks.whole("metrics_port", self.metrics_port, 0, 65535)
        if self.metrics:
            self.check_plaintext("metrics_host", self.metrics_host, "metrics")

    def check_plaintext(self, name: str, host: str, what: str) -> None:
        """Refuses to listen on `host` for `what` (such as calls, pages or metrics) in plain text,
        unless a flag allows that or no other machine can reach the address."""
        least: Plaintext = "all" if what in ("calls", "commands") else "pages"
        if self.allow_plaintext not in ("all", least):
            checks.loopback(
                name, host, f"{what} would travel in plain text", f"--allow-plaintext {least}"
            )


def host_and_port(host: str, port: int) -> str:
    """The address as host:port; an IPv6 address gets brackets if it has none."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{host}:{port}"
