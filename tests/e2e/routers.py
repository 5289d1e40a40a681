"""A second router beside a fleet's own, on its own port, as it runs on another machine; and the
share of chats' tokens that workers need not compute, while routers end and Redis is emptied.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.routers --chats 200
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from e2e.client import all_at_once, connect, wait_until
from e2e.tiny import TINY, tiny_fleet

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class SecondRouter:
    """A running router."""

    child: subprocess.Popen[bytes]
    address: str
    metrics: str  # where they are served; empty where they are not

    def kill(self) -> None:
        """Ends it like a crash, and waits for its end."""
        self.child.kill()
        self.child.wait(30)


@contextmanager
def second_router(fleet: Fleet, *more_flags: str) -> Iterator[SecondRouter]:
    """One that routes for the same fleet, which has no secret; it is killed at the end."""
    with tempfile.TemporaryDirectory() as home:
        ready = Path(home) / "ready"
        flags = ["--port", "0", "--redis-url", fleet.redis_url, "--fleet", fleet.name]
        flags += ["--ready-file", str(ready), *more_flags]
        if fleet.config.model is not None:
            flags += ["--model", str(fleet.config.model)]
        command = [sys.executable, "-P", "-m", "effuse.router", *flags]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            try:
                wait_until(ready.exists, "the second router does not start")
                facts = json.loads(ready.read_text())
                yield SecondRouter(child, facts["address"], facts.get("metrics", ""))
            finally:
                child.kill()


class Chats:
    """Chats that go on by a page in each turn.

    `at_once`: requests that run at a time. With more, routers weigh queues against known tokens."""

    def __init__(self, number: int, at_once: int = 1) -> None:
        self._at_once = at_once
        self._rng = random.Random(number)
        self._prompts = [self._tokens(8) for _ in range(number)]

    def go_on(self, *addresses: str) -> float:
        """The next turn of each, at one of these two routers or at this one. Returns the share of
        the tokens of their earlier turns that were cached."""
        earlier = sum(map(len, self._prompts))
        self._prompts = [[*prompt, *self._tokens(1)] for prompt in self._prompts]
        with connect(addresses[0]) as first, connect(addresses[-1]) as last:

            def ask(at: int) -> int:
                ids = pb.TokenIds(ids=self._prompts[at])
                stopping = pb.StoppingParams(max_tokens=TINY.block_size, ignore_eos=True)
                asked = pb.GenerateRequest(prompt_token_ids=ids, stopping=stopping)
                answer = (first if at % 2 else last).generate(asked)
                return answer.stats.cached_prompt_tokens

            return sum(all_at_once(ask, range(len(self._prompts)), self._at_once)) / earlier

    def _tokens(self, pages: int) -> list[int]:
        return self._rng.choices(TINY.plain_ids, k=pages * TINY.page_size)


def hit_rates(fleet: Fleet, chats: Chats) -> dict[str, float]:
    """Shares of chats' tokens that were cached, by what happened before."""
    found, flags = dict[str, float](), ("--prefill", "remote")
    with redis.Redis.from_url(fleet.redis_url) as client:
        with second_router(fleet, *flags) as second:
            chats.go_on(fleet.address, second.address)
            found["before"] = chats.go_on(fleet.address, second.address)
        with second_router(fleet, *flags) as second:
            time.sleep(2.0)
            found["restarted"] = chats.go_on(second.address)
            client.flushall()
            time.sleep(10.0)
            found["flushed"] = chats.go_on(second.address)
        with second_router(fleet, *flags) as second:
            found["flushed and restarted"] = chats.go_on(second.address)
        fleet.processes["router"].send(signal.SIGKILL)  # no router is left that knows
        client.flushall()
        with second_router(fleet, *flags) as second:
            found["nothing shared"] = chats.go_on(second.address)
    return {name: round(share, 3) for name, share in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the shares as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4, help="that prefill")
    args = parser.parse_args(argv)
    with tiny_fleet(
        "sdar", connector="zmq", prefill=args.workers, num_pages=20 * args.chats
    ) as fleet:
        print(json.dumps(hit_rates(fleet, Chats(args.chats, args.at_once))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
