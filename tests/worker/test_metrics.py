"""A worker's metrics of its load, its links and its attempts."""

from __future__ import annotations

from dataclasses import replace

from effuse.placement.records import Link, Load, Quarantine
from effuse.worker.shell import WorkerMetrics, WorkerReadings

NOW = WorkerReadings(role="decode", model_name="tiny", load=Load(), restarts=3, tasks=17)


def values(now: WorkerReadings, name: str, label: str) -> dict[str, float]:
    """Samples of one family by one of their labels."""
    families = {family.name: family for family in WorkerMetrics(lambda: now).families()}
    return {sample.labels[label]: sample.value for sample in families[name].samples}


def test_a_load_as_gauges_and_counters() -> None:
    load = Load(
        running=1, waiting=2, total_pages=8, free_pages=2, reserved_pages=1, receiving_pages=1,
        quarantined_pages=1, preemptions=5, steps=9, step_requests=20, step_tokens=70,
    )  # fmt: skip
    metrics = WorkerMetrics(lambda: replace(NOW, load=load))
    for name, value in (
        ("num_requests_running", 1),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.75),
        ("num_preemptions_total", 5),
        ("engine_steps_total", 9),
        ("engine_step_requests_total", 20),
        ("engine_step_tokens_total", 70),
        ("engine_restarts_total", 3),
        ("front_tasks", 17),
    ):
        assert metrics.value(f"effuse_{name}") == value, name
    pages = values(replace(NOW, load=load), "effuse_kv_pages", "state")
    assert pages == {"free": 2, "reserved": 1, "receiving": 1, "committed": 3, "quarantined": 1}


def test_waste_of_the_pool_and_of_buffers_and_what_the_cache_saved() -> None:
    load = Load(
        running=3, total_pages=10, quarantined_pages=1, prefix_hits=64, prefix_units=5,
        kv_tokens=70, kv_room_partial=10, kv_room_empty=20,
    )  # fmt: skip
    now = replace(NOW, load=load, page_size=16, page_bytes=4096, max_model_len=100)
    shares = values(now, "effuse_kv_waste_ratio", "cause")
    assert shares == {"reserved": 0.125, "internal": 0.0625, "external": 0.1}
    unused = values(now, "effuse_kv_unused_ratio", "allocation")
    assert unused == {"paged": 0.3, "contiguous": 1 - 70 / 300}
    metrics = WorkerMetrics(lambda: now)
    assert metrics.value("effuse_kv_reused_bytes_total") == 4 * 4096
    assert metrics.value("effuse_prefix_cache_units") == 5
    assert set(values(NOW, "effuse_kv_unused_ratio", "allocation").values()) == {0.0}


def test_every_sample_says_of_which_worker_it_is() -> None:
    samples = [s for family in WorkerMetrics(lambda: NOW).collect() for s in family.samples]
    assert {(s.labels["role"], s.labels["model_name"]) for s in samples} == {("decode", "tiny")}


def test_no_pool_is_no_usage() -> None:
    assert WorkerMetrics(lambda: NOW).value("effuse_kv_cache_usage_perc") == 0


def test_links_and_quarantines_by_the_other_end() -> None:
    now = replace(
        NOW,
        links=[Link("decode-0", "1", "cuda_ipc", 213.4e9), Link("decode-1", "1", "tcp", 0.5)],
        quarantines=[Quarantine("host:1", 4, 1.5)],
    )
    rates = values(now, "effuse_kv_link_bytes_per_second", "peer")
    assert rates == {"decode-0": 213.4e9, "decode-1": 0.5}
    assert values(now, "effuse_kv_quarantine_pages", "writer") == {"host:1": 4}
    assert values(now, "effuse_kv_quarantine_age_seconds", "writer") == {"host:1": 1.5}


def test_a_handoff_by_what_moved_it() -> None:
    metrics = WorkerMetrics(lambda: NOW)
    metrics.count_handoff("cma", 4096, 0.002)
    metrics.count_handoff("cma", 4096, 0.004)
    by = {"transport": "cma"}
    assert metrics.value("effuse_kv_transfer_bytes_total", by) == 8192
    assert metrics.value("effuse_kv_handoff_seconds_count", by) == 2
