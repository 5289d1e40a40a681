"""The cost of mutual TLS on every call for a unary request.

Two fleets of one prefill and one decode worker each: one in plain text; in the other, client and
router, and router and workers, show each other certificates. The same short request goes to both in
pairs whose order alternates, over persistent connections; the figure is the median of the pairs'
differences.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from effuse.benchmarks.report import Figure
from effuse.benchmarks.router_overhead import asking
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.client.credentials import Credentials
from effuse.protos.tls import TlsFiles

PAIRS = 300
WARM_UP = 40
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
_NAMES = "subjectAltName=DNS:effuse-fleet,IP:127.0.0.1"


def measure() -> tuple[list[Figure], list[str]]:
    """No figure has a limit here; one note has the result."""
    with tempfile.TemporaryDirectory(prefix="effuse-tls-") as home:
        files = _certificates(Path(home))
        plain_config, sealed_config = _config(()), _config(_flags("fleet", files))
        with Fleet(plain_config) as plain, Fleet(sealed_config) as sealed:
            open_s, sealed_s = asyncio.run(_alternate(plain.address, sealed.address, files))
    added = [1e3 * (after - before) for before, after in zip(open_s, sealed_s, strict=True)]
    low, middle, high = statistics.quantiles(added, n=4)
    return [], [
        f"mutual TLS adds {middle:.2f} ms to a unary request, median of {PAIRS} pairs ({low:.2f} "
        f"to {high:.2f} in the middle half), to {1e3 * statistics.median(open_s):.2f} ms"
    ]


def _config(inside: tuple[str, ...]) -> FleetConfig:
    outside = tuple(word.replace("--fleet-", "--tls-") for word in inside)
    client_ca = tuple(word.replace("--tls-ca", "--tls-client-ca") for word in outside)
    return FleetConfig(
        connector="zmq",
        worker_flags=("--device", "cpu", *inside),
        router_flags=(*inside, *client_ca),
        has_secret=False,
    )


def _flags(name: str, files: TlsFiles) -> tuple[str, ...]:
    pairs = (("cert", files.cert), ("key", files.key), ("ca", files.ca))
    return tuple(word for end, path in pairs for word in (f"--{name}-{end}", str(path)))


async def _alternate(plain: str, sealed: str, files: TlsFiles) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    async with (
        Credentials().aio_opener(plain, ())() as one,
        Credentials(tls=files).aio_opener(sealed, ())() as other,
    ):
        asks = list(zip(times, map(asking, (one, other)), strict=True))
        for pair in range(WARM_UP + PAIRS):
            for into, ask in asks if pair % 2 else asks[::-1]:
                start = time.perf_counter()
                await ask()
                into.append(time.perf_counter() - start)
    return times[0][WARM_UP:], times[1][WARM_UP:]


def _certificates(home: Path) -> TlsFiles:
    """One pair of files for all processes, signed by an authority of its own."""
    ca, ca_key, cert, key = (home / name for name in ("ca.pem", "ca.key", "one.pem", "one.key"))
    _openssl("-subj", "/CN=authority", "-keyout", ca_key, "-out", ca)
    signed = ("-CA", ca, "-CAkey", ca_key, "-addext", "basicConstraints=critical,CA:FALSE")
    _openssl("-subj", "/CN=one", "-addext", _NAMES, *signed, "-keyout", key, "-out", cert)
    return TlsFiles(cert=cert, key=key, ca=ca)


def _openssl(*words: object) -> None:
    command = ["openssl", "req", "-x509", *_EC, *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
