"""Common parts of a process's metrics: labels, values that are read, the port."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from effuse.telemetry.metrics import ProcessMetrics


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return str(page.read().decode())


def test_every_sample_has_the_labels_of_its_process_and_keeps_its_own() -> None:
    metrics = ProcessMetrics(lambda: {"role": "decode", "model_name": 'a"\\b\nc'})
    metrics.counter("odd", "Odd ones", "role").labels("own").inc(3)
    metrics.histogram("took_seconds", "Took").observe(0.3)
    with metrics.served("127.0.0.1", 0) as port:
        families = {one.name: one for one in text_string_to_metric_families(scrape(port))}
    assert "process_resident_memory_bytes" in families
    samples = [sample for family in families.values() for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {'a"\\b\nc'}
    (odd,) = [one for one in samples if one.name == "effuse_odd_total"]
    assert (odd.value, odd.labels["role"]) == (3, "own")
    bounds = {s.labels["le"]: s.value for s in samples if s.name == "effuse_took_seconds_bucket"}
    assert (bounds["0.25"], bounds["0.5"], bounds["+Inf"]) == (0, 1, 1)


def test_values_are_read_at_each_scrape_and_counts_say_so() -> None:
    metrics, seen = ProcessMetrics(dict), [1]
    metrics.read_gauge("now", "Now", lambda: seen[0])
    metrics.read_counter("ever", "Ever", lambda: seen[0])
    assert (metrics.value("effuse_now"), metrics.value("effuse_ever_total")) == (1, 1)
    seen[0] = 2
    assert (metrics.value("effuse_now"), metrics.value("effuse_ever_total")) == (2, 2)
    assert metrics.value("effuse_now", {"no": "such"}) is None
    kinds = {family.name: family.type for family in metrics.families()}
    assert (kinds["effuse_now"], kinds["effuse_ever"]) == ("gauge", "counter")


def test_a_taken_port_is_an_error_and_a_left_one_is_free() -> None:
    metrics = ProcessMetrics(dict)
    with metrics.served("127.0.0.1", 0) as port, pytest.raises(OSError, match="in use"):
        metrics.served("127.0.0.1", port).__enter__()
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_every_address_is_one_of_either_family(host: str) -> None:
    with ProcessMetrics(dict).served(host, 0) as port:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=20).close()


def test_who_connects_and_says_nothing_is_left_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else each of them has a thread for ever."""
    metrics = ProcessMetrics(dict)
    with metrics.served("127.0.0.1", 0) as port:
        with monkeypatch.context() as impatient:
            impatient.setattr("effuse.telemetry.metrics.ScrapeHandler.timeout", 0.1)
            with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
                assert silent.recv(1) == b""
        assert "process_resident_memory_bytes" in scrape(port)
    assert capsys.readouterr().err == ""
