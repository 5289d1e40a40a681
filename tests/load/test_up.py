"""The fleet under load is that of `effuse up`, and its faults are reported."""

from __future__ import annotations

import contextlib
import time

import grpc
import psutil
import pytest
from checkpoints import write_tiny_checkpoint
from load.run import FLEET
from load.up import UpError, running
from slowness import patient

from effuse.cli.up import parse
from effuse.v1 import model_pb2, model_pb2_grpc


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "sdar")
    return ("--prefill", "0", "--model", str(model), "--num-pages", "64")


def test_it_serves_holds_nothing_and_leaves_nothing(flags: tuple[str, ...]) -> None:
    with running(flags) as up:
        processes = psutil.Process(up.pid).children(recursive=True)
        with grpc.insecure_channel(up.address) as channel:
            models = model_pb2_grpc.ModelServiceStub(channel)
            listed = models.ListModels(model_pb2.ListModelsRequest(), timeout=30).models
        assert [model.decode_workers for model in listed] == [1]
        assert up.held() == []
    assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.parametrize("here", [(), ("0",), ("0", "1")])
def test_it_has_a_place_for_both_workers(
    here: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effuse.cli.up.gpus_here", lambda: here)
    assigned = parse(FLEET)[0].assignments()
    assert {one.gpu for one in assigned.values()} == set(here)


def test_a_worker_that_died_is_a_fault(flags: tuple[str, ...]) -> None:
    with pytest.raises(UpError, match=r"decode-0 .* was ended by SIGKILL"), running(flags) as up:
        first = _decode_worker(up.pid)
        assert first is not None
        first.kill()
        deadline = time.monotonic() + patient(60)
        while _decode_worker(up.pid) in (None, first):
            assert time.monotonic() < deadline, "the worker was not started again"
            time.sleep(0.05)


def test_flags_that_it_refuses_are_told() -> None:
    with pytest.raises(UpError, match=r"status 2 and printed: [\s\S]*expected 1 to 64, got 0"):
        _start_and_end(("--decode", "0"))


def _start_and_end(flags: tuple[str, ...]) -> None:
    with running(flags):
        pass


def _decode_worker(up: int) -> psutil.Process | None:
    """The front of the fleet's decode worker, if it runs: a child of the command itself."""
    for process in psutil.Process(up).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "effuse.decode_worker" in process.cmdline():
                return process
    return None
