"""Workers of several ranks that share a pool, through real processes: the oracle's tokens, and no
second prefill. The pool is a stand-in for LMCache's server, or a real server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.client import load_of, wait_until
from e2e.comparison import compare
from e2e.processes import kill, restart
from e2e.rank_faults import ranks_of
from e2e.test_equality import ask, solid_jobs
from e2e.test_kv_mode import await_pool, computed
from e2e.test_lost_engines import life_of
from e2e.test_metrics import scrape
from e2e.test_shared_pool import counted
from e2e.tiny import TINY, tiny_fleet
from kvtransfer.lmcache_server import LMCacheServer
from kvtransfer.lmcache_stand_in import StandIn
from kvtransfer.mooncake_master import Mooncake

from effuse.cli.fleet import Fleet
from effuse.placement.records import Role

WORKERS: tuple[tuple[str, Role], ...] = (("prefill-0", "prefill"), ("decode-0", "decode"))


@contextlib.contextmanager
def ranks_killed(fleet: Fleet) -> Iterator[None]:
    """One rank of each worker that has several is killed while requests run; leaves once each has
    another engine."""
    lives = {}
    victims = []
    for name, role in WORKERS:
        if ranks := ranks_of(fleet, name, role):
            lives[name] = life_of(fleet, name)
            victims.append(ranks[-1])
    assert victims
    decode = fleet.address_of("decode-0")

    def kill_them() -> None:
        wait_until(lambda: load_of(decode).running > 0, "no request runs")
        for victim in victims:
            victim.kill()

    killing = threading.Thread(target=kill_them)
    killing.start()
    yield
    killing.join()
    for name, life in lives.items():
        wait_until(lambda: life_of(fleet, name) not in ("", life), f"{name} is not back")  # noqa: B023


REAL = pytest.mark.mooncake


@pytest.mark.parametrize(
    ("kind", "mode", "prefill", "decode"),
    [
        (StandIn, "pool", 1, 2),
        *(
            pytest.param(Mooncake, "pool", *degrees, marks=REAL)
            for degrees in ((1, 2), (2, 1), (2, 2), (2, 4))
        ),
        pytest.param(Mooncake, "p2p", 2, 1, marks=REAL),
        pytest.param(LMCacheServer, "pool", 2, 1, marks=REAL),
    ],
)
def test_ranks_read_from_the_pool_what_others_wrote(
    tmp_path: Path,
    kind: type[StandIn | Mooncake | LMCacheServer],
    mode: str,
    prefill: int,
    decode: int,
) -> None:
    """A prompt outlives its prefill worker; then ranks die in the middle of answers."""
    pairs = solid_jobs("sdar", "block_diffusion", seed=3, least_blocks=7)
    jobs = [job for job, _ in pairs]
    num_units = sum(len(job.prompt) // TINY.page_size for job in jobs)
    with (
        contextlib.closing(kind(tmp_path)) as pool,
        tiny_fleet(
            "sdar",
            connector="zmq",
            worker_flags=("--kv-offloading-size", "0.02", "--kv-pool", pool.url),
            router_flags=("--kv-mode", mode),
            prefill_flags=("--tensor-parallel-size", str(prefill)),
            decode_flags=("--tensor-parallel-size", str(decode)),
        ) as fleet,
    ):
        if mode == "pool":
            await_pool(fleet)
        found = ask(fleet, jobs)
        compare(pairs, found)
        if mode == "pool":
            by_pool = sum(one.stats.connector == "pool" for one in found)
            assert by_pool >= len(jobs) * 3 / 4
        wait_until(
            lambda: (
                counted(fleet, "kv_pool_kept_bytes", "prefill-0") >= num_units * TINY.page_bytes
            ),
            "the pool has not all prompts",
        )
        kill(fleet, "prefill-0")
        restart(fleet, "prefill-0")
        if mode == "pool":
            await_pool(fleet)
        before = computed(fleet, "prefill-0")
        compare(pairs, ask(fleet, jobs))
        again = computed(fleet, "prefill-0") - before
        rest = sum(len(job.prompt) % TINY.page_size for job in jobs)
        print(f"computed again: {again:g} tokens, {rest} of them below a unit")
        assert again <= rest + num_units * TINY.page_size / 4
        if isinstance(pool, StandIn):
            pool.spoil()
        with ranks_killed(fleet):
            compare(pairs, ask(fleet, jobs))
        compare(pairs, ask(fleet, jobs))
        if isinstance(pool, StandIn):
            corrupt = sum(
                value
                for key, value in scrape(fleet).items()
                if key[0] == "effuse_kv_offload_corrupt_total"
            )
            assert corrupt > 0
