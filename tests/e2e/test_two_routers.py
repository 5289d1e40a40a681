"""Two routers over one fleet: one is killed, the other one answers its requests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import grpc
import pytest
from e2e.client import Client, connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.routers import Chats, SecondRouter, hit_rates, second_router
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

import effuse
from effuse.cli.fleet import Fleet
from effuse.protos.errors import AlreadyRunning, from_rpc_error
from effuse.v1 import generation_pb2 as pb

SEATS = 2
(JOB,) = draw_jobs(5, 1, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids, least_blocks=6)
LONG = replace(JOB, max_tokens=480, ignore_eos=True)
"""So long that its engine can be stopped between its first block and its end, even if the test's
process has to wait for a processor."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    flags = ("--max-num-seqs", str(SEATS), "--hang-timeout-s", "30", "--max-model-len", "512")
    with tiny_fleet("sdar", connector="zmq", prefill=0, worker_flags=flags) as fleet:
        yield fleet


@pytest.fixture
def second(fleet: Fleet) -> Iterator[SecondRouter]:
    with second_router(fleet) as second:
        yield second


def requests_in(fleet: Fleet) -> int:
    load = load_of(fleet.address_of("decode-0"))
    return load.running + load.waiting


def steps(fleet: Fleet) -> int:
    return load_of(fleet.address_of("decode-0")).steps


def runs_at(client: Client, name: str) -> str:
    """The address of the router that has the request, from another router's error."""
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(JOB.message(name))
    refused = from_rpc_error(cast("grpc.aio.AioRpcError", caught.value), "router")
    assert isinstance(refused, AlreadyRunning)
    return refused.labels["address"]


def test_who_asks_again_after_his_router_died_is_answered_once(
    fleet: Fleet, second: SecondRouter
) -> None:
    """In the middle of a stream, of which his second answer has the same beginning."""
    engine = engine_of(fleet.processes["decode-0"].pid)
    with connect(fleet.address) as client, connect(second.address) as doomed:
        expected = client.generate(LONG.message())
        with ThreadPoolExecutor(1) as threads:
            stream = doomed.stream(LONG.message("mine"))
            begun = first_tokens(stream)
            engine.suspend()  # no answer ends meanwhile
            try:
                running = pb.REQUEST_STATE_RUNNING
                wait_until(lambda: client.look_up("mine").state == running, "it is not written")
                # Its own router runs it if none is known to have it.
                wait_until(lambda: runs_at(client, "mine") == second.address, "none has it")
                second.kill()
                again = threads.submit(client.generate, LONG.message("mine"))
                with pytest.raises(grpc.RpcError):
                    for event in stream:
                        begun += event.commit.token_ids
            finally:
                engine.resume()
            answer = again.result(60)
        assert begun == expected.token_ids[: len(begun)]
        assert answer.token_ids == expected.token_ids
        wait_until(lambda: client.look_up("mine").HasField("answer"), "it is not kept")
        assert client.look_up("mine").answer == answer


def test_our_own_client_goes_on_with_a_stream_at_the_next_router(
    fleet: Fleet, second: SecondRouter
) -> None:
    engine = engine_of(fleet.processes["decode-0"].pid)
    prompt, params = list(LONG.prompt), effuse.Params(max_tokens=LONG.max_tokens, ignore_eos=True)
    with (
        connect(fleet.address) as other,
        effuse.Client(f"ipv4:{second.address},{fleet.address}") as client,
    ):
        stream = client.stream(prompt, params, request_id="ours")
        pieces = iter(stream)
        texts = [next(pieces)]
        engine.suspend()
        try:
            running = pb.REQUEST_STATE_RUNNING
            wait_until(lambda: other.look_up("ours").state == running, "it is not written")
            second.kill()
        finally:
            engine.resume()
        texts += pieces
        answer = stream.answer
        assert "".join(texts) == answer.text
        assert answer.token_ids == client.generate(prompt, params).token_ids


def first_tokens(stream: Iterator[pb.GenerateStreamResponse]) -> list[int]:
    """Those of the first final part of an answer."""
    return next(list(event.commit.token_ids) for event in stream if event.commit.token_ids)


def test_a_request_is_taken_over_from_a_router_that_stands_still(
    fleet: Fleet, second: SecondRouter
) -> None:
    """Like one whose host is gone: its connections are open for a while, and its attempts run."""
    engine = engine_of(fleet.processes["decode-0"].pid)
    with connect(fleet.address) as client, connect(second.address) as doomed:
        expected = client.generate(JOB.message())
        with ThreadPoolExecutor(2) as threads:
            engine.suspend()
            try:
                threads.submit(doomed.generate, JOB.message("left"))
                wait_until(lambda: requests_in(fleet) == 1, "it does not run")
                second.child.send_signal(signal.SIGSTOP)
                again = threads.submit(client.generate, JOB.message("left"))
                wait_until(lambda: requests_in(fleet) == 2 or again.done(), "nobody takes it over")
            finally:
                engine.resume()
                second.kill()
            assert again.result(60).token_ids == expected.token_ids


def test_an_answer_outlives_the_router_that_gave_it(fleet: Fleet, second: SecondRouter) -> None:
    with connect(fleet.address) as client, connect(second.address) as doomed:
        answer = doomed.generate(JOB.message("kept"))
        wait_until(lambda: client.look_up("kept").HasField("answer"), "it is not kept")
        second.kill()
        before = steps(fleet)
        assert client.generate(JOB.message("kept")) == answer
        assert steps(fleet) == before


def test_together_they_fill_a_worker_and_do_not_overfill_it(
    fleet: Fleet, second: SecondRouter
) -> None:
    def ask(client: Client) -> None:
        for _ in range(6):
            client.generate(JOB.message())

    samples = []
    with connect(fleet.address) as one, connect(second.address) as two:
        with ThreadPoolExecutor(12) as threads:
            asking = [threads.submit(ask, client) for client in (one, two) for _ in range(6)]
            while not all(call.done() for call in asking):
                samples.append(requests_in(fleet))
        for call in asking:
            call.result()
    assert max(samples) >= SEATS
    # Until the two know of each other each takes all seats; without that it is always so.
    assert sum(load > SEATS for load in samples) < 0.3 * len(samples), samples


def test_a_restarted_router_knows_which_worker_has_a_chat_and_so_it_does_after_a_flush() -> None:
    with tiny_fleet("sdar", connector="zmq", prefill=2) as fleet:
        rates = hit_rates(fleet, Chats(8))
    assert rates.pop("nothing shared") < 0.8, "any router would know"
    # On a busy machine one of eight chats may find its worker's queue too long, at any time.
    assert min(rates.values()) > 0.8, rates
