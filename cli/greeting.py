"""What `effuse up` says once its fleet is ready: where it is, and what requests take by default."""

from contextlib import suppress

from effuse.cli.commands import http_url, value_of
from effuse.cli.fleet import Fleet, FleetConfig
from effuse.cli.status import taken_defaults
from effuse.client.client import Client
from effuse.protos.errors import EffuseError

_ASK_S = 5.0  # the longest that the router may take to describe its models


def greeting(fleet: Fleet) -> str:
    """The line that says that the fleet is ready, and where."""
    config = fleet.config
    places = "".join(f", {name} on {gpu}" for name, gpu in fleet.gpus.items())
    return (
        f"effuse is ready on {fleet.address} after {fleet.ready_s:.1f} s: {config.prefill} prefill "
        f"and {config.decode} decode workers{places}, {config.connector}, "
        f"Redis at {fleet.redis_url}"
    )


def spoken(fleet: Fleet) -> list[str]:
    """The line that says where OpenAI's API is."""
    url = http_url(fleet.config)
    return [] if url is None else [f"OpenAI's HTTP API is on {url}"]


def scraped(fleet: Fleet) -> list[str]:
    """The line that says where metrics are."""
    served = [f"{name} {at}" for name, at in fleet.metrics().items()]
    return [f"metrics are on {', '.join(served)}"] if served else []


def taken(fleet: Fleet) -> list[str]:
    """A line for each source of what requests take by default, if the router tells it in time; one
    that answers none but its clients is not asked."""
    if asks_who_calls(fleet.config):
        return []
    with suppress(EffuseError), Client(fleet.address, timeout_s=_ASK_S) as client:
        return [line for model in client.models() for line in taken_defaults(model)]
    return []


def asks_who_calls(config: FleetConfig) -> bool:
    """Whether a fleet's routers answer none but clients that they know, or by TLS alone."""
    return any(value_of(config.router_flags, flag) for flag in ("--tls-cert", "--keys"))
