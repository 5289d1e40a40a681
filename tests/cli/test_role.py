"""`effuse role` with flags that cannot be, and with a worker that refuses the caller."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cli.looked_at import WORKER, router

from effuse.cli.__main__ import main


def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call needs credentials")
    raise AssertionError("abort raises")


@pytest.fixture
def worker() -> Iterator[None]:
    """The only worker of the fake fleet."""
    server = grpc.server(ThreadPoolExecutor(1))
    service = grpc.method_handlers_generic_handler(
        "effuse.v1.WorkerService", {"SetRole": grpc.unary_unary_rpc_method_handler(refuse)}
    )
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    WORKER.address = f"127.0.0.1:{port}"
    server.start()
    yield
    WORKER.ClearField("address")
    server.stop(0).wait(10)


@pytest.mark.parametrize("given", ["cert", "key", "ca"])
def test_a_part_of_the_fleets_certificate_is_refused(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.pem"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        main(["role", "prefill-0", "both", f"--fleet-{given}", str(file)])
    assert ended.value.code == 2
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith(f"effuse role: --fleet-{given}: expected --fleet-")


@pytest.mark.usefixtures("worker")
def test_a_worker_that_refuses_the_caller_wants_the_fleets_credentials(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with router() as target:
        assert main(["role", "prefill-0", "both", "--target", target]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("effuse role: UNAUTHENTICATED: ")
    assert line.endswith("(--fleet-secret or --fleet-cert)")


def test_a_worker_that_accepts_and_is_silent_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    with socket.create_server(("127.0.0.1", 0)) as silent, router() as target:
        WORKER.address = f"127.0.0.1:{silent.getsockname()[1]}"
        asked = ["role", "prefill-0", "both", "--target", target, "--timeout", "0.3"]
        asked += ["--fleet-secret", str(secret)]
        try:
            assert main(asked) == 1
        finally:
            WORKER.ClearField("address")
    assert "did not answer within 0.6 s" in capsys.readouterr().err
