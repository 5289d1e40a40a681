"""What routers and workers are told alike of who may reach them: fields of their configs.

Each process listens on loopback in plain text by default. Beyond it, what is not encrypted has to
be allowed by name, so that nobody opens a port to a network by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from effuse.config import checks

Plaintext = Literal["none", "pages", "all"]
"""What may be reached from other machines in plain text: nothing, KV pages and metrics, or calls as
well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Settings of any process of a fleet. Raises ValueError naming the accepted form."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    metrics_host: Annotated[str, "address to serve metrics on"] = "127.0.0.1"
    metrics_port: Annotated[int, "port of the metrics, as Prometheus text; 0 takes a free one"] = 0
    metrics: Annotated[bool, "serve metrics"] = True
    allow_plaintext: Annotated[
        Plaintext,
        "what other machines may reach in plain text: none, pages (and metrics), all (calls too)",
    ] = "none"
    health_port: Annotated[
        int | None, "also answer gRPC health here, and nothing else, in plain text; for probes"
    ] = None
    fleet_cert: Annotated[
        Path | None, "PEM certificate by which the fleet knows this process; turns TLS on in it"
    ] = None
    fleet_key: Annotated[Path | None, "PEM key of fleet-cert"] = None
    fleet_ca: Annotated[Path | None, "PEM certificates that sign those of the fleet"] = None
    fleet_secret: Annotated[
        Path | None, "file with a secret that the processes of the fleet know each other by"
    ] = None
    redis_credentials: Annotated[
        Path | None, "file with user:password of Redis; else EFFUSE_REDIS_CREDENTIALS has them"
    ] = None
    redis_ca: Annotated[Path | None, "PEM certificates that sign Redis's, of rediss://"] = None

    def __post_init__(self) -> None:
        checks.whole("health_port", self.health_port, 0, 65535)
        checks.together(self, "fleet_cert", "fleet_key", "fleet_ca")
        for name in (
            *("fleet_cert", "fleet_key", "fleet_ca", "fleet_secret"),
            *("redis_credentials", "redis_ca"),
        ):
            checks.file(name, getattr(self, name))
        checks.whole("metrics_port", self.metrics_port, 0, 65535)
        if self.metrics:
            self.check_plaintext("metrics_host", self.metrics_host, "metrics")

    def check_plaintext(self, name: str, host: str, what: str) -> None:
        """Refuses to listen on `host` for `what` (calls, pages or metrics) in plain text, unless
        that is allowed or no other machine reaches it."""
        least: Plaintext = "all" if what == "calls" else "pages"
        if self.allow_plaintext not in ("all", least):
            checks.loopback(name, host, f"{what} go in plain text", f"--allow-plaintext {least}")


def host_and_port(host: str, port: int) -> str:
    """As host:port; an IPv6 address stands in brackets, whether it was given in them or not."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{host}:{port}"
