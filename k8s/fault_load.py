"""Requests of `make k8s-faults`, sent by a pod in the cluster: `fault_load.py REQUESTS TARGET..`.

Each target is an address with a client of its own, which sends one fresh problem after the other.
Each answer or failure is a line of JSON. This module runs in the workers' image and imports only
effuse.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator

from effuse.client.client import Client
from effuse.client.params import Params
from effuse.problems.problem import check, problem
from effuse.protos.errors import EffuseError


def ask(target: str, numbers: Iterator[int], requests: int) -> None:
    """Sends problems until all clients together have sent `requests`."""
    seed = secrets.randbits(32)
    with Client(target, timeout_s=120.0) as client:
        while (number := next(numbers)) < requests:
            drawn, began = problem(seed, number, "held_out"), time.monotonic()
            text, error = answered(client, drawn.prompt)
            took_s = time.monotonic() - began
            wrong = None if error or check(drawn, text).final else text
            if wrong and answered(client, drawn.prompt) == (wrong, None):
                wrong = "the same again"  # then it is the model's
            line = {"target": target, "took_s": took_s, "wrong": wrong, "error": error}
            print(f"{json.dumps(line)}\n", end="", flush=True)  # one write keeps lines whole


def answered(client: Client, prompt: str) -> tuple[str, str | None]:
    """The answer's text, or an error."""
    try:
        return client.stream(prompt, Params(max_tokens=160)).answer.text, None
    except EffuseError as error:
        return "", f"{type(error).__name__}: {error}"


def main() -> None:
    requests, targets, numbers = int(sys.argv[1]), sys.argv[2:], itertools.count()
    clients = [threading.Thread(target=ask, args=(one, numbers, requests)) for one in targets]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main()
