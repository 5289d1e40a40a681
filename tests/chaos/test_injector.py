"""A fault that did not happen has no evidence, and a fleet that could not bear one is not hit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import redis_server
from chaos import injector
from chaos.injector import Injector
from chaos.ledger import Injected, Ledger
from chaos.plan import Fault, Kind
from chaos.subject import NotThere, Subject
from e2e.client import Client, connect, wait_until
from fault_proxy import FaultProxy
from redis import Redis

from effuse.v1 import model_pb2

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


class Scene(Subject):
    """Workers whose processes only sleep; each front's engine is a separate process."""

    def __init__(self, *names: str, redis_url: str = "") -> None:
        self.fronts = {name: subprocess.Popen(SLEEP) for name in names}
        self.engines = {name: subprocess.Popen(SLEEP) for name in names}
        self.lives = dict.fromkeys(names, "1")  # of those that are ready
        self._redis_url = redis_url

    def front(self, worker: str) -> psutil.Process:
        return psutil.Process(self.fronts[worker].pid)

    def engine(self, worker: str) -> psutil.Process:
        if worker not in self.lives:
            raise NotThere(worker)
        return psutil.Process(self.engines[worker].pid)

    def workers(self) -> dict[str, model_pb2.Worker]:
        return {name: model_pb2.Worker(incarnation=life) for name, life in self.lives.items()}

    def routers(self) -> dict[str, int]:
        return {}

    def redis_client(self, timeout_s: float = 30.0) -> Redis:
        return Redis.from_url(self._redis_url, socket_timeout=timeout_s)

    def redis_answers(self) -> bool:
        return True

    def ended(self, name: str) -> bool:
        return not psutil.pid_exists(self.engines[name].pid)

    def is_stopped(self, name: str) -> bool:
        return self.front(name).status() == psutil.STATUS_STOPPED


@contextlib.contextmanager
def scene(*names: str, redis_url: str = "") -> Iterator[Scene]:
    made = Scene(*names, redis_url=redis_url)
    try:
        yield made
    finally:
        for process in (*made.fronts.values(), *made.engines.values()):
            process.kill()
            process.wait(30)


@pytest.fixture
def client() -> Iterator[Client]:
    with connect("127.0.0.1:1") as nobody:  # is never asked: nothing is in flight
        yield nobody


def carry_out(subject: Subject, client: Client, *plan: Fault) -> list[Injected]:
    ledger = Ledger(seed=1, connector="zmq")
    with FaultProxy() as proxy:
        Injector(subject, proxy, client, ledger).carry_out(plan, lambda _: None)
    return ledger.injected


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector, "PATIENCE_S", 0.3)
    monkeypatch.setattr(injector, "_LOOK_S", 0.3)


def killed(kind: Kind, name: str) -> Fault:
    return Fault(kind, name, 0.0)


def test_a_killed_engine_is_gone(client: Client) -> None:
    with scene("decode-0", "decode-1") as subject:
        (injected,) = carry_out(subject, client, killed(Kind.ENGINE_KILLED, "decode-0"))
        assert injected.evidence
        assert subject.ended("decode-0")
        assert injected.recovered_s is None, "its old life was taken for a new one"


@pytest.mark.parametrize("kind", [Kind.FRONT_KILLED, Kind.WORKER_DRAINED])
def test_a_front_whose_engine_outlives_it_is_no_evidence(
    kind: Kind, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector, "SEEN_S", 0.3)
    monkeypatch.setattr(injector, "DRAIN_S", 0.3)
    with scene("decode-0", "decode-1") as subject:
        (injected,) = carry_out(subject, client, killed(kind, "decode-0"))
        assert not injected.evidence


def test_a_paused_front_stands_still_and_goes_on(client: Client) -> None:
    pause = Fault(Kind.FRONT_PAUSED, "decode-0", 0.0, 0.5)
    with scene("decode-0", "decode-1") as subject:
        (injected,) = carry_out(subject, client, pause)
        assert injected.evidence
        assert not subject.is_stopped("decode-0")
        assert injected.recovered_s is not None
        assert injected.recovered_s >= pause.hold_s


def test_a_pause_that_somebody_ends_is_no_evidence(client: Client) -> None:
    pause = Fault(Kind.FRONT_PAUSED, "decode-0", 0.0, 3.0)
    with scene("decode-0", "decode-1") as subject, ThreadPoolExecutor(1) as threads:
        running = threads.submit(carry_out, subject, client, pause)
        wait_until(lambda: subject.is_stopped("decode-0"), "it was never stopped")
        time.sleep(0.2)
        subject.front("decode-0").resume()
        assert not running.result()[0].evidence


def test_an_engine_that_somebody_lets_go_on_is_no_evidence(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector, "SEEN_S", 1.0)
    pause = Fault(Kind.ENGINE_PAUSED, "decode-0", 0.0, 2.0)
    with scene("decode-0", "decode-1") as subject, ThreadPoolExecutor(1) as threads:
        engine = subject.engine("decode-0")
        running = threads.submit(carry_out, subject, client, pause)
        wait_until(lambda: engine.status() == psutil.STATUS_STOPPED, "it was never stopped")
        engine.resume()
        assert not running.result()[0].evidence


class Scripted(psutil.Process):
    """A process with a given state at each look; the last one stays. No signal reaches it."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self.states = list(states)

    def status(self) -> Any:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def suspend(self) -> None:
        pass

    def resume(self) -> None:
        pass


STOPPED, RUNNING, ZOMBIE = psutil.STATUS_STOPPED, psutil.STATUS_RUNNING, psutil.STATUS_ZOMBIE


def paused(
    monkeypatch: pytest.MonkeyPatch, client: Client, kind: Kind, *engines: psutil.Process
) -> list[Injected]:
    """A pause that meets the next engine or front each time it looks for one."""
    monkeypatch.setattr(injector, "SEEN_S", 0.3)
    monkeypatch.setattr(injector, "PATIENCE_S", 5.0)
    victims = iter(engines)
    with scene("decode-0", "decode-1") as subject:

        def engine(worker: str) -> psutil.Process:
            victim = next(victims)
            subject.lives[worker] = f"{id(victim)}"  # else it would be the one that has ended
            return victim

        subject.engine = subject.front = engine  # type: ignore[method-assign]
        return carry_out(subject, client, Fault(kind, "decode-0", 0.0, 0.1))


def test_an_engine_that_is_just_being_ended_stood_still(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its front has sent SIGKILL as the pause ends: it is neither stopped nor gone yet."""
    killed_late = Scripted(RUNNING, *[STOPPED] * 2, *[RUNNING] * 20, ZOMBIE)
    (injected,) = paused(monkeypatch, client, Kind.ENGINE_PAUSED, killed_late)
    assert "was ended" in injected.evidence


def test_an_engine_that_ended_before_it_was_seen_to_stop_is_no_fault_and_another_is_paused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Scripted(RUNNING, RUNNING, RUNNING, ZOMBIE)
    (injected,) = paused(monkeypatch, client, Kind.ENGINE_PAUSED, ended, Scripted(RUNNING, STOPPED))
    assert "stood still" in injected.evidence


@pytest.mark.parametrize("kind", [Kind.ENGINE_PAUSED, Kind.FRONT_PAUSED])
def test_a_process_that_never_stops_is_no_evidence(
    kind: Kind, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (injected,) = paused(monkeypatch, client, kind, *[Scripted(RUNNING)] * 9)
    assert not injected.evidence


def test_a_front_that_ends_when_it_is_paused_is_no_evidence(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Scripted(RUNNING, STOPPED, ZOMBIE)
    (injected,) = paused(monkeypatch, client, Kind.FRONT_PAUSED, front, front)
    assert not injected.evidence


def end(process: subprocess.Popen[bytes]) -> None:
    """It has ended, but its exit status is not collected."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


KILLED = (Kind.ENGINE_KILLED, Kind.FRONT_KILLED, Kind.OTHERS_KILLED, Kind.ENGINE_PAUSED)


@pytest.mark.parametrize("kind", KILLED)
def test_a_victim_that_is_gone_is_waited_for(
    kind: Kind, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router lists it as ready, but its engine is being replaced."""
    monkeypatch.setattr(injector, "PATIENCE_S", 2.0)
    with scene("decode-0", "decode-1", "decode-2") as subject:
        gone = subprocess.Popen(SLEEP)
        victim = psutil.Process(gone.pid)
        end(gone)
        tries, real = iter(["is missing", "has ended"]), subject.engine

        def engine(worker: str) -> psutil.Process:
            how = next(tries, "is there")
            if how == "is missing":
                raise NotThere(worker)
            return victim if how == "has ended" else real(worker)

        subject.engine = engine  # type: ignore[method-assign]
        if kind is Kind.FRONT_KILLED:
            threading.Timer(1.0, subject.engines["decode-0"].kill).start()
        ledger = carry_out(subject, client, Fault(kind, "decode-0", 0.0, 0.2))
        gone.wait(30)
        assert [bool(one.evidence) for one in ledger] == [True]
        assert next(tries, None) is None


def test_a_victim_that_never_comes_is_not_hit(client: Client) -> None:
    with scene("decode-0", "decode-1") as subject:
        end(subject.engines["decode-0"])
        assert not carry_out(subject, client, killed(Kind.ENGINE_KILLED, "decode-0"))


def test_a_redis_that_is_emptied_has_lost_its_keys(client: Client) -> None:
    with redis_server.running() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with scene("decode-0", redis_url=url) as subject, subject.redis_client() as redis:
            redis.set("a", 1)
            (injected,) = carry_out(subject, client, killed(Kind.REDIS_EMPTIED, "redis"))
            assert injected.evidence
            assert not redis.exists("a")


def test_a_redis_that_is_rolled_back_holds_what_it_held(client: Client) -> None:
    with redis_server.running() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with scene("decode-0", redis_url=url) as subject, subject.redis_client() as redis:
            redis.hset("a", "b", 1)
            redis.set("c", 1, ex=100)
            back = Fault(Kind.REDIS_ROLLED_BACK, "redis", 0.0, 2.0)
            with ThreadPoolExecutor(1) as threads:
                running = threads.submit(carry_out, subject, client, back)
                wait_until(lambda: _calls(redis, "pttl") == 2, "what it holds was not read")
                redis.hset("a", "b", 2)
                redis.set("d", 1)
                (injected,) = running.result()
            assert injected.evidence
            assert redis.hget("a", "b") == b"1"
            assert 0 < redis.ttl("c") <= 100
            assert not redis.exists("d")


def _calls(redis: Redis, command: str) -> int:
    """How often it was asked for that."""
    told = redis.info("commandstats").get(f"cmdstat_{command}", {})
    return int(told.get("calls", 0))


def test_a_redis_that_is_kept_down_is_killed_again(client: Client) -> None:
    with scene("decode-0") as subject:
        victims = [subprocess.Popen(SLEEP) for _ in range(3)]
        subject.redis = lambda: _first_alive(victims)  # type: ignore[method-assign]
        (injected,) = carry_out(subject, client, Fault(Kind.REDIS_KILLED, "redis", 0.0, 1.0))
        assert injected.evidence.count(",") == 2
        assert all(one.wait(30) for one in victims)


def _first_alive(processes: list[subprocess.Popen[bytes]]) -> psutil.Process:
    for one in processes:
        if one.poll() is None:
            return psutil.Process(one.pid)
    raise NotThere("Redis")


def test_all_others_of_a_kind_are_hit_at_once_and_none_else(client: Client) -> None:
    with scene("prefill-0", "decode-0", "decode-1", "decode-2") as subject:
        (injected,) = carry_out(subject, client, killed(Kind.OTHERS_KILLED, "decode-1"))
        assert injected.evidence
        assert [subject.ended(f"decode-{one}") for one in range(3)] == [True, False, True]
        assert not subject.ended("prefill-0")
        assert injected.recovered_s is None


def test_one_that_is_back_is_not_all_of_them(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, names = killed(Kind.OTHERS_KILLED, "decode-1"), ("decode-0", "decode-1", "decode-2")
    with scene(*names) as subject, ThreadPoolExecutor(1) as threads:
        running = threads.submit(carry_out, subject, client, fault)
        wait_until(lambda: subject.ended("decode-2"), "it was not killed")
        subject.lives["decode-0"] = "2"
        assert running.result()[0].recovered_s is None
    monkeypatch.setattr(injector, "PATIENCE_S", 30.0)  # all are back before
    with scene(*names) as subject, ThreadPoolExecutor(1) as threads:
        running = threads.submit(carry_out, subject, client, fault)
        wait_until(lambda: subject.ended("decode-2"), "it was not killed")
        subject.lives |= {"decode-0": "2", "decode-2": "2"}
        assert running.result()[0].recovered_s is not None


def test_a_link_over_which_nothing_passes_is_no_evidence(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector, "SEEN_S", 0.3)
    with scene("decode-0", "decode-1") as subject:
        cut = Fault(Kind.LINK_CUT, "decode-0", 0.0, 0.1)
        assert not carry_out(subject, client, cut)[0].evidence


def test_the_last_one_of_its_kind_is_not_hit(client: Client) -> None:
    with scene("prefill-0", "decode-0") as subject:
        assert not carry_out(subject, client, killed(Kind.ENGINE_KILLED, "decode-0"))
        assert not subject.ended("decode-0")


def test_nor_is_the_last_one_that_was_not_hit_before(client: Client) -> None:
    plan = [killed(Kind.ENGINE_KILLED, name) for name in ("decode-0", "decode-1")]
    with scene("decode-0", "decode-1") as subject:
        (injected,) = carry_out(subject, client, *plan)
        assert injected.fault is plan[0]
        assert not subject.ended("decode-1")
