"""Messages between the hosts of a group: offers to take part, heartbeats, ends of ranks.

Plain data, like the settings that they compare. Commands to ranks have sockets of their own
(`rank_messages.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from effuse.config.access import Access
from effuse.config.flags import flag_of
from effuse.kvtransfer.zmq_sockets import CurveKeys
from effuse.placement.records import Role
from effuse.protos.fleet_secret import FleetSecret
from effuse.worker.config import Connector, WorkerConfig, to_json

BEAT_S: Final = 0.5
"""Time between two signs of life."""
_MOST_SHOWN: Final = 200  # characters
STARTING: Final = 10
"""Times as long an end may be silent while the engine starts, when all processors are busy."""

# Paths, addresses and names that may differ from host to host.
_OF_A_HOST: Final = frozenset(
    (
        *(one.name for one in fields(Access)),
        *("port", "advertise_host", "connector_host", "redis_url", "worker_id", "ready_file"),
        *("node_rank", "master_addr", "master_port", "model", "adapter"),
    )
)

# From a node to the leader.


class Joining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node offers its devices."""

    node: int
    settings: dict[str, str]  # see `settings_of`


class NodeBeat(msgspec.Struct, frozen=True, tag=True):
    """The node is alive, and so are its ranks."""

    incarnation: str


class RankGone(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended with this status, as `subprocess` gives it."""

    incarnation: str
    rank: int
    status: int


class RankStopped(msgspec.Struct, frozen=True, tag=True):
    """A signal has stopped a rank for too long."""

    incarnation: str
    rank: int


FromNode = Joining | NodeBeat | RankGone | RankStopped

# From the leader to a node.


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The node takes part. Ports are the leader's."""

    incarnation: str
    role: Role  # of the ranks' module
    connector: Connector  # that the leader has chosen
    key_seed: bytes
    commands: dict[int, int]  # port by rank of this node
    answers: int
    store: int
    meeting: str


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """The node cannot take part; not now, unless it is `final`."""

    message: str
    final: bool


class LeaderBeat(msgspec.Struct, frozen=True, tag=True):
    """The leader is alive."""

    incarnation: str
    is_ready: bool  # its engine can work


class Stale(msgspec.Struct, frozen=True, tag=True):
    """The node belongs to another incarnation, which has ended."""

    incarnation: str  # the present one


ToNode = Welcome | JoinRefused | LeaderBeat | Stale

FROM_NODE: Final = msgspec.msgpack.Decoder(FromNode)
TO_NODE: Final = msgspec.msgpack.Decoder(ToNode)
ENCODER: Final = msgspec.msgpack.Encoder()


def settings_of(config: WorkerConfig) -> dict[str, str]:
    """Values that all hosts of a group must have in common: the version, flags, and digests of
    the model's and the adapter's configuration."""
    found = {"version": version("effuse")}
    for name, value in msgspec.json.decode(to_json(config), type=dict[str, msgspec.Raw]).items():
        if name not in _OF_A_HOST:
            found[flag_of(name)] = bytes(value).decode()
    for name, path, file in (
        ("--model", config.model, "config.json"),
        ("--adapter", config.adapter, "adapter_config.json"),
    ):
        found[name] = "none" if path is None else _digest(path / file)
    return found


def difference(own: Mapping[str, str], other: Mapping[str, str], node: int) -> str | None:
    """The first difference between the leader's settings and a node's, with both values."""
    for name in sorted(own.keys() | other.keys(), key=lambda one: (one != "version", one)):
        here, there = (one.get(name, "not known") for one in (own, other))
        if here != there:
            what = f"the digest of {name}'s configuration" if name in _DIGESTED else _cut(name)
            return f"{what} is {here} on node 0 and {_cut(there)} on node {node}"
    return None


def _cut(given: str) -> str:
    """Text of another host, as a line of a log can hold it."""
    is_plain = given.isprintable() and len(given) <= _MOST_SHOWN
    return given if is_plain else f"{given[:_MOST_SHOWN]!a}..."


_DIGESTED: Final = ("--model", "--adapter")


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return f"unreadable ({error.strerror})"


def control_keys(config: WorkerConfig) -> CurveKeys | None:
    """Keys of the hosts' messages, which follow from the fleet's secret; None without one. Raises
    OSError for a file that holds no secret."""
    if config.fleet_secret is None:
        return None
    return CurveKeys.of(FleetSecret.read(config.fleet_secret).derive("ranks"))
