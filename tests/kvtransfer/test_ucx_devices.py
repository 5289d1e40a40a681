"""UCX is given the interface of the address that a worker listens on."""

from __future__ import annotations

import ipaddress
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvtransfer.fixtures import SMALL

from effuse.kvtransfer import interfaces, nixl_agent, nixl_transport
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.nixl_agent import DEVICES, FAMILIES, confined, options_of

OWN = [
    ("lo", ipaddress.ip_address("127.0.0.1")),
    ("eth0", ipaddress.ip_address("192.0.2.7")),
    ("eth0", ipaddress.ip_address("2001:db8::7")),
    ("eth1", ipaddress.ip_address("198.51.100.7")),
]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "addresses", lambda: iter(OWN))
    monkeypatch.setattr(nixl_agent, "_rdma_ports", lambda: iter(["mlx5_0:1"]))


@pytest.mark.parametrize(
    ("host", "devices", "family"),
    [
        ("127.0.0.1", "lo", "inet"),
        ("127.0.0.9", "lo", "inet"),  # of lo's network, which reports one address
        ("192.0.2.7", "eth0,mlx5_0:1", "inet"),
        ("[2001:db8::7]", "eth0,mlx5_0:1", "inet6"),
    ],
)
def test_the_interface_that_has_the_address(host: str, devices: str, family: str) -> None:
    environment: dict[str, str] = {}
    with confined(options_of(host, environment), environment):
        assert environment == {DEVICES: devices, FAMILIES: family}
    assert environment == {}, "a process that starts later may listen on another interface"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_every_interface(host: str) -> None:
    environment: dict[str, str] = {}
    with confined(options_of(host, environment), environment):
        assert environment == {}


def test_what_the_environment_says_holds() -> None:
    environment = {DEVICES: "mlx5_1:1"}
    with confined(options_of("127.0.0.1", environment), environment):
        assert environment == {DEVICES: "mlx5_1:1"}
    assert environment == {DEVICES: "mlx5_1:1"}


def test_the_family_of_the_environment_stays() -> None:
    environment = {FAMILIES: "inet6"}
    with confined(options_of("127.0.0.1", environment), environment):
        assert environment == {DEVICES: "lo", FAMILIES: "inet6"}
    assert environment == {FAMILIES: "inet6"}


def test_a_later_agent_listens_on_the_devices_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence makes an agent; its failure would end the connector, with all transfers."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no name server answers")

    transport = nixl_transport.NixlTransport(PageMemory(SMALL, 2), "1ab", role="decode")
    transport.open()
    before = transport.address()
    with monkeypatch.context() as later:
        later.setattr(socket, "getaddrinfo", refuse)
        later.setattr(nixl_agent, "addresses", lambda: iter([]))
        transport.renew(before)
    transport.shut_off(before)
    assert transport.address().agent_name != before.agent_name


def test_a_thread_that_makes_an_agent_at_the_same_time_is_confined_too() -> None:
    environment: dict[str, str] = {}

    def seen() -> dict[str, str]:
        with confined(options_of("127.0.0.1", environment), environment):
            return dict(environment)

    with ThreadPoolExecutor(1) as pool:
        with confined(options_of("127.0.0.1", environment), environment):
            other = pool.submit(seen)
            with pytest.raises(TimeoutError):
                other.result(0.05)
        assert other.result(5.0) == {DEVICES: "lo", FAMILIES: "inet"}


def test_an_agent_leaves_no_variable_behind() -> None:
    assert nixl_transport.why_unusable("127.0.0.1") == ""
    assert DEVICES not in os.environ and FAMILIES not in os.environ


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("203.0.113.9", "an interface of this machine"),
        ("no.such.host.invalid", "a host with an address"),
    ],
)
def test_an_address_that_is_not_ours_is_refused(host: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"--host: .*{told}"):
        options_of(host, {})


def test_the_kernel_tells_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in list(interfaces.addresses())
