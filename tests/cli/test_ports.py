"""Ports that are looked at and held, at addresses of both kinds."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from certificates import Authority
from loopbacks import LOOPBACKS

from effuse.cli import ports
from effuse.cli.ports import check_ports, free_port, hold_port
from effuse.cli.up import parse, refuse_early


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_port_is_held_at_an_address_as_grpc_takes_it(host: str) -> None:
    with hold_port(host, 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=r"cannot listen on .*: "):
            check_ports([(host, port)])
    check_ports([(host, port)])


def test_a_free_port_is_none_that_the_kernel_gives_to_somebody_else_meanwhile() -> None:
    """The kernel gives those of a range to connections and to port 0: Redis' was gone now and
    then.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = [free_port() for _ in range(20)]
    assert not any(first <= port <= last for port in found)
    check_ports([("127.0.0.1", port) for port in set(found)])


def test_a_free_port_is_found_where_nobody_tells_what_the_kernel_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "_GIVEN", tmp_path / "none")
    check_ports([("127.0.0.1", free_port())])


@pytest.mark.parametrize(
    ("one", "other"),
    [("--port", "--metrics-port"), ("--port", "--health-port"), ("--health-port", "--page-port")],
)
def test_two_of_a_fleets_ports_are_not_one(one: str, other: str) -> None:
    port = str(free_port())
    config, view = parse(["--device", "cpu", "--port", "0", one, port, other, port])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for two things: "):
        refuse_early(config, view)


def test_all_ports_that_another_fleet_has_are_named_at_once_with_the_flags_for_others() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        first, second = (taken.getsockname()[1] for taken in (one, other))
        with pytest.raises(OSError, match="cannot listen") as caught:
            check_ports([("127.0.0.1", first), ("127.0.0.1", 0), ("127.0.0.1", second)])
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{first} and 127.0.0.1:{second}: Address already in use; "
        "--port, --http-port, --page-port, --metrics-port and --health-port take other ports, and "
        "with 0 free ones"
    )


def test_an_address_of_another_machine_is_named_once() -> None:
    with pytest.raises(OSError, match="cannot listen") as caught:
        check_ports([("192.0.2.1", 50051)])
    assert str(caught.value) == "cannot listen on 192.0.2.1:50051: Cannot assign requested address"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, object]:
    """Files of keys and of TLS, by their names in a parameter."""
    keys = tmp_path / "keys"
    keys.touch()
    tls = Authority.make(tmp_path / "ca").sign("router")
    return {"keys": keys, "cert": tls.cert, "key": tls.key}


KEYS, TLS = "--keys {keys}", "--tls-cert {cert} --tls-key {key}"


@pytest.mark.parametrize(
    ("flags", "key"),
    [("--no-metrics", "metrics-port"), (KEYS, "page-port"), (TLS, "page-port")],
)
def test_a_port_at_which_nothing_is_to_listen_may_be_taken(
    flags: str, key: str, files: dict[str, object], tmp_path: Path
) -> None:
    words = ["--device", "cpu", "--port", "0", *flags.format(**files).split()]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = tmp_path / "fleet.toml"
        file.write_text(f"{key} = {taken.getsockname()[1]}")
        refuse_early(*parse(["--config", str(file), *words]))


@pytest.mark.parametrize("asks", [KEYS, TLS])
@pytest.mark.parametrize("page", ["--page-port 8099", "--page-port=8099", "--page"])
def test_a_page_is_refused_if_the_fleet_requires_tokens_or_tls(
    asks: str, page: str, files: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", *asks.format(**files).split()]
    with pytest.raises(SystemExit) as ended:
        parse([*words, *page.split()])
    assert ended.value.code == 2
    refusal, _ = capsys.readouterr().err.splitlines()
    flag = page.partition(" ")[0].partition("=")[0]
    assert refusal.startswith(f"effuse up: {flag}: expected without --keys and --tls-cert, because")


@pytest.mark.parametrize("page", ["", "--page-port 0", "--no-page", "--page --no-page"])
def test_a_fleet_that_requires_tokens_has_no_page(page: str, files: dict[str, object]) -> None:
    _, view = parse(["--device", "cpu", *KEYS.format(**files).split(), *page.split()])
    assert view.page_port is None
