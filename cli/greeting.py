"""Output of `effuse up` once its fleet is ready: addresses, and the defaults of requests."""

from contextlib import suppress

from effuse.cli.commands import http_url, value_of
from effuse.cli.fleet import Fleet, FleetConfig
from effuse.cli.status import taken_defaults
from effuse.client.client import Client
from effuse.protos.errors import EffuseError

_ASK_S = 5.0  # time limit for the router to describe its models


def greeting(fleet: Fleet) -> str:
    """The line with the ready fleet's address."""
    config = fleet.config
    places = "".join(f", {name} on {gpu}" for name, gpu in fleet.gpus.items())
    return (
        f"effuse is ready on {fleet.address} after {fleet.ready_s:.1f} s: {config.prefill} prefill "
        f"and {config.decode} decode workers{places}, {config.connector}, "
        f"Redis at {fleet.redis_url}"
    )


def spoken(fleet: Fleet) -> list[str]:
    """The line with the address of OpenAI's API."""
    url = http_url(fleet.config)
    return [] if url is None else [f"OpenAI's HTTP API is on {url}"]


def scraped(fleet: Fleet) -> list[str]:
    """The line with the addresses of metrics."""
    served = [f"{name} {at}" for name, at in fleet.metrics().items()]
    return [f"metrics are on {', '.join(served)}"] if served else []


def taken(fleet: Fleet) -> list[str]:
    """A line for each source of defaults, if the router sends them in time; a router that only
    answers its clients is not asked.
    """
    if asks_who_calls(fleet.config):
        return []
    with suppress(EffuseError), Client(fleet.address, timeout_s=_ASK_S) as client:
        return [line for model in client.models() for line in taken_defaults(model)]
    return []


def asks_who_calls(config: FleetConfig) -> bool:
    """Whether a fleet's routers only answer known clients, or only over TLS."""
    return any(value_of(config.router_flags, flag) for flag in ("--tls-cert", "--keys"))
