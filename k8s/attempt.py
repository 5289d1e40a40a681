"""`make k8s-try`: brings an overlay or the chart up on the cluster that KUBECONFIG names.

It makes a namespace under the restricted pod-security level and the Secrets with the README's
commands. Every Deployment must become available, and one fresh problem through a port-forward must
be answered correctly, with its KV moved between pods if roles are fixed. A release of the chart
must also take another decode worker. Nothing may be left. If `--build` has a command, images are
built first. If the cluster has no GPU, its API server only checks an overlay with GPUs.
"""

import argparse
import contextlib
import itertools
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from effuse.client.answer import Answer, Stats
from effuse.client.client import Client
from effuse.client.credentials import Credentials
from effuse.client.params import Params
from effuse.problems.problem import Problem, check, problem
from effuse.protos.tls import TlsFiles

ROOT = Path(__file__).parent.parent
CHART = ROOT / "k8s/chart"
OPERATORS = ("ServiceMonitor", "PrometheusRule")  # kinds of Prometheus' operator
GPU = "nvidia.com/gpu"
README = ROOT / "k8s/README.md"
IMAGES = ("redis", "router", "worker-base", "worker")
FROM_BASE = ("redis", "router", "worker-base")
TAG = "0.2.0"
WAIT_S = 600
LEAST_WORDS = 32  # each is at least one token, and a block of the bundled model has 16
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
# The README's `kubectl` becomes ours, in our namespace.
KUBECTL = 'set -euo pipefail\nkubectl() { command "$KUBECTL" --namespace "$NAMESPACE" "$@"; }\n'


class AttemptError(Exception):
    """The cluster behaved unexpectedly."""


def run(command: Sequence[str], stdin: str | None = None, timeout_s: float = WAIT_S) -> str:
    """Output of a command. Raises AttemptError."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise AttemptError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}".strip())
    return done.stdout


@dataclass(frozen=True, slots=True)
class Cluster:
    """The kubectl that reaches a cluster, and the namespace to use."""

    kubectl: str
    namespace: str

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = WAIT_S) -> str:
        """Output of one kubectl command in the namespace. Raises AttemptError."""
        return run([self.kubectl, "--namespace", self.namespace, *words], stdin, timeout_s)


@dataclass(frozen=True, slots=True)
class Overlay:
    """A folder of kustomize."""

    cluster: Cluster
    path: Path

    def manifests(self) -> str:
        """All of its objects, less those of an operator's kinds that the cluster does not have.
        Raises AttemptError for another kind that it does not have."""
        kinds = set(
            re.findall(r"(\w+) *$", self.cluster.run("api-resources", "--no-headers"), re.M)
        )
        kept, missing = [], set()
        for one in self.cluster.run("kustomize", str(self.path)).split("\n---\n"):
            unknown = {*re.findall(r"^kind: (\w+)", one, re.M)} - kinds
            if not unknown <= {*OPERATORS}:
                raise AttemptError(
                    f"{self.path.name} needs a cluster with the kind {min(unknown)}; k8s/README.md "
                    "names its controller"
                )
            missing |= unknown
            if not unknown:
                kept.append(one)
        if missing:
            print(
                f"left out, because the cluster has none: {', '.join(sorted(missing))}", flush=True
            )
        return "\n---\n".join(kept)

    def install(self) -> None:
        """Creates them."""
        self.cluster.run("apply", "-f", "-", stdin=self.manifests())

    def upgrade(self) -> None:
        """Nothing."""

    def remove(self) -> None:
        """Nothing: the objects go with the namespace."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the chart."""

    cluster: Cluster
    helm: str

    def manifests(self) -> str:
        """All of its objects."""
        return self._run("template", "effuse", str(CHART))

    def install(self) -> None:
        """Installs it."""
        self._run("install", "effuse", str(CHART))

    def upgrade(self) -> None:
        """Adds a decode worker. Raises AttemptError if it is not Ready after that."""
        words = ("--reuse-values", "--set", "decode.replicas=2", "--wait", f"--timeout={WAIT_S}s")
        self._run("upgrade", "effuse", str(CHART), *words)
        ready = self.cluster.run(
            "get", "deployment/effuse-decode", "--output=jsonpath={.status.readyReplicas}"
        )
        if ready != "2":
            raise AttemptError(f"expected 2 decode workers after the upgrade, got {ready}")
        print("helm upgrade added a decode worker", flush=True)

    def remove(self) -> None:
        """Uninstalls it. Raises AttemptError if an object of it is left."""
        self._run("uninstall", "effuse", "--wait", "--cascade=foreground", f"--timeout={WAIT_S}s")
        kinds = ("all", "networkpolicies", "poddisruptionbudgets", "secrets", "pvc")
        label = "app.kubernetes.io/instance=effuse"
        if left := self.cluster.run("get", ",".join(kinds), "--selector", label, "--output=name"):
            raise AttemptError(f"helm uninstall left\n{left}")

    def _run(self, *words: str) -> str:
        return run([self.helm, "--namespace", self.cluster.namespace, *words], None, WAIT_S + 30)


def main() -> int:
    found = _parse()
    cluster = Cluster(found.kubectl, f"effuse-try-{secrets.token_hex(3)}")
    try:
        if found.build:
            build_images(shlex.split(found.build), found.base)
        overlay = Overlay(cluster, ROOT / "k8s/overlays" / found.overlay)
        attempt(cluster, Release(cluster, found.helm) if found.helm else overlay, found.connector)
    except AttemptError as error:
        print(f"make k8s-try: {error}", file=sys.stderr)
        return 1
    print("everything was removed")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make k8s-try", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--kubectl", default="kubectl", help="the kubectl to use")
    add("--overlay", default="1p1d", help="overlay to deploy: a folder of k8s/overlays, or a path")
    add("--helm", help="the helm to use; it installs the chart instead of an overlay")
    add("--connector", default="nixl", help="connector that must have moved the KV (default: nixl)")
    add("--build", help="command that builds an image, such as 'docker build -t'")
    add("--base", help="base image with Python 3.11 for the images that are built")
    return parser.parse_args()


def build_images(build: Sequence[str], base: str | None) -> None:
    """Build every image, shared layers first."""
    for name in IMAGES:
        arguments = ["--build-arg", f"BASE={base}"] if base and name in FROM_BASE else []
        began = time.monotonic()
        tag = f"localhost/effuse-{name}:{TAG}"
        command = [*build, tag, "-f", f"k8s/Dockerfile.{name}", *arguments, "."]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise AttemptError(f"{shlex.join(command)} failed")
        print(f"built {tag} in {time.monotonic() - began:.0f} s", flush=True)


def attempt(cluster: Cluster, fleet: Overlay | Release, connector: str) -> None:
    """Everything from the namespace's creation to its end. Raises AttemptError."""
    with tempfile.TemporaryDirectory() as files, namespace(cluster):
        manifests = fleet.manifests()
        make_secrets(cluster, manifests, Path(files))
        if GPU in manifests and GPU not in cluster.run("get", "nodes", "--output=yaml"):
            made = cluster.run("apply", "--dry-run=server", "-f", "-", stdin=manifests)
            print(f"no node has a GPU; the API server accepts\n{made}", end="", flush=True)
            return
        fleet.install()
        wait_until_available(cluster)
        with port_forward(cluster, "service/effuse-router") as port:
            credentials = credentials_in(Path(files))
            answer, expected = solve(f"localhost:{port}", credentials)
        fleet.upgrade()
        fleet.remove()
    stats = answer.stats
    print(f"prompt of {answer.usage.prompt_tokens} tokens, {answer.usage.completion_tokens} tokens "
          f"in {stats.forward_passes} forward passes, {handed_over(stats)}")  # fmt: skip
    if not expected:
        raise AttemptError(f"the answer is wrong: {answer.text!r}")
    if "effuse-prefill" in manifests and (stats.connector != connector or not stats.kv_bytes):
        raise AttemptError(f"expected KV over {connector}, got {stats}")


def handed_over(stats: Stats) -> str:
    """The KV that one worker handed to another one; a worker with both roles hands nothing over."""
    if not stats.connector:
        return f"no KV handed over, all by {stats.decode_worker}"
    workers = f"from {stats.prefill_worker} to {stats.decode_worker}"
    return f"{stats.kv_bytes:,} KV bytes over {stats.connector} {workers}"


@contextlib.contextmanager
def namespace(cluster: Cluster) -> Iterator[None]:
    """A fresh namespace under the restricted level; deleted at the end, with its content."""
    levels = "".join(
        f"    pod-security.kubernetes.io/{mode}: restricted\n" for mode in ("enforce", "warn")
    )
    manifest = (
        "apiVersion: v1\nkind: Namespace\nmetadata:\n"
        f"  name: {cluster.namespace}\n  labels:\n{levels}"
    )
    cluster.run("apply", "-f", "-", stdin=manifest)
    print(f"namespace {cluster.namespace}", flush=True)
    try:
        yield
    except BaseException:
        print(diagnosis(cluster), file=sys.stderr)
        raise
    finally:
        name = cluster.namespace
        cluster.run("delete", "namespace", name, "--wait=true", f"--timeout={WAIT_S}s")
        if left := leftovers(cluster):
            raise AttemptError("these objects remain after the deletion:\n" + "\n".join(left))


def leftovers(cluster: Cluster) -> list[str]:
    """The namespace itself, and volumes claimed from it, as far as they still exist."""
    name = cluster.namespace
    namespaces = cluster.run("get", "namespaces", "--output=name").split()
    volumes = cluster.run(
        "get", "persistentvolumes", "--output=jsonpath={.items[*].spec.claimRef.namespace}"
    ).split()
    return [one for one in [*namespaces, *volumes] if one in (name, f"namespace/{name}")]


def make_secrets(cluster: Cluster, manifests: str, files: Path) -> None:
    """Make the manifests' Secrets with the README's own commands, in the folder `files`. Raises
    AttemptError.
    """
    wanted = set(re.findall(r"secretName: (\S+)", manifests))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"KUBECTL": cluster.kubectl, "NAMESPACE": cluster.namespace, "PATH": path}
    for script in re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.M | re.S):
        if not wanted & set(re.findall(r"create secret generic (\S+)", script)):
            continue
        done = subprocess.run(
            ["bash", "-c", KUBECTL + script], env={**os.environ, **variables}, cwd=files,
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise AttemptError(f"{script}\n{done.stdout}{done.stderr}".strip())
        print(done.stdout, end="", flush=True)


def credentials_in(files: Path) -> Credentials:
    """The router's authority and a client's token, if the README's commands made them."""
    authority, token = files / "router-ca.crt", files / "alice.token"
    return Credentials(
        tls=TlsFiles(ca=authority) if authority.exists() else None,
        token=token.read_text().strip() if token.exists() else None,
    )


def wait_until_available(cluster: Cluster) -> None:
    """Wait for every Deployment's pods to be Ready."""
    for name in cluster.run("get", "deployments", "--output=name").split():
        began = time.monotonic()
        words = ("rollout", "status", name, f"--timeout={WAIT_S}s")
        cluster.run(*words, timeout_s=WAIT_S + 30)
        print(f"{name} is Ready after {time.monotonic() - began:.0f} s more", flush=True)


@contextlib.contextmanager
def port_forward(cluster: Cluster, service: str) -> Iterator[str]:
    """A port of this machine that leads to a router's service."""
    command = [cluster.kubectl, "--namespace", cluster.namespace, "port-forward"]
    with subprocess.Popen(
        [*command, service, ":50051"], stdout=subprocess.PIPE, text=True
    ) as forward:
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()
            if (match := FORWARDING.search(line)) is None:
                raise AttemptError(f"kubectl port-forward did not name a port: {line!r}")
            yield match[1]
        finally:
            forward.terminate()


def solve(address: str, credentials: Credentials) -> tuple[Answer, bool]:
    """Send one fresh problem; returns its answer, and whether it is right."""
    drawn = long_problem(secrets.randbits(32))
    with Client(address, timeout_s=60.0, tls=credentials.tls, token=credentials.token) as client:
        answer = client.stream(drawn.prompt, Params(max_tokens=160)).answer
    print(f"{drawn.prompt}\n{answer.text}")
    return answer, check(drawn, answer.text).final


def long_problem(seed: int) -> Problem:
    """The first problem of the seed that fills pages: a prompt shorter than a block has none to
    move.
    """
    drawn = (problem(seed, index, "held_out") for index in itertools.count())
    return next(one for one in drawn if len(one.prompt.split()) >= LEAST_WORDS)


def diagnosis(cluster: Cluster) -> str:
    """Pods, events and the last log lines of a failed attempt."""
    texts = []
    for words in (
        ("get", "pods", "--output=wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "--selector", "app.kubernetes.io/part-of=effuse", "--tail=30", "--prefix"),
    ):
        try:
            texts.append(cluster.run(*words, timeout_s=30))
        except AttemptError as error:
            texts.append(str(error))
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
