"""Which connector an engine chooses by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from effuse.worker.config import Connector, DecodeConfig
from effuse.worker.connectors import choose_connector

LOGGER = "effuse.worker.connectors"


def choose(connector: Connector, host: str, problem: str, *, on_gpu: bool) -> str:
    config = DecodeConfig(connector=connector, host=host, allow_plaintext="all")
    return choose_connector(config, on_gpu=on_gpu, why_no_nixl=lambda: problem)


@pytest.mark.parametrize(
    ("host", "on_gpu", "problem", "chosen", "why"),
    [
        ("127.0.0.1", False, "", "nixl", "all workers are on this host"),
        ("::1", False, "", "nixl", "all workers are on this host"),
        ("localhost", False, "", "nixl", "all workers are on this host"),
        ("10.1.2.3", False, "", "zmq", "not a loopback"),
        ("0.0.0.0", True, "", "nixl", "on a GPU"),
        ("0.0.0.0", True, "no module named nixl", "zmq", "no module named nixl"),
        ("127.0.0.1", False, "no module named nixl", "zmq", "no module named nixl"),
    ],
)
def test_auto_takes_nixl_where_it_works_and_logs_why(
    caplog: pytest.LogCaptureFixture,
    host: str,
    on_gpu: bool,
    problem: str,
    chosen: str,
    why: str,
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert choose("auto", host, problem, on_gpu=on_gpu) == chosen
    (line,) = caplog.records
    assert line.getMessage().startswith(f"connector: {chosen}")
    assert why in line.getMessage()
    assert (line.levelno == logging.WARNING) == (on_gpu and chosen == "zmq")


@pytest.mark.parametrize("connector", ["nixl", "zmq"])
def test_a_connector_that_was_named_is_taken_and_nothing_is_tried(connector: Connector) -> None:
    def fails() -> str:
        raise AssertionError("it was tried")

    config = DecodeConfig(connector=connector)
    assert choose_connector(config, on_gpu=True, why_no_nixl=fails) == connector


def test_pages_that_are_to_be_encrypted_go_over_zmq(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 64)
    config = DecodeConfig(encrypt_pages=True, fleet_secret=secret)
    assert choose_connector(config, on_gpu=True, why_no_nixl=lambda: "") == "zmq"
    with pytest.raises(ValueError, match="--encrypt-pages: expected --connector zmq"):
        DecodeConfig(encrypt_pages=True, connector="nixl", fleet_secret=secret)
