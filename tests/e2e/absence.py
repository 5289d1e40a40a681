"""Clients whose only decode worker, and then whose only router, is gone for a while.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.absence --requests 1000
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from e2e.processes import kill, restart
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

import effuse
from effuse.cli.fleet import Fleet

CLIENTS = 5
DECODE_GONE_S, ROUTER_GONE_S = 9.0, 2.0
THINK_S = 0.2  # which leaves the processes that start some of a small machine


@dataclass
class Asked:
    """Results of the requests of all clients."""

    answers: list[tuple[int, str]] = field(default_factory=list)  # by the number of their job
    took_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_enough: threading.Event = field(default_factory=threading.Event)

    def tell(self) -> str:
        """One line."""
        took = sorted(self.took_s) or [0.0]
        shares = ((f"p{share}", took[len(took) * share // 100]) for share in (50, 99))
        told = ", ".join(f"{name} {value:.2f} s" for name, value in shares)
        return f"{len(took)} requests, {len(self.failures)} failed; {told}, most {took[-1]:.2f} s"


@contextmanager
def asking(fleet: Fleet, least: int) -> Iterator[Asked]:
    """Each client sends requests, every other one as a stream, as long as this lasts and at least
    `least` times.
    """
    jobs = draw_jobs(9, 24, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    asked = Asked()

    def send(number: int) -> None:
        with effuse.Client(fleet.address) as client:
            at = 0
            while not asked.is_enough.is_set() or at < least:
                job = (number + at) % len(jobs)
                params = effuse.Params(max_tokens=jobs[job].max_tokens, seed=1, temperature=0.0)
                prompt, began = list(jobs[job].prompt), time.monotonic()
                try:
                    if at % 4 == 3:
                        text = sampled(client, prompt, params)
                    elif at % 2:
                        text = client.stream(prompt, params).answer.text
                    else:
                        text = client.generate(prompt, params).text
                except (effuse.EffuseError, AssertionError) as error:
                    asked.failures.append(f"{type(error).__name__}: {error}")
                else:
                    asked.answers.append((job if at % 4 < 3 else ~at * CLIENTS - number, text))
                asked.took_s.append(time.monotonic() - began)
                at += 1
                time.sleep(THINK_S)

    with ThreadPoolExecutor(CLIENTS) as threads:
        sending = [threads.submit(send, number) for number in range(CLIENTS)]
        try:
            yield asked
        finally:
            asked.is_enough.set()
    for one in sending:
        one.result()


def sampled(client: effuse.Client, prompt: list[int], params: effuse.Params) -> str:
    """A streamed answer whose seed a router drew. Raises AssertionError if the seed gives another
    one."""
    params = replace(params, temperature=1.0, seed=None)
    answer = client.stream(prompt, params).answer
    again = client.generate(prompt, replace(params, seed=answer.seed)).text
    assert answer.text == again, f"{answer.text!r} came, its seed {answer.seed} gives {again!r}"
    return answer.text


def without(fleet: Fleet, name: str, seconds: float) -> None:
    """One process is killed, gone for so long, and then starts."""
    kill(fleet, name)
    time.sleep(seconds)
    restart(fleet, name)


def carry_out(requests: int, tell: Callable[[str], object]) -> list[Asked]:
    """Both in turn, each under load; results of all requests."""
    found = []
    with tiny_fleet("sdar", connector="zmq") as fleet:
        for name, seconds in (("decode-0", DECODE_GONE_S), ("router", ROUTER_GONE_S)):
            with asking(fleet, requests) as asked:
                time.sleep(1.0)
                without(fleet, name, seconds)
                time.sleep(1.0)
            tell(f"{name} was gone for {seconds:g} s: {asked.tell()}")
            for failure in asked.failures[:5]:
                tell(f"  {failure}")
            found.append(asked)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.absence", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="of each client, at least")
    found = carry_out(parser.parse_args().requests, lambda text: print(text, flush=True))
    return int(any(asked.failures for asked in found))


if __name__ == "__main__":
    sys.exit(main())
