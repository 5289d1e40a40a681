"""Certificates: both ends show theirs, new files count from the next connection on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.client.credentials import Credentials
from effuse.protos import rpc
from effuse.protos.channels import FLEET_NAME, OPEN, FleetAccess
from effuse.protos.tls import ChannelTls, ServerTls, TlsFiles

ASK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours") / "ca")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs") / "ca")


@asynccontextmanager
async def serving(access: FleetAccess) -> AsyncIterator[str]:
    server = rpc.RpcServer(rpc.FLEET_LIMITS, tls=access.server_tls())
    port = await server.start("127.0.0.1:0", [])
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def status(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call over a new connection ends."""
    async with channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(ASK, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert answer.status == SERVING
        return grpc.StatusCode.OK


def test_a_fleet_answers_its_own_certificates_alone(ours: Authority, theirs: Authority) -> None:
    member = FleetAccess(ours.sign("member", FLEET_NAME))
    stranger = theirs.sign("stranger", FLEET_NAME)

    async def main() -> None:
        async with serving(member) as address:
            assert await status(member.connect(address)) is grpc.StatusCode.OK
            impostor = TlsFiles(cert=stranger.cert, key=stranger.key, ca=ours.cert)
            assert await status(FleetAccess(impostor).connect(address)) is UNAVAILABLE
            assert await status(FleetAccess(TlsFiles(ca=ours.cert)).connect(address)) is UNAVAILABLE
            assert await status(OPEN.connect(address)) is UNAVAILABLE

    asyncio.run(main())


@pytest.mark.parametrize("sealed", [False, True])
def test_no_proxy_of_the_environment_stands_between_a_fleets_processes(
    ours: Authority, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # without a listener
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    access = FleetAccess(ours.sign("sealed", FLEET_NAME) if sealed else None)

    async def main() -> None:
        async with serving(access) as address:
            assert await status(access.connect(address)) is grpc.StatusCode.OK

    asyncio.run(main())


def test_a_stranger_at_a_workers_address_is_told_nothing(
    ours: Authority, theirs: Authority
) -> None:
    """Neither one of another authority, nor one of ours that is not of the fleet."""
    member = FleetAccess(ours.sign("member", FLEET_NAME))
    ca_bundle = theirs.sign("stranger", FLEET_NAME)
    others = (
        TlsFiles(cert=ca_bundle.cert, key=ca_bundle.key, ca=ours.cert),
        ours.sign("web", "www.example.com"),
    )

    async def main() -> None:
        for stranger in others:
            async with serving(FleetAccess(stranger)) as address:
                assert await status(member.connect(address)) is UNAVAILABLE

    asyncio.run(main())


def test_new_files_count_without_a_restart(tmp_path: Path) -> None:
    """Of the whole fleet: once all have certificates of another authority, the old ones are out."""
    old, new = Authority.make(tmp_path / "old"), Authority.make(tmp_path / "new")
    files = old.sign("member", FLEET_NAME)
    member, behind = FleetAccess(files), FleetAccess(old.sign("behind", FLEET_NAME))

    async def main() -> None:
        async with serving(member) as address:
            assert await status(behind.connect(address)) is grpc.StatusCode.OK
            assert member.look() == 0
            fresh = new.sign("member", FLEET_NAME)
            for source, target in ((fresh.key, files.key), (new.cert, files.ca)):
                assert source is not None and target is not None
                source.replace(target)
            # Key and certificate do not match yet: the earlier ones stay.
            assert member.look() == 0
            assert fresh.cert is not None and files.cert is not None
            fresh.cert.replace(files.cert)
            assert member.look() == 1
            assert await status(member.connect(address)) is grpc.StatusCode.OK
            assert await status(behind.connect(address)) is UNAVAILABLE

    asyncio.run(main())


def test_a_certificate_without_its_key_is_refused(ours: Authority) -> None:
    """gRPC would end the whole process, even where the certificate's file holds the key, too."""
    files = ours.sign("one")
    assert files.cert is not None and files.key is not None
    both = ours.home / "both.pem"
    both.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    for half in ({"cert": both}, {"key": files.key}):
        with pytest.raises(ValueError, match="expected both cert and key, or neither"):
            TlsFiles(**half)
    assert ChannelTls(TlsFiles(cert=both, key=both)).version == 0


def test_nobody_is_asked_for_the_password_of_a_key(ours: Authority) -> None:
    """OpenSSL would wait for input at the terminal, and gRPC accepts no such key."""
    files = ours.sign("locked")
    assert files.key is not None
    locked = ours.home / "locked.encrypted"
    words = ("pkcs8", "-topk8", "-passout", "pass:secret", "-in", files.key, "-out", locked)
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)
    with pytest.raises(OSError, match=r"locked\.encrypted.* expected a key without a password"):
        ChannelTls(TlsFiles(cert=files.cert, key=locked))


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_without_a_file_of_theirs_the_systems_authorities_are_trusted(
    ours: Authority, theirs: Authority, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenSSL finds them. By itself gRPC trusts those that it brings along."""
    signed = ours.sign("router", "localhost")

    async def main() -> None:
        server = rpc.RpcServer(
            rpc.PUBLIC_LIMITS, tls=ServerTls(TlsFiles(cert=signed.cert, key=signed.key))
        )
        address = f"127.0.0.1:{await server.start('127.0.0.1:0', [])}"
        try:
            for authority, expected in ((ours, grpc.StatusCode.OK), (theirs, UNAVAILABLE)):
                _trust(authority, variable, monkeypatch)
                channel = Credentials(tls=TlsFiles()).aio_opener(address, ())()
                assert await status(channel) is expected
        finally:
            await server.stop(0)

    asyncio.run(main())


def _trust(authority: Authority, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it the only one of this system, in a file or in a directory of hashed names."""
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, str(authority.home / "none"))
    hashed = authority.home / "hashed"
    hashed.mkdir(exist_ok=True)
    (hashed / "5ed36f99.0").write_bytes(authority.cert.read_bytes())
    (hashed / "00673b5b.0").unlink(missing_ok=True)
    (hashed / "00673b5b.0").symlink_to("of-one-that-was-removed.pem")
    where = authority.cert if variable == "SSL_CERT_FILE" else hashed
    monkeypatch.setenv(variable, str(where))


def test_files_that_are_gone_are_told_once_and_not_at_each_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority.make(tmp_path / "ca").sign("member", FLEET_NAME)
    member = FleetAccess(files)
    assert files.key is not None
    kept = files.key.rename(tmp_path / "kept")
    for times in (1, 2):
        assert [member.look() for _ in range(3)] == [0, 0, 0]
        assert caplog.text.count("keeping the previous certificates") == times
        kept.rename(files.key)
        assert member.look() == 0
        files.key.rename(kept)


def test_files_that_vanish_right_behind_their_check_are_read_once_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority.make(tmp_path / "ca").sign("member", FLEET_NAME)
    assert files.key is not None
    member, server = FleetAccess(files), ServerTls(files)
    newest = files.key.stat().st_mtime + 10
    os.utime(files.key, (newest, newest))

    def gone(self: Path) -> bytes:
        raise FileNotFoundError(str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", gone)
        assert (member.look(), server._changed()) == (0, None)
    assert member.look() == 1
    assert server._changed() is not None


@pytest.mark.parametrize("kind", [ServerTls, ChannelTls])
def test_files_that_cannot_be_used_are_refused_at_the_start(
    kind: type[ServerTls] | type[ChannelTls], ours: Authority, tmp_path: Path
) -> None:
    """In a line that names the file at fault."""
    one, two = ours.sign("one"), ours.sign("two")
    expired = ours.expired("expired")
    empty, marked, cut = (tmp_path / f"{name}.pem" for name in ("empty", "marked", "cut"))
    empty.touch()
    assert one.cert is not None
    marked.write_bytes(b"\xef\xbb\xbf" + one.cert.read_bytes())
    cut.write_bytes(one.cert.read_bytes()[:300])
    for files, told in (
        (
            TlsFiles(cert=one.key, key=one.cert),
            r"one.key: expected a PEM certificate, found a priv",
        ),
        (
            TlsFiles(cert=one.cert, key=one.cert),
            r"one.pem: expected a PEM private key, found a cert",
        ),
        (TlsFiles(cert=one.cert, key=two.key), r"two.key is not the key of the .* in \S*one.pem"),
        (TlsFiles(cert=ours.cert, key=one.key), r"one.key is not the key of the .* in \S*ca.pem"),
        (TlsFiles(cert=one.cert, key=one.key, ca=one.key), r"one.key: expected a PEM certificate"),
        (TlsFiles(cert=one.cert, key=one.key, ca=empty), r"empty.pem: .*certificate, found none"),
        (
            TlsFiles(cert=marked, key=one.key),
            r"marked.pem: expected PEM text without a byte-order mark",
        ),
        (TlsFiles(cert=cut, key=one.key), r"cannot use \S*cut.pem or \S*one.key"),
        (TlsFiles(cert=expired.cert, key=expired.key), r"expired.pem: certificate has expired"),
        (TlsFiles(cert=tmp_path / "none", key=two.key), r"No such file .*none"),
    ):
        with pytest.raises(OSError, match=told):
            kind(files)


def test_an_authority_in_the_wrong_place_is_refused_at_the_start(
    ours: Authority, theirs: Authority
) -> None:
    one = ours.sign("one", FLEET_NAME)
    with pytest.raises(OSError, match=r"one.pem: expected certificates of an authority"):
        ServerTls(TlsFiles(cert=one.cert, key=one.key, ca=one.cert))
    with pytest.raises(OSError, match=r"one.pem is not signed by \S*ca.pem: unable to get local"):
        FleetAccess.read(one.cert, one.key, theirs.cert, None)


@pytest.mark.parametrize("usage", [None, "serverAuth,clientAuth"])
def test_a_certificate_that_serves_a_fleet_is_taken(ours: Authority, usage: str | None) -> None:
    one = ours.sign("one", "other-name", FLEET_NAME, usage=usage)
    FleetAccess.read(one.cert, one.key, one.ca, None)


@pytest.mark.parametrize(
    ("name", "usage", "told"),
    [
        ("router", None, "mismatch"),
        (FLEET_NAME, "serverAuth", "purpose"),
        (FLEET_NAME, "clientAuth", "purpose"),
    ],
)
def test_a_certificate_with_which_no_fleet_works_is_refused_at_the_start(
    ours: Authority, name: str, usage: str | None, told: str
) -> None:
    """Otherwise every process would be ready, and refuse the others' calls."""
    one = ours.sign("one", name, usage=usage)
    with pytest.raises(OSError, match=told) as refused:
        FleetAccess.read(one.cert, one.key, one.ca, None)
    assert str(one.cert) in str(refused.value)
