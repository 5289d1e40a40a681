"""The only decode worker or the only router is gone for a while: clients wait, and none fails."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.absence import CLIENTS, carry_out
from e2e.client import wait_until
from e2e.routers import SecondRouter, second_router
from e2e.tiny import TINY, tiny_fleet
from prometheus_client.parser import text_string_to_metric_families

import effuse

REQUESTS = 10
NAME = "routers.test"
AGE_S = 2.0


def test_nobody_fails_while_the_only_worker_or_router_is_gone() -> None:
    for asked in carry_out(REQUESTS, print):
        assert not asked.failures
        assert len(asked.answers) >= REQUESTS * CLIENTS
        by_job: dict[int, set[str]] = {}
        for job, text in asked.answers:
            by_job.setdefault(job, set()).add(text)
        assert all(len(texts) == 1 for texts in by_job.values()), "an answer came out otherwise"


class Names:
    """A DNS server for one name, like a headless Service's."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.2)
        self._is_over = threading.Event()
        self.port = int(self._socket.getsockname()[1])

    def serve(self) -> None:
        """Answers until it is over."""
        while not self._is_over.is_set():
            try:
                asked, peer = self._socket.recvfrom(512)
            except TimeoutError:
                continue
            end = asked.index(b"\0", 12) + 5
            (kind,) = struct.unpack("!H", asked[end - 4 : end - 2])
            found = self.addresses if kind == 1 else []
            told = asked[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0) + asked[12:end]
            for address in found:
                told += struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address)
            self._socket.sendto(told, peer)

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            self._socket.close()


def test_a_router_that_joins_receives_calls_of_clients_that_are_connected() -> None:
    names, age = Names(), ("--connection-age-s", f"{AGE_S:g}")
    with names.serving(), tiny_fleet("sdar", connector="zmq", prefill=0, router_flags=age) as fleet:
        names.addresses = ["127.0.0.1"]
        port = fleet.address.rpartition(":")[2]
        target = f"dns://127.0.0.1:{names.port}/{NAME}:{port}"
        flags = ("--host", "127.0.0.2", "--port", port, "--metrics", "--metrics-port", "0", *age)
        prompt, params = list(TINY.plain_ids[:9]), effuse.Params(max_tokens=9)
        with (
            effuse.Client(target, max_attempts=1) as client,
            second_router(fleet, *flags) as second,
        ):
            for _ in range(5):
                client.generate(prompt, params)
            assert _answered(second) == 0, "no client knows of it yet"
            names.addresses.append("127.0.0.2")

            def is_shared() -> bool:
                client.generate(prompt, params)
                return _answered(second) > 5

            wait_until(is_shared, "the router that joined gets no call")


def _answered(router: SecondRouter) -> float:
    """Requests that it has answered."""
    with urllib.request.urlopen(f"http://{router.metrics}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [one for family in families for one in family.samples]
    return sum(one.value for one in samples if one.name == "effuse_requests_total")
