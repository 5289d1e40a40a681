"""Who takes part in a group on several hosts, and when a host counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq
from slowness import patient

from effuse.cli import up
from effuse.kvtransfer.zmq_sockets import CurveKeys
from effuse.models.group import ProcessGroup
from effuse.protos.channels import OPEN
from effuse.worker.config import DecodeConfig
from effuse.worker.connectors import map_nothing
from effuse.worker.node import LeaderLink, NodeAgent, NodeRefused, run
from effuse.worker.node_messages import (
    ENCODER,
    Joining,
    JoinRefused,
    LeaderBeat,
    NodeBeat,
    RankGone,
    RankStopped,
    Stale,
    Welcome,
    control_keys,
    difference,
    settings_of,
)
from effuse.worker.nodes import LOOK_S, NodeLost, Nodes, Roll
from effuse.worker.watchdog import PeerSilence

SETTINGS = {"version": "1", "--page-size": "16"}
LIMIT_S = 3.0


def roll() -> Roll:
    """Of three nodes."""
    welcomes = {
        node: Welcome(
            incarnation="i1",
            role="decode",
            connector="zmq",
            key_seed=b"",
            commands={node: 1000 + node},
            answers=1,
            store=2,
            meeting="m",
        )
        for node in (1, 2)
    }
    return Roll(incarnation="i1", settings=SETTINGS, limit_s=LIMIT_S, welcomes=welcomes)


def joining(node: int, **changes: str) -> Joining:
    return Joining(node=node, settings={**SETTINGS, **changes})


def test_nodes_join_once_with_equal_settings() -> None:
    group = roll()
    assert group.missing == [1, 2]
    assert group.take(b"a", joining(2), 0.0) == (group.welcomes[2], None)
    assert group.take(b"a", joining(2), 1.0) == (group.welcomes[2], None), "the answer was lost"
    assert group.missing == [1]
    refused, _ = group.take(b"b", joining(2), 1.0)
    assert refused == JoinRefused("another process is node 2 of this group", final=False)
    for node in (0, 3):
        refused, _ = group.take(b"b", joining(node), 1.0)
        assert refused == JoinRefused(f"--node-rank: expected 1 to 2, got {node}", final=True)
    refused, _ = group.take(b"b", joining(1, **{"--page-size": "32"}), 1.0)
    assert isinstance(refused, JoinRefused) and refused.final
    assert refused.message.endswith("--page-size is 16 on node 0 and 32 on node 1")
    assert group.missing == [1]


def test_a_node_of_another_incarnation_is_refused() -> None:
    group = roll()
    assert group.take(b"a", NodeBeat("i1"), 0.0) == (Stale("i1"), None), "it has not joined"
    group.take(b"a", joining(1), 0.0)
    assert group.take(b"a", NodeBeat("i1"), 0.0) == (None, None)
    assert group.take(b"a", RankGone("i1", 1, -9), 0.0) == (None, RankGone("i1", 1, -9))
    assert group.take(b"a", RankStopped("i1", 1), 0.0) == (None, RankStopped("i1", 1))
    for late in (NodeBeat("i0"), RankGone("i0", 1, -9), RankStopped("i0", 1)):
        assert group.take(b"a", late, 0.0) == (Stale("i1"), None)
    assert group.take(b"b", RankGone("i1", 1, -9), 0.0) == (Stale("i1"), None), "a stranger"
    for rank in (0, 2, 999, -1):  # of the leader, of another node, of none
        for event in (RankGone("i1", rank, 1), RankStopped("i1", rank)):
            assert group.take(b"a", event, 0.0) == (None, None)


def test_a_refusal_shows_little_of_a_strange_setting() -> None:
    for strange in ("x" * 60_000, "a\nb"):
        for settings in ({"version": strange}, {**SETTINGS, strange: "1"}):
            assert (told := difference(SETTINGS, settings, 1)) is not None
            assert len(told) < 500 and told.isprintable()


def test_a_silent_node_is_lost_and_a_beat_or_our_own_pause_excuses_it() -> None:
    group, now = roll(), 0.0
    group.take(b"a", joining(1), now)
    while now < 9 * LIMIT_S:  # it starts
        now += LOOK_S
        assert not group.look(now)
    group.is_ready, now = True, 0.0
    group.take(b"a", joining(1), now)
    while now < 2.9:
        now += LOOK_S
        assert not group.look(now)
    group.take(b"a", NodeBeat("i1"), now)
    until = now + LIMIT_S
    while now + LOOK_S < until:
        now += LOOK_S
        assert not group.look(now)
    now += 100.0  # this process was stopped
    assert not group.look(now)
    now += LOOK_S
    (lost,) = group.look(now)
    assert isinstance(lost, NodeLost) and lost.node == 1
    assert lost.silent_s == pytest.approx(LIMIT_S + LOOK_S, abs=LOOK_S)


def test_a_pause_of_the_listener_is_not_the_others_silence() -> None:
    silence = PeerSilence.begin(0.0, 1.0, 0.25)
    assert not silence.is_over(5.0)
    assert not silence.is_over(5.7)
    assert [silence.is_over(5.7 + 0.25 * turn) for turn in range(1, 4)] == [False, False, True]


def config(tmp_path: Path, **changes: object) -> DecodeConfig:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given: dict[str, object] = {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "fleet_secret": secret,
        "device": "cpu",
        **changes,
    }
    return DecodeConfig(**given)  # type: ignore[arg-type]


def test_settings_name_what_all_hosts_must_share(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = config(tmp_path, model=tmp_path)
    other = replace(own, node_rank=1, host="127.0.0.9", port=7, log_level="debug", worker_id="x")
    assert difference(settings_of(own), settings_of(other), 1) is None
    for changes, told in (
        ({"page_size": 8}, "--page-size is 16 on node 0 and 8 on node 1"),
        ({"max_window": 4}, "--max-window is 8 on node 0 and 4 on node 1"),
        ({"model": None}, "the digest of --model's configuration is "),
    ):
        found = difference(settings_of(own), settings_of(replace(own, **changes)), 1)
        assert found is not None and told in found
    before = settings_of(own)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert "--model" in str(difference(before, settings_of(own), 1))
    assert difference({"version": "1"}, {"version": "2", "--a": "1"}, 1) == (
        "version is 1 on node 0 and 2 on node 1"
    )


@contextlib.contextmanager
def leader(own: DecodeConfig, incarnation: str = "i1") -> Iterator[Nodes]:
    nodes = Nodes(own, "decode", incarnation)
    try:
        yield nodes
    finally:
        nodes.close()


async def asked(nodes: Nodes, link: LeaderLink, message: object, seconds: float) -> object:
    """The leader's answer to a host that sends this until it gets one."""
    for _ in range(int(seconds / 0.05)):
        link.post(message)  # type: ignore[arg-type]
        nodes.turn()
        if (found := await link.next_message(0.05)) is not None:
            return found
    return None


def test_only_owners_of_the_secret_are_answered(tmp_path: Path) -> None:
    own = config(tmp_path)
    stranger = tmp_path / "other"
    stranger.write_text("y" * 32)
    offer = Joining(node=1, settings=settings_of(own))

    async def ask() -> None:
        with leader(own) as nodes:
            for secret in (stranger, None):
                with contextlib.closing(
                    LeaderLink(replace(own, node_rank=1, fleet_secret=secret))
                ) as link:
                    assert await asked(nodes, link, offer, 1.0) is None
            assert nodes.roll.missing == [1]
            with contextlib.closing(LeaderLink(replace(own, node_rank=1))) as link:
                found = await asked(nodes, link, offer, 10.0)
                assert isinstance(found, Welcome) and list(found.commands) == [1]
                assert nodes.roll.missing == []
                nodes.roll.is_ready = True
                for _ in range(200):
                    nodes.turn()
                    if isinstance(beat := await link.next_message(0.05), LeaderBeat):
                        break
                assert beat == LeaderBeat("i1", is_ready=True)
                stale = NodeBeat("an earlier one")
                assert await asked(nodes, link, stale, 10.0) == Stale("i1")

    asyncio.run(ask())


def test_a_link_ends_with_its_leader(tmp_path: Path) -> None:
    own = config(tmp_path)
    offer = Joining(node=1, settings=settings_of(own))

    async def ask() -> None:
        with contextlib.closing(LeaderLink(replace(own, node_rank=1))) as link:
            with leader(own) as nodes:
                assert isinstance(await asked(nodes, link, offer, 10.0), Welcome)
                assert not link.disconnected.done()
            await asyncio.wait_for(link.disconnected, patient(10.0))
            assert await link.next_message(0.05) is None
            # A host that goes on would leave each later incarnation at once.
            agent = NodeAgent(replace(own, node_rank=1), asyncio.Event(), lambda _: None)
            assert await asyncio.wait_for(agent._join(link), patient(10.0)) is None

    asyncio.run(ask())


def test_a_ready_file_that_cannot_be_written_again_ends_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, ready = config(tmp_path), tmp_path / "ready" / "file"
    ready.parent.mkdir()

    async def start(*_: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("sleep", "1000")

    async def serve() -> None:
        host = replace(own, node_rank=1, port=0, ready_file=ready)
        running = asyncio.ensure_future(run(host, ["a"], OPEN))
        for is_over in (ready.exists, lambda: "could not be written" in caplog.text):
            with leader(own) as nodes:
                nodes.roll.is_ready = True
                while not is_over():
                    nodes.turn()
                    assert not running.done()
                    await asyncio.sleep(0.02)
                shutil.rmtree(ready.parent, ignore_errors=True)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    monkeypatch.setattr("effuse.worker.node.start", start)
    asyncio.run(asyncio.wait_for(serve(), patient(20.0)))


def test_the_public_key_alone_opens_nothing(tmp_path: Path) -> None:
    own = config(tmp_path)
    keys = control_keys(own)
    assert keys is not None
    with leader(own) as nodes, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.curve_serverkey = keys.public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://127.0.0.1:{own.master_port}")
        stranger.send(ENCODER.encode(Joining(node=1, settings=settings_of(own))))
        for _ in range(10):
            nodes.turn()
            assert not stranger.poll(50)
        assert nodes.roll.missing == [1]


@contextlib.contextmanager
def connected(seed: bytes, kind: int, port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as rank:
        rank.set(zmq.LINGER, 0)
        CurveKeys.of(seed).ask(rank)
        rank.connect(f"tcp://127.0.0.1:{port}")
        yield rank


@pytest.mark.parametrize("is_member", [True, False])
def test_a_rank_of_another_incarnation_cannot_connect(tmp_path: Path, is_member: bool) -> None:
    with leader(config(tmp_path)) as nodes:
        welcome = nodes.roll.welcomes[1]
        seed = welcome.key_seed if is_member else b"earlier".ljust(32)
        with connected(seed, zmq.PAIR, welcome.commands[1]) as rank:
            rank.send(b"here")
            assert bool(nodes.commands[1].poll(10_000 if is_member else 500)) == is_member


def test_only_the_end_of_a_ranks_own_connection_is_its_loss(tmp_path: Path) -> None:
    """Scans and probes connect to any port."""
    with leader(config(tmp_path)) as nodes:
        welcome = nodes.roll.welcomes[1]
        with connected(welcome.key_seed, zmq.PUSH, welcome.answers) as rank:
            rank.send_multipart([b"\1", b"here"])
            assert nodes.answers.poll(10_000)
            nodes.note(1, nodes.answers.recv_multipart(copy=False))
            ports = (welcome.answers, welcome.commands[1])
            for port in ports:
                with socket.create_connection(("127.0.0.1", port)) as probe:
                    probe.sendall(b"GET / HTTP/1.0\r\n\r\n".ljust(80))
            for seed in (welcome.key_seed, b"earlier".ljust(32)):
                with connected(seed, zmq.PUSH, welcome.answers) as other:
                    other.poll(300, zmq.POLLOUT)
            nodes.commands[1].poll(500)
            assert nodes.lost() == []
        assert nodes._monitor.poll(10_000)
        assert nodes.lost() == [1]


def test_a_message_that_no_host_sends_changes_nothing(tmp_path: Path) -> None:
    own = config(tmp_path, fleet_secret=None)
    with (
        leader(own) as nodes,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{own.master_port}")
        deep = b"\x82\xa1a" + b"\x91" * 60_000
        for data in (b"", b"\xc1", ENCODER.encode({"type": "Joining"}), b"\x80", deep):
            stranger.send(data)
        stranger.send_multipart([ENCODER.encode(NodeBeat("i1")), b"more"])
        stranger.send(ENCODER.encode(NodeBeat("i1")))
        for _ in range(100):
            nodes.turn()
            if stranger.poll(50):
                break
        assert stranger.recv(zmq.NOBLOCK) == ENCODER.encode(Stale("i1"))
        assert nodes.roll.missing == [1]


def test_a_host_that_its_leader_refuses_ends(tmp_path: Path) -> None:
    own = config(tmp_path)

    async def ask() -> None:
        with leader(own) as nodes:
            there = replace(own, node_rank=1, page_size=8)
            agent = NodeAgent(there, asyncio.Event(), lambda _: None)
            running = asyncio.ensure_future(agent.run())
            async with asyncio.timeout(20.0):
                while not running.done():
                    nodes.turn()
                    await asyncio.sleep(0.02)
            with pytest.raises(NodeRefused, match="--page-size is 16 on node 0 and 8 on node 1"):
                running.result()

    asyncio.run(ask())


def test_a_fleet_of_one_host_takes_no_flags_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up.parse(["--nnodes", "2"])
    told = "--nnodes: not a flag of `effuse up`, which sets it on its one host"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ways", "left"),
    [
        (None, "^sm,cuda_ipc,rocm_ipc"),
        ("all", "^sm,cuda_ipc,rocm_ipc"),
        ("^tcp", "^tcp,sm,cuda_ipc,rocm_ipc"),
        ("tcp,self", "tcp,self"),
        ("rc, sm,cuda_ipc,cuda_copy", "rc,cuda_copy"),
        ("rc,cuda", "rc,cuda_copy,gdr_copy"),
        ("posix,cma", "tcp,self"),
    ],
)
def test_no_way_through_memory_of_others_is_left(ways: str | None, left: str) -> None:
    environment = {} if ways is None else {"UCX_TLS": ways}
    map_nothing(environment)
    assert environment["UCX_TLS"] == left


def test_gpus_of_several_hosts_map_no_memory_of_each_other() -> None:
    device = torch.device("cuda")
    group = ProcessGroup(0, 2, device, None, spans_hosts=True)
    group.map_peers(8, torch.float32)
    assert group._peers is None
    strict = ProcessGroup(0, 2, device, None, in_order=True, spans_hosts=True)
    with pytest.raises(ValueError, match=r"--batch-invariant: .* on several hosts"):
        strict.map_peers(8, torch.float32)
