"""`make k8s-faults`: requests that have to survive faults, on the cluster that KUBECONFIG names.

Clients in a pod of their own send problems one after the other. After some answers a fault meets
one pod of a role: FAULT is `decode:delete`, `decode:evict`, `decode:kill`, or the same for
another role. `decode:scale` makes one worker more or one less, `all:restart` restarts everything.
A fault is proven by the pods that are gone or new, and must end with each Deployment available.
No request may fail. `make k8s-try` builds the images.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from attempt import ROOT, WAIT_S, AttemptError, Cluster, Overlay, namespace, wait_until_available

TARGETS = ("effuse-router:50051", "effuse-routers:50051")  # one address; each router's own
HOWS = ("delete", "evict", "kill", "scale", "restart")
ROLES = ("prefill", "decode", "worker", "router", "redis", "all")
POLL_S = 0.2
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: client
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  securityContext:
    runAsNonRoot: true
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: client
      image: localhost/effuse-worker:0.2.0
      imagePullPolicy: IfNotPresent
      command: [sleep, infinity]
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, and the role whose pods it meets."""

    role: str
    how: str

    @classmethod
    def read(cls, text: str) -> Fault:
        """Reads ROLE:HOW. Raises ValueError."""
        role, _, how = text.partition(":")
        if role not in ROLES or how not in HOWS or (role == "all") != (how == "restart"):
            raise ValueError(f"expected ROLE:HOW of {ROLES} and {HOWS}, got {text}")
        return cls(role, how)

    def strike(self, cluster: Cluster) -> str:
        """Happens once; returns the proof when each Deployment is available again. Raises
        AttemptError if no pod has changed.
        """
        before, began = pods(cluster, self.role), time.monotonic()
        self._begin(cluster, before)
        while pods(cluster, self.role).keys() == before.keys():
            if time.monotonic() - began > WAIT_S:
                raise AttemptError(f"{self.role}:{self.how} changed no pod")
            time.sleep(POLL_S)
        for name in deployments(cluster):
            words = ("rollout", "status", name, f"--timeout={WAIT_S}s")
            cluster.run(*words, timeout_s=WAIT_S + 30)
        after, took_s = pods(cluster, self.role), time.monotonic() - began
        gone, new = before.keys() - after.keys(), after.keys() - before.keys()
        return (f"{self.role}:{self.how}: of {len(before)} pods {len(gone)} gone, {len(new)} new, "
                f"available after {took_s:.1f} s")  # fmt: skip

    def _begin(self, cluster: Cluster, before: dict[str, str]) -> None:
        if self.how == "restart":
            cluster.run("rollout", "restart", *deployments(cluster))
            return
        if self.how == "scale":
            number = 1 if len(before) > 1 else 2
            cluster.run("scale", f"deployment/effuse-{self.role}", f"--replicas={number}")
            return
        victim = random.choice(sorted(before.values()))
        if self.how == "evict":
            path = f"/api/v1/namespaces/{cluster.namespace}/pods/{victim}/eviction"
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": victim}}
            cluster.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
            return
        at_once = ("--force", "--grace-period=0") if self.how == "kill" else ()
        cluster.run("delete", "pod", victim, "--wait=false", *at_once)


def pods(cluster: Cluster, role: str) -> dict[str, str]:
    """Names by uid of a role's pods, less those that are ending."""
    labels = "app.kubernetes.io/part-of=effuse"
    if role != "all":
        labels += f",app.kubernetes.io/name={role}"
    found = json.loads(cluster.run("get", "pods", "--selector", labels, "--output=json"))
    described = [one["metadata"] for one in found["items"]]
    return {one["uid"]: one["name"] for one in described if "deletionTimestamp" not in one}


def deployments(cluster: Cluster) -> list[str]:
    return cluster.run("get", "deployments", "--output=name").split()


@dataclass(frozen=True, slots=True)
class Line:
    """One request of `fault_load.py`."""

    target: str
    took_s: float
    wrong: str | None  # the text, or that it was the same again
    error: str | None


@contextlib.contextmanager
def client_pod(cluster: Cluster, requests: int, targets: Sequence[str]) -> Iterator[Iterator[Line]]:
    """The requests of a pod of clients, each one once it has ended."""
    cluster.run("apply", "-f", "-", stdin=POD)
    cluster.run("wait", "--for=condition=Ready", "pod/client", f"--timeout={WAIT_S}s")
    command = [cluster.kubectl, "--namespace", cluster.namespace, "exec", "--stdin", "client", "--"]
    command += ["/opt/effuse/bin/python", "-P", "-", str(requests), *targets]
    with (
        (ROOT / "k8s/fault_load.py").open() as script,
        subprocess.Popen(command, stdin=script, stdout=subprocess.PIPE, text=True) as load,
    ):
        assert load.stdout is not None
        try:
            yield (Line(**json.loads(line)) for line in load.stdout)
        finally:
            load.terminate()


def meet(
    cluster: Cluster, lines: Iterable[Line], faults: Sequence[Fault], every: int
) -> list[Line]:
    """The requests. A fault begins after each `every` of them, once the last one is over."""
    done: list[Line] = []
    struck: list[Future[str]] = []
    with ThreadPoolExecutor(1) as hand:
        for line in lines:
            done.append(line)
            if line.error:
                print(f"failed after {line.took_s:.1f} s: {line.error}", flush=True)
            if line.wrong:
                print(f"a wrong answer: {line.wrong}", flush=True)
            if len(done) >= every * (len(struck) + 1) and all(one.done() for one in struck):
                struck.append(hand.submit(strike, faults[len(struck) % len(faults)], cluster))
    for one in struck:
        one.result()
    if not struck:
        raise AttemptError("no fault happened")
    return done


def strike(fault: Fault, cluster: Cluster) -> str:
    proof = fault.strike(cluster)
    print(proof, flush=True)
    return proof


def check(done: Sequence[Line], requests: int) -> None:
    """Raises AttemptError if a request failed or is missing."""
    failed = [one for one in done if one.error]
    for target in sorted({one.target for one in done}):
        took_s = [one.took_s for one in done if one.target == target]
        print(f"{target}: {len(took_s)} requests, median {statistics.median(took_s):.2f} s, "
              f"longest {max(took_s):.1f} s")  # fmt: skip
    wrong = sum(one.wrong is not None for one in done)
    print(f"{len(done)} requests, {len(failed)} failed, {wrong} answers wrong", flush=True)
    if failed or len(done) < requests:
        raise AttemptError(f"{len(failed)} of {len(done)} failed, of {requests} to be sent")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make k8s-faults", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--kubectl", default="kubectl", help="the kubectl to use")
    add("--overlay", default="1p1d", help="overlay to deploy: a folder of k8s/overlays, or a path")
    add("--requests", type=int, default=1000, help="of all clients together (default: 1000)")
    add("--clients", type=int, default=5, help="each sends one request at a time (default: 5)")
    add("--every", type=int, default=100, help="answers from one fault to the next (default: 100)")
    add("faults", nargs="+", type=Fault.read, metavar="FAULT", help="ROLE:HOW, in turns")
    found = parser.parse_args()
    cluster = Cluster(found.kubectl, f"effuse-try-{secrets.token_hex(3)}")
    overlay = Overlay(cluster, ROOT / "k8s/overlays" / found.overlay)
    targets = [TARGETS[number % len(TARGETS)] for number in range(found.clients)]
    try:
        with namespace(cluster):
            overlay.install()
            wait_until_available(cluster)
            with client_pod(cluster, found.requests, targets) as lines:
                check(meet(cluster, lines, found.faults, found.every), found.requests)
    except AttemptError as error:
        print(f"make k8s-faults: {error}", file=sys.stderr)
        return 1
    print("everything was removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
