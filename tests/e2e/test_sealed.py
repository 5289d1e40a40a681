"""A fleet with certificates, keys and encrypted pages: it serves clients with the right
credentials, and reveals nothing to others on any port.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import grpc
import psutil
import pytest
import redis
from certificates import Authority
from e2e.client import all_at_once
from e2e.processes import tree
from e2e.tiny import tiny_checkpoint

import effuse
from effuse.cli.__main__ import main
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.protos.channels import FLEET_NAME
from effuse.protos.tls import TlsFiles
from effuse.router.tenants import Tenant, line_of, make_token
from effuse.v1 import model_pb2, model_pb2_grpc, worker_pb2, worker_pb2_grpc

TOKEN = make_token()
WAIT_S = 1.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("sealed") / "ca")


@pytest.fixture(scope="module")
def fleet(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    inside, outside = authority.sign("fleet", FLEET_NAME), authority.sign("router")
    among = ("--fleet-cert", inside.cert, "--fleet-key", inside.key, "--fleet-ca", inside.ca)
    keys = authority.home / "keys"
    keys.write_text(line_of(TOKEN, Tenant("acme")))
    shown = ("--tls-cert", outside.cert, "--tls-key", outside.key, "--keys", keys)
    config = FleetConfig(
        model=tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar"),
        worker_flags=(
            *("--device", "cpu", "--num-pages", "64", "--encrypt-pages", "--no-metrics"),
            *map(str, among),
        ),
        router_flags=("--prefill", "remote", "--no-metrics", *map(str, (*among, *shown))),
    )
    with Fleet(config) as running:
        yield running


def test_answers_pass_through_it(fleet: Fleet, authority: Authority) -> None:
    tls = TlsFiles(ca=authority.cert)
    with effuse.Client(fleet.address, tls=tls, token=TOKEN) as client:
        answer = client.generate(list(range(1, 41)), effuse.Params(max_tokens=8))
    assert answer.stats.kv_bytes > 0


def test_commands_show_what_they_are_given(fleet: Fleet, authority: Authority) -> None:
    token = authority.home / "token"
    token.write_text(TOKEN)
    known = ("--target", fleet.address, "--tls-ca", str(authority.cert))
    shown = (*known, "--token-file", str(token))
    assert main(["status", *shown]) == 0
    assert main(["generate", "--ids", "1,2,3", "--max-tokens", "8", *shown]) == 0
    assert main(["status", *known]) == 1
    assert main(["status", "--target", fleet.address, "--timeout", "3"]) == 1


def test_no_port_tells_a_stranger_anything(fleet: Fleet, authority: Authority) -> None:
    """Each that a process of the fleet listens on is asked by whatever protocol there may be."""
    ports = dict(_listening(fleet))
    names = [ports[port] for port in sorted(ports)]
    assert {"redis", "router", "prefill-0", "decode-0"} == set(names)
    assert names.count("prefill-0") >= 3  # calls, pages, and the engine's sign of life
    trusting = grpc.ssl_channel_credentials(authority.cert.read_bytes())

    def is_silent(port: int) -> None:
        name, address = ports[port], f"127.0.0.1:{port}"
        assert not _answers_calls(grpc.insecure_channel(address)), (name, "plain text")
        assert not _answers_calls(_sealed(address, trusting)), (name, "TLS, showing nothing")
        assert _tells_nothing(port), (name, "bytes")

    all_at_once(is_silent, list(ports))  # each is waited for


def _listening(fleet: Fleet) -> Iterator[tuple[int, str]]:
    """Every TCP port of the fleet, with its owner."""
    for name, process in fleet.processes.items():
        for each in tree(process.pid):
            for one in each.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    yield one.laddr.port, name


def _sealed(address: str, trusting: grpc.ChannelCredentials) -> grpc.Channel:
    named = [("grpc.ssl_target_name_override", FLEET_NAME)]
    if not _speaks_tls(address):
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, trusting, named)


def _speaks_tls(address: str) -> bool:
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), WAIT_S) as plain,
        context.wrap_socket(plain),
    ):
        return True
    return False


def _answers_calls(channel: grpc.Channel) -> bool:
    """Whether it reveals load or models, or would drain, without credentials."""
    with channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        models = model_pb2_grpc.ModelServiceStub(channel)
        for call in (
            lambda: worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=WAIT_S),
            lambda: models.ListWorkers(model_pb2.ListWorkersRequest(), timeout=WAIT_S),
        ):
            try:
                call()
            except grpc.RpcError as error:
                expected = ("UNAVAILABLE", "UNAUTHENTICATED", "DEADLINE_EXCEEDED")
                assert error.code().name in expected, error
            else:
                return True
    return False


def _tells_nothing(port: int) -> bool:
    """Whether what comes back on plain bytes is an error, a greeting or nothing at all."""
    for said in (b"PING\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
            one.settimeout(0.3)
            one.sendall(said)
            heard = one.recv(4096)
            if b"+PONG" in heard or b"200 OK" in heard or b"effuse" in heard:
                return False
    return True


def test_its_redis_asks_for_a_password(fleet: Fleet) -> None:
    with (
        redis.Redis.from_url(fleet.redis_url, socket_timeout=30) as stray,
        pytest.raises(redis.AuthenticationError),
    ):
        stray.dbsize()
