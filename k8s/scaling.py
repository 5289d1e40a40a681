"""`make k8s-scale`: tries the scaler of `overlays/scaled-pool` on the cluster of KUBECONFIG.

The load of a pool of small workers doubles and halves three times. The number of workers has to
follow within 60 s, and no request may fail. Prometheus and its adapter come with it, unless the
cluster serves external metrics already. `make k8s-try` builds the images of the fleet.
"""

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from attempt import (
    ROOT,
    WAIT_S,
    AttemptError,
    Cluster,
    Overlay,
    long_problem,
    namespace,
    port_forward,
    run,
    wait_until_available,
)

from effuse.client.client import AsyncClient, Client
from effuse.client.params import Params

FOLLOW_S = 60.0
"""Longest time from a change of the load to that of the number of workers."""
PHASE_S = 60.0
TRIALS = 60  # requests from which the router learns how much one worker sustains
SHARE = 0.52  # of that; scalers plan for 0.8, so twice as much needs another worker
SHORT = Params(max_tokens=32, ignore_eos=True)  # many a second, so that a change is seen soon


@dataclass(frozen=True, slots=True)
class Phase:
    """Some time of a steady load, and the number of workers."""

    rate: float  # requests a second
    before: int
    workers: int  # at its end
    moved_s: float  # from the change of the load to that of the number; 0 if it did not change
    ready_s: float  # the same for workers that are Ready

    def __str__(self) -> str:
        return (f"{self.rate:.2f} requests a second: {self.before} workers, {self.workers} after "
                f"{self.moved_s:.0f} s, Ready or gone after {self.ready_s:.0f} s")  # fmt: skip


def main() -> int:
    cluster = Cluster(sys.argv[1], f"effuse-try-{secrets.token_hex(3)}")
    try:
        attempt_to_scale(cluster)
    except AttemptError as error:
        print(f"make k8s-scale: {error}", file=sys.stderr)
        return 1
    print("everything was removed")
    return 0


def attempt_to_scale(cluster: Cluster) -> None:
    """Everything, from Prometheus to the figures. Raises AttemptError."""
    with prometheus(cluster), namespace(cluster):
        Overlay(cluster, ROOT / "k8s/prometheus/small-pool").install()
        wait_until_available(cluster)
        with port_forward(cluster, "service/effuse-router") as port:
            phases, failed = asyncio.run(load(cluster, f"localhost:{port}"))
    check(phases, failed)


def check(phases: Sequence[Phase], failed: Sequence[str]) -> None:
    """Raises AttemptError unless the number of workers followed the load without a failure."""
    if failed:
        raise AttemptError(f"{len(failed)} requests failed, the first with {failed[0]}")
    for before, phase in itertools.pairwise(phases):
        change = phase.workers - before.workers
        if not change or (change > 0) != (phase.rate > before.rate):
            raise AttemptError(f"the number of workers did not follow: {before}, then {phase}")
        if phase.moved_s > FOLLOW_S:
            raise AttemptError(f"the number of workers followed after {phase.moved_s:.0f} s")


@contextlib.contextmanager
def prometheus(cluster: Cluster) -> Iterator[None]:
    """Prometheus and its adapter, unless the cluster serves external metrics already."""
    if "external.metrics.k8s.io" in cluster.run("get", "apiservices", "--output=name"):
        yield
        return
    path = str(ROOT / "k8s/prometheus")
    system = Cluster(cluster.kubectl, "effuse-prometheus")
    try:
        run([cluster.kubectl, "apply", "--kustomize", path])
        wait_until_available(system)
        yield
    finally:
        run([cluster.kubectl, "delete", "--kustomize", path, "--wait=true"])


async def load(cluster: Cluster, address: str) -> tuple[list[Phase], list[str]]:
    """A load that doubles and halves three times; returns its phases, and errors of requests."""
    phases: list[Phase] = []
    failed: list[str] = []
    async with (
        AsyncClient(address, timeout_s=WAIT_S, max_attempts=1) as client,
        asyncio.TaskGroup() as tasks,
    ):

        async def send() -> None:
            try:
                await client.generate(long_problem(secrets.randbits(32)).prompt, SHORT)
            except grpc.aio.AioRpcError as error:
                failed.append(str(error))

        for _ in range(TRIALS):
            await send()
        rate = SHARE * await asyncio.to_thread(borne_by_one, address)
        for turn in range(7):
            times = 1 + turn % 2
            watch = asyncio.create_task(watched(cluster, times * rate))
            while not watch.done():
                tasks.create_task(send())
                await asyncio.sleep(1 / (times * rate))
            phases.append(watch.result())
            print(phases[-1], flush=True)
    print(f"{len(failed)} requests failed", flush=True)
    return phases, failed


def borne_by_one(address: str) -> float:
    """Requests a second that one worker sustains, as the router has measured it."""
    with Client(address) as client:
        (plan,) = client.plans()
    if plan.roles.prefill + plan.roles.decode != 1:
        raise AttemptError(f"expected the plan of one worker, got {plan.roles}")
    return float(plan.roles.rate)


async def watched(cluster: Cluster, rate: float) -> Phase:
    """Looks at the Deployment of workers for a phase of this load."""
    began, seen = time.monotonic(), [await workers(cluster)]
    moved_s = ready_s = 0.0
    while (now_s := time.monotonic() - began) < PHASE_S:
        await asyncio.sleep(2.0)
        seen.append(await workers(cluster))
        if seen[-1][0] != seen[-2][0] and not moved_s:
            moved_s = now_s
        if seen[-1][1] != seen[-2][1] and not ready_s:
            ready_s = now_s
    return Phase(rate, seen[0][0], seen[-1][0], moved_s, ready_s)


async def workers(cluster: Cluster) -> tuple[int, int]:
    """Workers that the Deployment wants, and those that are Ready."""
    path = "--output=jsonpath={.spec.replicas} {.status.readyReplicas}"
    words = ("get", "deployment/effuse-worker", path)
    wanted, _, ready = (await asyncio.to_thread(cluster.run, *words)).partition(" ")
    return int(wanted), int(ready or 0)


if __name__ == "__main__":
    sys.exit(main())
