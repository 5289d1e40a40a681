"""The metrics' text, and the port that serves it."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from effuse.placement.records import Link, Load
from effuse.worker import metrics
from effuse.worker.metrics import Histogram, WorkerMetrics, render


def test_gauges_and_counters_by_their_names() -> None:
    counted = WorkerMetrics(prompt_tokens=12, generation_tokens=34)
    counted.finished["stop"] += 2
    text = render(
        counted, Load(running=1, waiting=2, total_pages=8, free_pages=2, preemptions=5), 3, 17
    )
    lines = text.splitlines()
    for line in (
        "effuse_num_requests_running 1",
        "effuse_num_requests_waiting 2",
        "effuse_kv_cache_usage_perc 0.75",
        "effuse_prompt_tokens_total 12",
        "effuse_generation_tokens_total 34",
        "effuse_num_preemptions_total 5",
        "effuse_engine_restarts_total 3",
        'effuse_request_success_total{finished_reason="stop"} 2',
    ):
        assert line in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_a_scraper_reads_every_metric_under_one_prefix() -> None:
    counted = WorkerMetrics()
    counted.time_to_first_block.observe(0.1)
    families = list(text_string_to_metric_families(render(counted, Load(), 0, 0)))
    assert all(family.name.startswith("effuse_") for family in families)
    counters = {sample.name for one in families if one.type == "counter" for sample in one.samples}
    assert counters and all(name.endswith("_total") for name in counters)


def test_links_by_peer_and_transport_whatever_they_are_called() -> None:
    links = [Link("decode-0", "1", "cuda_ipc", 213.4e9), Link('a"\\b\nc', "1", "tcp", 0.5)]
    text = render(WorkerMetrics(), Load(), 0, 0, links)
    assert (
        'effuse_kv_link_bytes_per_second{peer="decode-0",transport="cuda_ipc"} 213400000000\n'
        in text
    )
    (family,) = [
        one
        for one in text_string_to_metric_families(text)
        if one.name == "effuse_kv_link_bytes_per_second"
    ]
    assert [sample.labels["peer"] for sample in family.samples] == ["decode-0", 'a"\\b\nc']


def test_no_pool_is_no_usage() -> None:
    assert "effuse_kv_cache_usage_perc 0\n" in render(WorkerMetrics(), Load(), 0, 0)


def test_histogram_buckets_are_cumulative_and_bounds_included() -> None:
    histogram = Histogram()
    for seconds in (0.005, 0.006, 0.3, 1000.0):
        histogram.observe(seconds)
    lines = histogram.lines("x")
    assert 'x_bucket{le="0.005"} 1' in lines
    assert 'x_bucket{le="0.01"} 2' in lines
    assert 'x_bucket{le="0.5"} 3' in lines
    assert 'x_bucket{le="60.0"} 3' in lines
    assert lines[-3:] == ['x_bucket{le="+Inf"} 4', "x_sum 1000.311000", "x_count 4"]


def test_the_port_answers_a_scraper_and_survives_one_that_is_none() -> None:
    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        writer.write_eof()
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionResetError:  # closed before all of the request was read
            return b""
        finally:
            writer.close()

    async def go() -> None:
        async with await metrics.serve("127.0.0.1", 0, lambda: "a 1\n") as server:
            port = server.sockets[0].getsockname()[1]
            assert await ask(port, b"") == b""
            assert await ask(port, b"x" * 70000) == b""
            answer = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        head, body = answer.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert body == b"a 1\n"
        assert b"Content-Length: 4" in head

    asyncio.run(go())
