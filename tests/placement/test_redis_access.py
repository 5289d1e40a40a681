"""Redis with users and with TLS: allowed and refused access, and secrets that never appear."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from certificates import Authority
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedSSLConnection
from redis.crc import key_slot
from redis_groups import SERVICE, servers, until
from redis_server import PLACED, RECORD, ROUTER, running, running_placements

from effuse.cli.ports import free_port
from effuse.placement.access import CREDENTIALS_VARIABLE, RIGHTS, RedisAccess
from effuse.placement.records import PrefixNews, StoredWorker
from effuse.placement.store import Claim, Keys, Store, StoreUnavailable
from effuse.protos.tls import TlsFiles


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server that takes one user."""
    with running() as server:
        with redis.Redis.from_url(server.connection_url) as admin:
            admin.acl_setuser("fleet", enabled=True, passwords=["+pass:word"], keys="*",
                              commands=RIGHTS.split())  # fmt: skip
            admin.acl_setuser("default", enabled=False)
        yield server.connection_url


async def workers(url: str, access: RedisAccess) -> list[tuple[StoredWorker, float]]:
    async with Store(url, "blue", access=access, timeout_s=20.0) as store:
        return await store.workers()


def test_a_file_or_the_environment_names_the_user(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "credentials"
    path.write_text("fleet:pass:word\n")
    assert asyncio.run(workers(url, RedisAccess(credentials=path))) == []
    with pytest.raises(StoreUnavailable, match="Redis needs a password: --redis-credentials names"):
        asyncio.run(workers(url, RedisAccess()))
    path.write_bytes(b"\xef\xbb\xbffleet:pass:word\r\n")  # as editors of other systems write it
    assert asyncio.run(workers(url, RedisAccess(credentials=path))) == []
    monkeypatch.setenv(CREDENTIALS_VARIABLE, "fleet:pass:word")
    assert asyncio.run(workers(url, RedisAccess())) == []
    assert not caplog.records, "redis-py warns of nothing"


def test_credentials_of_random_bytes_are_no_end_of_a_process(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(b"fleet:\xe4\xff")
    with pytest.raises(StoreUnavailable, match="credentials: expected UTF-8"):
        asyncio.run(workers(url, RedisAccess(credentials=path)))
    monkeypatch.setenv(CREDENTIALS_VARIABLE, os.fsdecode(path.read_bytes()))
    with pytest.raises(StoreUnavailable, match="credentials: expected UTF-8"):
        asyncio.run(workers(url, RedisAccess()))


def test_a_user_of_the_fleet_may_do_all_that_is_asked(url: str, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("fleet:pass:word")

    async def main() -> None:
        access = RedisAccess(credentials=path)
        async with Store(url, "may", access=access, timeout_s=20.0) as store:
            assert await store.announce(RECORD, 60.0, "process-1", takes=True) == "held"
            assert len(await store.workers()) == 1
            assert await store.announce_router(ROUTER, 60.0) == []
            assert await store.claim(PLACED, "asked", 60.0) == Claim()
            assert await store.place([(PLACED, 60.0)]) == ["placed"]
            assert len(await running_placements(store)) == 1
            assert await store.placement("r1")
            await store.keep_answer("r1", "asked", b"said", 60.0)
            assert await store.answer("r1", "asked") == b"said"
            assert list(await store.share_refusals({"deadly": 60.0}, 8)) == ["deadly"]
            assert (await store.share_prefixes("router-a", PrefixNews(), b"1", 9)).epoch
            await store.release_router("router-a")

    asyncio.run(main())


def test_a_new_password_counts_without_a_restart_and_none_is_told(url: str, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("fleet:wrong-word")

    async def main() -> None:
        async with Store(
            url, "blue", access=RedisAccess(credentials=path), timeout_s=20.0
        ) as store:
            with pytest.raises(StoreUnavailable) as caught:
                await store.workers()
            assert "wrong-word" not in str(caught.value)
            path.write_text("fleet:pass:word")
            store.circuit.succeeded()  # does not wait for its pause
            assert await store.workers() == []

    asyncio.run(main())


@asynccontextmanager
async def tls_before(url: str, files: TlsFiles) -> AsyncIterator[str]:
    """A server with TLS that passes traffic on: the one for tests cannot do TLS."""
    assert files.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    port = int(url.rpartition(":")[2].partition("/")[0])

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


def test_tls_trusts_the_authority_that_it_is_given(url: str, tmp_path: Path) -> None:
    ours, theirs = Authority.make(tmp_path / "ours"), Authority.make(tmp_path / "theirs")
    path = tmp_path / "credentials"
    path.write_text("fleet:pass:word")

    async def main() -> None:
        async with tls_before(url, ours.sign("redis")) as sealed:
            access = RedisAccess(credentials=path, ca=ours.cert)
            assert await workers(sealed, access) == []
            for ca in (theirs.cert, None):
                with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                    await workers(sealed, RedisAccess(credentials=path, ca=ca))

    asyncio.run(main())


def test_all_keys_of_a_fleet_are_in_one_slot_whatever_clients_name_requests() -> None:
    keys = Keys("blue")
    names = list(vars(keys).values())
    names += [keys.request("{green}"), keys.answer("a{b}c"), keys.worker("w"), keys.router("r")]
    assert {key_slot(name.encode()) for name in names} == {key_slot(b"blue")}


def silence(url: str, access: RedisAccess | None = None) -> str:
    """Why Redis does not answer; empty if it does."""
    found = (access or RedisAccess()).silence(url, "blue")
    return "" if found is None else found.why


def test_what_is_wrong_with_a_sentinel_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "word").write_text("hidden")
    with servers(tmp_path) as group:
        redis_port = group.start()
        config = (
            f"requirepass hidden\nsentinel monitor {SERVICE} 127.0.0.1 {redis_port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 200\n"
        )
        port = group.start("--sentinel", config=config)
        url = f"redis+sentinel://127.0.0.1:{port}/{SERVICE}"
        access = RedisAccess(sentinel_credentials=path)
        until(lambda: not silence(url, access), "the Sentinel does not know its primary")
        assert "refuses --sentinel-credentials, or requires them" in silence(url)
        assert silence(f"{url}s", access) == f"no Sentinel knows the service '{SERVICE}s'"
        group.kill(redis_port)
        until(lambda: "NOQUORUM" in silence(url, access), "the lack of a quorum is not named")
        group.kill(port)
        assert silence(url, access).startswith("no Sentinel answers (Error 111 connecting to 127")


def test_a_cluster_with_users_and_tls(tmp_path: Path) -> None:
    ours = Authority.make(tmp_path / "ours")
    (path := tmp_path / "credentials").write_text("fleet:word")
    access = RedisAccess(credentials=path, ca=ours.cert)

    async def ask(port: int, admin: Any) -> None:
        async with tls_before(f"redis://127.0.0.1:{port}", ours.sign("redis")) as sealed:
            place = sealed.removeprefix("rediss://").removesuffix("/0")
            admin.config_set("cluster-announce-port", place.rpartition(":")[2])
            url = f"rediss+cluster://{place}"
            assert "'cluster|slots' command" in await asyncio.to_thread(silence, url, access)
            admin.execute_command("ACL", "SETUSER", "fleet", "+cluster|slots")
            assert await workers(url, access) == []
            theirs = RedisAccess(credentials=path)
            assert "certificate verify failed" in await asyncio.to_thread(silence, url, theirs)

    with servers(tmp_path) as group:
        port = group.start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        plain = group.start()
        with group.client(port) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            admin.acl_setuser("fleet", enabled=True, passwords=["+word"], keys="*",
                              commands=RIGHTS.split())  # fmt: skip
            until(lambda: admin.cluster("INFO")["cluster_state"] == "ok", "the cluster is down")
            asyncio.run(ask(port, admin))
        assert "cluster support disabled" in silence(f"redis+cluster://127.0.0.1:{plain}")


def test_sentinels_and_their_primary_are_called_with_tls(tmp_path: Path) -> None:
    ca = Authority.make(tmp_path / "ours").cert

    async def go() -> None:
        async with Store("rediss+sentinel://one,two/x", "f", access=RedisAccess(ca=ca)) as store:
            assert isinstance(store._redis, redis.asyncio.Redis)
            pool = store._redis.connection_pool
            assert isinstance(pool, SentinelConnectionPool)
            assert pool.connection_class is SentinelManagedSSLConnection
            for each in (pool, *(one.connection_pool for one in pool.sentinel_manager.sentinels)):
                assert each.connection_kwargs["ssl_ca_certs"] == str(ca)

    asyncio.run(go())
