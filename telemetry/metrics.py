"""Prometheus metrics of one process: a registry, labels of all metrics, and the port.

Names are those of vLLM with `effuse_` instead of `vllm:`, because Prometheus reserves the colon for
recording rules. Counting costs about a microsecond; metrics that are read cost nothing until a
scrape. The metrics themselves are in `router/metrics.py` and `worker/shell.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from socket import AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SHUT_RDWR, socket
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from effuse.telemetry.logs import dropped_lines

# Another series for each counter, which is of no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX: Final = "effuse_"
LATENCY_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""Bounds of duration histograms, from a handoff over NVLink to a long answer."""
TOKENS_PER_FORWARD: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)

Read = Callable[[], float]


class ScrapeHandler(WSGIRequestHandler):
    """Answers one connection, and waits at most `timeout` seconds for its request."""

    timeout = 10.0

    def handle(self) -> None:
        """Handles one request; a client that is silent or leaves gets no answer."""
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because scrapes are frequent."""


def _address(host: str) -> str:
    """The host, or `::` if that includes 0.0.0.0 here, because gRPC reads 0.0.0.0 so."""
    if host == "0.0.0.0":
        with suppress(OSError), socket(AF_INET6) as one:
            host = host if one.getsockopt(IPPROTO_IPV6, IPV6_V6ONLY) else "::"
    return host.strip("[]")


def gauges(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for one, value in values:
        family.add_metric(one, value)
    return family


class ProcessMetrics(Collector):
    """All metrics of a process; nothing is global. `labels` returns the labels of all metrics at
    the time of a scrape. Values are read in another thread than the one that writes them.
    """

    def __init__(self, labels: Callable[[], Mapping[str, str]]) -> None:
        self.registry = CollectorRegistry()
        self._labels = labels
        self._read: list[Callable[[], Metric]] = []
        ProcessCollector(registry=self.registry)
        dropped = "Lines of log and output that were dropped because they were not read"
        self.read_counter("log_lines_dropped", dropped, dropped_lines)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, *labels: str, bounds: Iterable[float] = LATENCY_S
    ) -> Histogram:
        """Adds a histogram, of seconds unless it has other `bounds`."""
        return Histogram(PREFIX + name, text, labels, buckets=tuple(bounds), registry=self.registry)

    def read_gauge(self, name: str, text: str, read: Read) -> None:
        """Adds a value that `read` returns at the time of a scrape."""
        self._read.append(lambda: GaugeMetricFamily(PREFIX + name, text, read()))

    def read_gauges(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """The same for several values, one for each value of a label."""
        self._read.append(
            lambda: gauges(name, text, [label], (([one], v) for one, v in read().items()))
        )

    def read_counter(self, name: str, text: str, read: Read) -> None:
        """The same for a count that only grows; `_total` is added to its name."""
        self._read.append(lambda: CounterMetricFamily(PREFIX + name, text, read()))

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """The current value of one sample, without the labels of the process."""
        wanted = dict(labels or {})
        samples = (one for family in self.families() for one in family.samples)
        return next((s.value for s in samples if (s.name, s.labels) == (name, wanted)), None)

    def families(self) -> Iterator[Metric]:
        """Every metric, without the labels of the process."""
        yield from self.registry.collect()
        yield from (read() for read in self._read)

    def collect(self) -> Iterator[Metric]:
        """Every metric, with the labels of the process unless it has one of the same name."""
        labels = dict(self._labels())
        for family in self.families():
            family.samples = [s._replace(labels=labels | s.labels) for s in family.samples]
            yield family

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Serves the metrics at `host`; port 0 takes a free one. Returns the port. Raises OSError
        that names host and port.
        """
        everything = CollectorRegistry()
        everything.register(self)
        try:
            server, thread = start_http_server(port, _address(host), everything)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        server.RequestHandlerClass = ScrapeHandler
        try:
            yield server.server_port
        finally:
            server.socket.shutdown(SHUT_RDWR)  # ends its thread, which checks twice a second
            server.shutdown()
            server.server_close()
            thread.join(5.0)
