"""`effuse generate` whose router is killed in the middle of an answer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from e2e.client import connect, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

import effuse
from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb

(JOB,) = draw_jobs(5, 1, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids, least_blocks=6)
TOKENS = 160
"""So many that its engine can be stopped between its first block and its end."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tiny_fleet("sdar", connector="zmq", prefill=0) as fleet:
        yield fleet


def command(fleet: Fleet) -> list[str]:
    """It sends the prompt of `JOB` under an id."""
    words = ["--ids", ",".join(map(str, JOB.prompt)), "--max-tokens", str(TOKENS), "--ignore-eos"]
    flags = [*words, "--request-id", "mine", "--target", fleet.address]
    return [sys.executable, "-P", "-m", "effuse.cli", "generate", *flags]


def test_generate_prints_the_whole_answer_once_though_its_router_dies(fleet: Fleet) -> None:
    params = effuse.Params(max_tokens=TOKENS, ignore_eos=True)
    with effuse.Client(fleet.address) as client:
        expected = client.generate(list(JOB.prompt), params).text
    engine = engine_of(fleet.processes["decode-0"].pid)
    pipe = subprocess.PIPE
    child = subprocess.Popen(command(fleet), bufsize=0, stdout=pipe, stderr=pipe)
    assert child.stdout is not None
    try:
        first = child.stdout.read(1)
        engine.suspend()  # the answer does not end meanwhile
        try:
            with connect(fleet.address) as client:
                running = pb.REQUEST_STATE_RUNNING
                wait_until(lambda: client.look_up("mine").state == running, "it is not written")
            router = fleet.processes["router"]
            router.send(signal.SIGKILL)
            wait_until(lambda: router.returncode is not None, "it does not end")
            fleet.begin_restart("router")
            wait_until(lambda: fleet.is_back("router"), "it does not come back")
        finally:
            engine.resume()
        told, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait(10)
    assert (errors, child.returncode) == (b"", 0)
    assert (first + told).decode() == f"{expected}\n"
