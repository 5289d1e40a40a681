"""Values of flags: accepted ones, and how a bad one is refused."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from effuse.cli import arguments
from effuse.cli.__main__ import main
from effuse.client.client import Client
from effuse.client.credentials import Credentials
from effuse.config.flags import CommandError
from effuse.protos.errors import DETAILS_KEY, EffuseError, Unauthenticated, Unavailable, to_status


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (arguments.whole(1), "0", "expected a whole number of 1 or more, got 0"),
        (arguments.whole(1), "two", "expected a whole number of 1 or more, got 'two'"),
        (arguments.whole(1, 64), "65", "expected 1 to 64, got 65"),
        (arguments.number(0, 1), "1.5", "expected a number in [0, 1], got 1.5"),
        (arguments.number(0, 1), "nan", "expected a number in [0, 1], got nan"),
        (arguments.number(0), "inf", "expected a number in [0, infinity), got inf"),
        (arguments.number(0, 1, open_left=True), "0", "expected a number in (0, 1], got 0"),
        (arguments.target, "localhost", "expected HOST:PORT, got 'localhost'"),
        (arguments.target, "host:70000", "expected HOST:PORT, got 'host:70000'"),
        (arguments.target, "ftp://h:1", "expected HOST:PORT without ftp://, got 'ftp://h:1'"),
        (arguments.target, "::1:5", "expected HOST:PORT, got '::1:5'"),
        (arguments.target, "h:\u00b2", "expected HOST:PORT, got 'h:\u00b2'"),
        (arguments.target, "a b:1", "expected HOST:PORT, got 'a b:1'"),
        (arguments.target, "h:1/", "expected HOST:PORT, got 'h:1/'"),
        (arguments.directory, "/no/such", "expected a directory, got '/no/such'"),
        (arguments.directory, "", "expected a directory, got ''"),
        (arguments.new_file, "", "expected a file in an existing directory, got ''"),
        (arguments.file, "/no/such", "expected a file, got '/no/such'"),
        (
            arguments.new_file,
            "/no/such/file",
            "expected a file in an existing directory, got '/no/such/file'",
        ),
        (arguments.text, "a\udcff", r"expected UTF-8 text, got 'a\udcff'"),
        (arguments.seconds, "0", "expected a number in (0, 604800], got 0"),
        (arguments.seconds, "1e300", "expected a number in (0, 604800], got 1e300"),
        (arguments.redis_url, "localhost", "expected redis://host:port/db, got 'localhost'"),
        (
            arguments.redis_url,
            "redis://h:x/0",
            "expected redis://host:port/db, got 'redis://h:x/0'",
        ),
    ],
)
def test_a_bad_value_names_the_accepted_form(
    parse: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parse(text)
    assert str(refused.value) == message


def test_good_values(tmp_path: Path) -> None:
    assert arguments.whole(0)("7") == 7
    assert arguments.number(0, 1)("0.25") == 0.25
    for address in ("[::1]:50051", "dns:///h:1", "ipv6:[::1]:1", "a-b.c_d:65535"):
        assert arguments.target(address) == address
    os.mkfifo(tmp_path / "pipe")
    assert arguments.file(str(tmp_path / "pipe")) == tmp_path / "pipe"
    assert arguments.directory(str(tmp_path)) == tmp_path
    assert arguments.new_file(str(tmp_path / "new")) == tmp_path / "new"
    assert arguments.text("a\u2591") == "a\u2591"
    assert arguments.redis_url("redis://h:1/0") == "redis://h:1/0"


def test_flags_must_be_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments.command("x", "about")
    parser.add_argument("--window")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--win", "2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --win" in capsys.readouterr().err


def _token(flags: list[str]) -> str | None:
    parser = arguments.command("x", "about")
    arguments.add_router(parser)
    return arguments.credentials_of(parser, parser.parse_args(flags)).token


def test_a_token_has_no_end_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a Secret made from a file."""
    (tmp_path / "token").write_text("effuse-file\n")
    monkeypatch.setenv("EFFUSE_TOKEN", "effuse-environment\n")
    assert _token(["--token-file", str(tmp_path / "token")]) == "effuse-file"
    assert _token([]) == "effuse-environment"
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfeffuse-file\r\n")  # as some editors write it
    assert _token(["--token-file", str(tmp_path / "marked")]) == "effuse-file"
    monkeypatch.setenv("EFFUSE_TOKEN", "\n")
    assert _token([]) is None


@pytest.mark.parametrize("held", [b"", b"effuse-a\neffuse-b\n", b"effuse-\x8c", "é".encode()])
def test_what_is_no_token_is_not_sent_and_not_told(
    held: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    path.write_bytes(held)
    with pytest.raises(SystemExit) as ended:
        _token(["--token-file", str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{path}: expected one token" in told and "effuse-" not in told


def _failed(
    code: grpc.StatusCode, details: str, error: EffuseError | None = None
) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    if error is not None:
        trailing.add(DETAILS_KEY, to_status(error).SerializeToString())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


_UNREACHED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: "
_HELP = "'effuse up' starts a fleet, --target names another one"


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            f"{_UNREACHED}Failed to connect to remote host: Connection refused",
            f"no router answers on h:1 (Connection refused); {_HELP}",
        ),
        (
            f"{_UNREACHED}Failed to connect to remote host: No route to host",
            f"no router answers on h:1 (No route to host); {_HELP}",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:address lookup failed for h:1: "
            "Domain name not found]",
            f"no router answers on h:1 (Domain name not found); {_HELP}",
        ),
        (
            f"{_UNREACHED}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
            "error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: OK",
            "h:1 does not speak TLS: leave out --tls and all flags that begin with --tls-",
        ),
        (
            f"{_UNREACHED}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
            "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed",
            "the certificate of h:1 is not trusted (--tls-ca)",
        ),
        (
            f"{_UNREACHED}Hostname Verification Check failed.",
            "the certificate of h:1 is for another host",
        ),
        ("Tls handshake timed out", "no TLS connection to h:1: Tls handshake timed out"),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1.2.3.4:1: Failed "
            "parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            "the server on h:1 is not a router of effuse",
        ),
        (
            f"{_UNREACHED}Socket closed",
            "h:1 closed the connection (Socket closed): did the router end, or does it need TLS "
            "(--tls-ca)?",
        ),
    ],
)
def test_one_text_for_each_way_in_which_no_router_answers(details: str, told: str) -> None:
    error = _failed(grpc.StatusCode.UNAVAILABLE, details)
    assert arguments.explain(error, "h:1") == f"UNAVAILABLE: {told}"


def test_a_router_that_has_answered_needs_no_tls() -> None:
    error = _failed(grpc.StatusCode.UNAVAILABLE, f"{_UNREACHED}Socket closed")
    assert arguments.explain(error, "h:1", has_answered=True) == (
        "UNAVAILABLE: h:1 closed the connection (Socket closed): did the router end?"
    )


def test_a_request_to_a_fleet_that_is_not_there_fails_at_once() -> None:
    began = time.monotonic()
    with (
        pytest.raises(CommandError, match=r"no router answers on 127\.0\.0\.1:1"),
        arguments.requests_to("127.0.0.1:1", Credentials(), 60),
    ):
        pass
    assert time.monotonic() - began < 5  # a request would be repeated for over 10 s


def test_a_routers_own_words_are_shown_with_the_flag_that_it_asks_for() -> None:
    full = Unavailable("no worker is free")
    error = _failed(full.code, "as sent", full)
    assert arguments.explain(error, "h:1") == "UNAVAILABLE: no worker is free"
    told = arguments.explain(Unauthenticated("who are you"), "h:1")
    assert told == "UNAUTHENTICATED: who are you (--token-file or EFFUSE_TOKEN)"
    error = _failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert "h:1 is not a router of effuse, or not of this version" in arguments.explain(
        error, "h:1"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "dns:///127.0.0.1"])
def test_a_refused_connection_reads_alike_for_both_clients(host: str) -> None:
    """Blocking, as `status` and `top`, and asyncio's, as `generate`, `bench` and `demo`."""
    with pytest.raises(EffuseError) as blocking, Client(f"{host}:1", max_attempts=1) as client:
        client.models()
    cause = blocking.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert arguments.explain(blocking.value, f"{host}:1") == (
        f"UNAVAILABLE: no router answers on {host}:1 (Connection refused); {_HELP}"
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://host:1/", "http://[::1]:1"])
def test_a_target_may_be_a_url(url: str) -> None:
    assert arguments.target(url) == url


def test_a_url_without_tls_does_not_go_with_certificates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = arguments.command("x", "about")
    arguments.add_router(parser)
    good = parser.parse_args(["--target", "https://host:1", "--tls"])
    assert arguments.credentials_of(parser, good).tls is not None
    bad = parser.parse_args(["--target", "http://host:1", "--tls"])
    with pytest.raises(SystemExit) as ended:
        arguments.credentials_of(parser, bad)
    assert ended.value.code == 2
    assert "expected https:// with certificates" in capsys.readouterr().err


def test_a_token_file_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--token-file", "/dev/zero"])
    assert ended.value.code == 2
    assert "/dev/zero: expected one token" in capsys.readouterr().err
