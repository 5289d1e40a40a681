"""Clients that ask one fleet, each its next request soon after the last one is over.

A request depends only on the seed and its number, whichever client sends it and when.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from chaos.ledger import Answer, Commit, Exchange, Finish, Ledger, Mode
from e2e.client import Client, connect
from e2e.tiny import TINY
from e2e.workload import Job, draw_jobs
from slowness import patient
from tokenizers import Tokenizer

from effuse.problems.problem import problem
from effuse.router.tokenizer import bundled_directory
from effuse.v1 import generation_pb2 as pb

CLIENTS = 12
DEADLINE_S = patient(150.0)  # of each request; nothing here takes so long
# How a request ends whose router was killed, before another one has taken over its id: a retry gets
# the answer.
AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ALREADY_EXISTS,
)
AGAIN_S = 0.3
JOBS = 48  # of each algorithm
PROBLEMS = 60
LONGEST_SOLUTION = 176  # tokens, as in `effuse eval`
MEAN_THINK_S = 0.03
MEAN_CANCEL_S = 0.1
_SHARES = {
    Mode.STREAM: 5,
    Mode.UNARY: 3,
    Mode.STREAM_CANCELLED: 1,
    Mode.UNARY_CANCELLED: 1,
}


def draw_all(seed: int, number: int = JOBS) -> list[Job]:
    """The jobs of a run: greedy and sampled, short and long, so many by either algorithm."""
    return [
        job
        for algorithm in ("d2f", "block_diffusion")
        for job in draw_jobs(
            seed, number, algorithm, block_size=TINY.block_size, ids=TINY.plain_ids, least_blocks=2
        )
    ]


def draw_problems(seed: int) -> tuple[list[Job], list[str]]:
    """Problems for the bundled model as jobs of either algorithm, and their right answers."""
    tokenizer = Tokenizer.from_file(str(bundled_directory() / "tokenizer.json"))
    problems = [problem(seed, index, "held_out") for index in range(PROBLEMS)]
    jobs = [
        Job(
            prompt=tuple(tokenizer.encode(one.prompt).ids),
            max_tokens=LONGEST_SOLUTION,
            algorithm=("d2f", "block_diffusion")[number % 2],
            denoising_steps=16,
        )
        for number, one in enumerate(problems)
    ]
    return jobs, [one.answer for one in problems]


def answer_of(client: Client, job: Job) -> Answer:
    """The answers of an undisturbed fleet."""
    response = client.generate(job.message())
    return Answer(tuple(response.token_ids), response.text, response.finish_reason)


def looked_up(client: Client, name: str) -> pb.GetRequestResponse:
    """State of a request; nothing is set if no router knows it now."""
    try:
        return client.look_up(name)
    except grpc.RpcError:
        return pb.GetRequestResponse()


class Clients:
    """This many, which send until they are stopped, with pauses of so many seconds on average."""

    def __init__(
        self,
        address: str,
        jobs: list[Job],
        ledger: Ledger,
        *,
        count: int = CLIENTS,
        think_s: float = MEAN_THINK_S,
    ) -> None:
        self._count = count
        self._think_s = think_s
        self._address = address
        self._jobs = jobs
        self._ledger = ledger
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sending: list[Future[None]] = []

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Requests are sent for as long as this lasts; all have ended once it is left."""
        with ThreadPoolExecutor(self._count) as threads:
            self._sending = [threads.submit(self._send_all) for _ in range(self._count)]
            try:
                yield
            finally:
                self._stop.set()
        for one in self._sending:
            one.result()

    def wait_for(self, requests: int) -> None:
        """Returns once so many have been sent."""
        while len(self._ledger.exchanges) < requests and not any(o.done() for o in self._sending):
            time.sleep(0.1)

    def _send_all(self) -> None:
        with connect(self._address, alone=True) as client:
            while not self._stop.is_set():
                with self._lock:  # in the order of their numbers
                    exchange, chance = self._next()
                    self._ledger.exchanges.append(exchange)
                while not self._try(client, exchange, chance):
                    time.sleep(AGAIN_S)
                exchange.ended_s = time.monotonic()
                if not exchange.mode.is_cancelled:
                    found = looked_up(client, exchange.name)
                    exchange.attempts = found.attempt
                    exchange.workers = f"{found.prefill_worker or 'local'} -> {found.decode_worker}"
                time.sleep(chance.expovariate(1 / self._think_s))

    def _try(self, client: Client, exchange: Exchange, chance: random.Random) -> bool:
        """Asks once; whether that was the last time."""
        try:
            self._send(client, exchange, chance)
        except grpc.RpcError as error:
            code = error.code()
            is_ours = exchange.mode.is_cancelled and code is grpc.StatusCode.CANCELLED
            now = time.monotonic()
            if code in AGAIN and not is_ours and now < exchange.began_s + DEADLINE_S:
                exchange.begin_again(code.name, now)
                return False
            exchange.status, exchange.details = code.name, error.details() or ""
        else:
            exchange.status = exchange.status or "OK"
        return True

    def _next(self) -> tuple[Exchange, random.Random]:
        number = next(self._numbers)
        chance = random.Random(f"{self._ledger.seed} request {number}")
        shares = {
            mode: share
            for mode, share in _SHARES.items()
            if mode.is_cancelled or not self._ledger.all_cancel
        }
        (mode,) = chance.choices(list(shares), list(shares.values()))
        job = chance.randrange(len(self._jobs))
        return Exchange(number=number, job=job, mode=mode, began_s=time.monotonic()), chance

    def _send(self, client: Client, exchange: Exchange, chance: random.Random) -> None:
        """Raises grpc.RpcError if it does not end well."""
        message = self._jobs[exchange.job].message(exchange.name)
        if exchange.mode.is_streamed:
            wanted = chance.randint(0, 4) if exchange.mode.is_cancelled else None
            self._stream(client, exchange, message, wanted)
        else:
            patience_s = chance.expovariate(1 / MEAN_CANCEL_S)
            self._ask(client, exchange, message, patience_s if exchange.mode.is_cancelled else None)

    def _ask(
        self,
        client: Client,
        exchange: Exchange,
        message: pb.GenerateRequest,
        patience_s: float | None,
    ) -> None:
        call = client.stub.Generate.future(message, timeout=DEADLINE_S)
        try:
            response = call.result(timeout=patience_s)
        except grpc.FutureTimeoutError:
            call.cancel()
            exchange.status = "CANCELLED"
            return
        now, token_ids = time.monotonic(), tuple(response.token_ids)
        exchange.events += [
            Commit(now, 0, token_ids, response.text),
            Finish(now, response.finish_reason, response.usage.completion_tokens),
        ]

    def _stream(
        self, client: Client, exchange: Exchange, message: pb.GenerateRequest, wanted: int | None
    ) -> None:
        """`wanted`: blocks after which the client breaks off; None waits for the end."""
        asked = pb.GenerateStreamRequest(request=message)
        call = client.stub.GenerateStream(asked, timeout=DEADLINE_S)
        if wanted == 0:
            call.cancel()
        for event in call:
            now, commit, finished = time.monotonic(), event.commit, event.finished
            if event.HasField("commit"):
                token_ids = tuple(commit.token_ids)
                exchange.events.append(Commit(now, commit.token_offset, token_ids, commit.text))
            elif event.HasField("finished"):
                told = Finish(now, finished.finish_reason, finished.usage.completion_tokens)
                exchange.events.append(told)
            if wanted is not None and len(exchange.events) >= wanted:
                call.cancel()
