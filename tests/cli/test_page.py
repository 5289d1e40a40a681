"""The page about a fleet, by its endpoints."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from cli.looked_at import REQUEST, router

from effuse.cli.page import PAGE, PageSource, served

METRICS = {"router": "127.0.0.1:9000", "decode-0": "127.0.0.1:9001"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with router() as target, served(PageSource(target, lambda: METRICS), 0) as address:
        yield address


def get(
    address: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request(method, path, headers=dict(headers or {}))
    return connection.getresponse()


def test_it_is_one_file_that_takes_nothing_from_elsewhere(address: str) -> None:
    answer = get(address, "/")
    body, policy = answer.read(), answer.headers["Content-Security-Policy"]
    assert (answer.status, body) == (200, PAGE)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    text = body.decode()
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"https?:|src=|href=|innerHTML|\son\w+=", text)


def test_it_has_words_for_readers_of_screens_and_colours_for_the_dark() -> None:
    text = PAGE.decode()
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text
    assert text.count('role="table" aria-labelledby=') == text.count("<table") == 2
    for wanted in ('role="alert"', 'role="status"', 'aria-pressed="false"', "columnheader"):
        assert wanted in text
    assert 'role: "img", "aria-label": label' in text, "each picture has a text"


def test_what_is_at_work_as_json(address: str) -> None:
    told = json.loads(get(address, "/fleet.json").read())
    assert (told["error"], told["num_running"]) == ("", 1)
    assert {"router", "num_tokens", "num_first_blocks", "first_block_seconds"} <= told.keys()
    (worker,) = told["workers"]
    assert (worker["worker_id"], worker["state"]) == ("prefill-0", "WORKER_STATE_READY")
    assert worker["links"][0]["transport"] == "cma"
    (request,) = told["requests"]
    assert (request["name"], request["blocks"]) == (REQUEST.name, ["█░░█"])


def test_events_show_a_block_filling_in(address: str) -> None:
    answer = get(address, "/events")
    assert answer.headers["Content-Type"] == "text/event-stream"
    shown: list[list[str]] = []
    while len(shown) < 4:
        line = answer.readline().decode()
        if line.startswith("data: "):
            fleet = json.loads(line.removeprefix("data: "))
            shown.append([blocks for one in fleet["requests"] for blocks in one["blocks"]])
    answer.close()
    assert shown == [["█░░█"], ["█░██"], ["████"], []]


def test_where_prometheus_finds_the_metrics(address: str) -> None:
    targets = json.loads(get(address, "/targets.json").read())
    assert targets == [
        {"targets": [at], "labels": {"process": name}} for name, at in METRICS.items()
    ]


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/etc/passwd", "GET", {}, 404),
        ("/", "POST", {}, 501),
        ("/", "GET", {"Host": "evil.example"}, 421),
        ("/events", "GET", {"Host": "evil.example:80"}, 421),
        ("/?a=b", "GET", {"Host": "localhost"}, 200),
    ],
)
def test_nothing_else_is_answered(
    address: str, path: str, method: str, headers: Mapping[str, str], status: int
) -> None:
    answer = get(address, path, method, headers)
    assert answer.status == status
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_fleet_that_does_not_answer_is_said_so() -> None:
    with served(PageSource("127.0.0.1:1", dict), 0) as address:
        told = json.loads(get(address, "/fleet.json").read())
    assert told["error"].startswith("UNAVAILABLE") and told["workers"] == []


def test_more_viewers_than_it_takes_are_refused() -> None:
    with router() as target:
        source = PageSource(target, dict)
        while source.viewers.acquire(blocking=False):
            pass
        with served(source, 0) as address:
            assert get(address, "/events").status == 503


def test_its_port_is_free_afterwards() -> None:
    with served(PageSource("127.0.0.1:1", dict), 0) as address:
        port = urlsplit(address).port
        assert port
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_who_goes_away_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the terminal of the user of the fleet, without a page."""
    told: list[object] = []
    over = threading.Event()
    end = ThreadingHTTPServer.shutdown_request

    def end_and_say(self: ThreadingHTTPServer, request: socket.socket) -> None:
        end(self, request)
        over.set()

    monkeypatch.setattr(ThreadingHTTPServer, "shutdown_request", end_and_say)
    monkeypatch.setattr(ThreadingHTTPServer, "handle_error", lambda *given: told.append(given))
    with served(PageSource("127.0.0.1:1", dict), 0) as address:
        client = socket.create_connection(("127.0.0.1", urlsplit(address).port or 0))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # by a reset
        assert over.wait(20)
    assert not told
