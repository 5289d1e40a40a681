"""A fleet with a given Redis: why that does not answer is logged at once, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import redis
import redis_server

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.ports import free_port
from effuse.placement.access import RIGHTS

WORD = "not-its-password"


@contextmanager
def nobody() -> Iterator[int]:
    yield free_port()


class Refusal(BaseRequestHandler):
    def handle(self) -> None:
        while self.request.recv(4096):
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n")


@contextmanager
def a_web_server() -> Iterator[int]:
    with ThreadingTCPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def one_with_a_password() -> Iterator[int]:
    with redis_server.running() as server:
        with redis.Redis(port=server.port) as admin:
            admin.config_set("requirepass", "its-password")
        yield server.port


@contextmanager
def one_that_allows_nothing() -> Iterator[int]:
    with redis_server.running() as server:
        with redis.Redis(port=server.port) as admin:
            admin.acl_setuser("default", enabled=True, passwords=[f"+{WORD}"], commands=["-@all"])
        yield server.port


@contextmanager
def one_without_rights_on_our_keys() -> Iterator[int]:
    with redis_server.running() as server:
        with redis.Redis(port=server.port) as admin:
            admin.acl_setuser("default", enabled=True, passwords=[f"+{WORD}"],
                              reset_keys=True, keys=["theirs:*"],
                              commands=RIGHTS.split())  # fmt: skip
        yield server.port


@contextmanager
def one_that_only_answers_pings() -> Iterator[int]:
    with redis_server.running() as server:
        with redis.Redis(port=server.port) as admin:
            admin.acl_setuser("default", enabled=True, passwords=[f"+{WORD}"],
                              commands=["-@all", "+ping"])  # fmt: skip
        yield server.port


@contextmanager
def a_copy_that_cannot_be_written() -> Iterator[int]:
    with redis_server.running() as first, redis_server.running() as copy:
        with redis.Redis(port=copy.port) as admin:
            admin.replicaof("127.0.0.1", first.port)
        yield copy.port


@contextmanager
def one_without_room() -> Iterator[int]:
    with redis_server.running() as server:
        with redis.Redis(port=server.port) as admin:
            admin.config_set("maxmemory", 1)
        yield server.port


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (nobody, "Connect call failed"),
        (a_copy_that_cannot_be_written, "read only replica"),
        (one_without_room, "maxmemory"),
    ],
)
def test_a_redis_that_does_not_answer_is_told_at_once_and_why(
    there: Callable[[], AbstractContextManager[int]],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("effuse.cli.fleet._REDIS_S", 0.5)
    (tmp_path / "credentials").write_text(WORD)
    flags = ("--redis-credentials", str(tmp_path / "credentials"))
    with there() as port:
        url = f"redis://127.0.0.1:{port}/0"
        fleet = Fleet(FleetConfig(redis_url=url, router_flags=flags))
        with pytest.raises(FleetError) as failed:
            fleet.start()
    assert f"Redis does not answer on {url}: " in str(failed.value) and why in str(failed.value)
    (told,) = caplog.messages
    assert f"Redis does not answer on {url} yet: " in told and why in told
    assert WORD not in f"{failed.value}{told}"


@pytest.mark.parametrize(
    ("there", "credentials", "why"),
    [
        (one_with_a_password, None, "Redis needs a password: --redis-credentials names a file"),
        (
            one_with_a_password,
            WORD,
            "Redis refuses the user or the password of --redis-credentials",
        ),
        (one_with_a_password, "its-pass:word", "a colon as default:PASSWORD"),
        (one_that_allows_nothing, WORD, "no permissions to run the 'eval' command"),
        (one_that_only_answers_pings, WORD, "no permissions to run the 'eval' command"),
        (one_without_rights_on_our_keys, WORD, "No permissions to access a key"),
        (a_web_server, None, "the server there is not Redis"),
    ],
)
def test_a_redis_that_refuses_is_not_waited_for(
    there: Callable[[], AbstractContextManager[int]],
    credentials: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, at once: asking again is no help."""
    monkeypatch.setattr("effuse.cli.fleet._REDIS_S", 3600.0)
    flags: tuple[str, ...] = ()
    if credentials is not None:
        (tmp_path / "credentials").write_text(credentials)
        flags = ("--redis-credentials", str(tmp_path / "credentials"))
    with there() as port:
        fleet = Fleet(FleetConfig(redis_url=f"redis://127.0.0.1:{port}/0", router_flags=flags))
        with pytest.raises(FleetError) as failed:
            fleet.start()
    assert why in str(failed.value) and "\n" not in str(failed.value)
    assert not caplog.messages
    assert credentials is None or credentials not in str(failed.value)


def test_credentials_for_a_redis_of_its_own_are_refused() -> None:
    """It has its own user, and refuses another one's password."""
    for flag in ("--redis-credentials", "--sentinel-credentials", "--redis-ca"):
        with pytest.raises(ValueError, match=f"{flag}: expected only with --redis-url"):
            FleetConfig(router_flags=(flag, "file"))


def test_a_number_of_a_database_that_it_lacks_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("effuse.cli.fleet._REDIS_S", 3600.0)
    with redis_server.running() as server:
        fleet = Fleet(FleetConfig(redis_url=f"redis://127.0.0.1:{server.port}/99"))
        with pytest.raises(FleetError, match="DB index is out of range"):
            fleet.start()
