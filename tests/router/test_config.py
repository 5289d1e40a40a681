"""Flags are the fields; other values are refused with the accepted form."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from effuse.router.config import RouterConfig, parse


def test_defaults() -> None:
    config = parse([])
    assert config == RouterConfig()
    assert (config.port, config.prefill, config.max_message_bytes) == (50051, "auto", 4 << 20)


def test_every_field_is_a_flag(tmp_path: Path) -> None:
    pem = tmp_path / "file.pem"
    pem.touch()
    config = parse(
        [
            "--host", "0.0.0.0", "--allow-plaintext", "all", "--port", "0", "--share-port",
            "--metrics-host", "::1", "--metrics-port", "9", "--no-metrics", "--health-port", "8",
            "--http-port", "7",
            "--fleet-cert", str(pem), "--fleet-key", str(pem), "--fleet-ca", str(pem),
            "--fleet-secret", str(pem),
            "--tls-cert", str(pem), "--tls-key", str(pem), "--tls-client-ca", str(pem),
            "--keys", str(pem), "--redis-credentials", str(pem),
            "--sentinel-credentials", str(pem), "--redis-ca", str(pem),
            "--max-message-bytes", "2048",
            "--redis-url", "redis://r:1/0", "--fleet", "f", "--prefill", "remote", "--no-steering",
            "--kv-mode", "pool",
            "--show-requests",
            "--model", str(tmp_path), "--tokenizer-threads", "3", "--max-concurrent-requests", "4",
            "--max-queue", "5", "--max-answers", "7", "--max-losses", "6", "--retry-share", "0.5",
            "--first-block-objective-s", "1", "--gap-objective-s", "0.1",
                "--gap-objective-ratio", "4", "--request-class", "chat:gap=0.1",
                "--max-request-s", "7.5", "--recovery-s", "9",
            "--connection-age-s", "4", "--keep-answers-s", "3", "--drain-s", "8",
            "--ready-file", "x", "--log-level", "debug", "--log-format", "json",
            "--otlp-traces-endpoint", "http://a:1",
        ]
    )  # fmt: skip
    changed = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
    assert changed == [f.name for f in fields(config)]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--prot", "1"], "unrecognized arguments: --prot"),
        (["--http-port", "-1"], "--http-port: expected 0 to 65535, got -1"),
        (["--port", "many"], "expected a whole number, got 'many'"),
        (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (
            ["--host", "0.0.0.0"],
            "--host: expected a loopback address, because calls would travel in plain text",
        ),
        (["--host", "0.0.0.0", "--allow-plaintext", "pages"], "or --allow-plaintext all; got"),
        (["--max-request-s", "1e10"], "--max-request-s: expected at most 1e+09 seconds"),
        (["--connection-age-s", "1e7"], "--connection-age-s: expected at most 2e+06 seconds"),
        (["--metrics-host", "::", "--metrics-port", "1"], "--metrics-host: expected a loopback"),
        (["--fleet-secret", "/no/file"], "--fleet-secret: expected a file, got '/no/file'"),
        (["--tls-key", __file__], "--tls-key: expected --tls-cert with it"),
        (["--tls-client-ca", __file__], "--tls-client-ca: expected --tls-cert and --tls-key with"),
        (["--fleet-ca", __file__], "--fleet-ca: expected --fleet-cert, --fleet-key with it"),
        (["--max-queue", "-1"], "--max-queue: expected 0 to"),
        (["--retry-share", "nan"], "--retry-share: expected 0 to 1, got nan"),
        (["--max-request-s", "nan"], "--max-request-s: expected seconds above 0, got nan"),
        (["--first-block-objective-s", "0"], "--first-block-objective-s: expected seconds above 0"),
        (["--gap-objective-s", "inf"], "--gap-objective-s: expected seconds above 0"),
        (["--gap-objective-ratio", "0.5"], "--gap-objective-ratio: expected 1 to 1000, got 0.5"),
        (["--request-class", "chat:gap=0"], "--request-class: expected a number above 0, at most"),
        (["--gap-objective-ratio", "nan"], "--gap-objective-ratio: expected 1 to 1000, got nan"),
        (["--prefill", "maybe"], "choose from"),
        (["--redis-url", "localhost"], "expected redis://host:port/db, got 'localhost'"),
        (["--model", "/no/such/dir"], "--model: expected a directory, got '/no/such/dir'"),
        (["--model", ""], "argument --model: expected a path, got ''"),
        (["--fleet", "a b"], "expected 1 to 128 letters"),
    ],
)
def test_bad_flags_name_the_accepted_form(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
