"""A request's spans across processes, with OpenTelemetry; nothing unless a flag turns it on.

The router's span of a request is the parent of its attempts, and an attempt is the parent of its
workers' spans: gRPC metadata carries the W3C context. The engine's process reports its times as
seconds in events, and the front turns them into spans. OpenTelemetry is the extra `traces`; without
it, and without an endpoint, a span costs a function call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_OFF: Final = nullcontext()
Carrier = Iterable[tuple[str, str | bytes]]
Attribute = str | int | float
_KEYS: Final = ("traceparent", "tracestate")
MOST_STATE: Final = 512
"""Characters of a caller's `tracestate` that are passed on, which is W3C's least. A longer one is
left out, because the metadata of our own calls has a limit.
"""


class TracesUnavailable(Exception):
    """Traces are turned on, but OpenTelemetry is not installed."""


class Traces:
    """Where a process sends its spans; off without a `provider`."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("effuse")

    @classmethod
    def to(cls, endpoint: str | None, role: str) -> Self:
        """Sends spans over OTLP/gRPC to `endpoint`, such as http://127.0.0.1:4317; off without one.
        Raises TracesUnavailable."""
        if endpoint is None:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise TracesUnavailable(
                "--otlp-traces-endpoint: OpenTelemetry is not installed; install effuse with the "
                "extra `traces`"
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": f"effuse-{role}"}))
        exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def span(
        self,
        name: str,
        parent: Carrier | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> AbstractContextManager[object]:
        """A span around the body. `parent`: metadata of the incoming call; otherwise the open span
        of this process, if any. An exception is recorded and raised again.
        """
        if self._tracer is None:
            return _OFF
        context = None if parent is None else _context_of(parent)
        return self._tracer.start_as_current_span(name, context, attributes=attributes)

    def record(self, name: str, seconds: float) -> None:
        """A span within the open one, which has just ended and took this time."""
        if self._tracer is not None:
            now_ns = time.time_ns()
            started = self._tracer.start_span(name, start_time=now_ns - round(seconds * 1e9))
            started.end(now_ns)

    def annotate(self, attributes: Mapping[str, Attribute]) -> None:
        if self._tracer is not None:
            from opentelemetry.trace import get_current_span

            get_current_span().set_attributes(attributes)

    def carrier(self) -> tuple[tuple[str, str], ...]:
        """The open span as metadata for a call; empty if traces are off."""
        if self._tracer is None:
            return ()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        return tuple(carrier.items())

    def close(self) -> None:
        """Sends the rest; waits for that as long as the exporter does."""
        if self._provider is not None:
            self._provider.shutdown()


def _context_of(metadata: Carrier) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in metadata if key in _KEYS and isinstance(value, str)}
    if len(carrier.get("tracestate", "")) > MOST_STATE:
        del carrier["tracestate"]
    return TraceContextTextMapPropagator().extract(carrier)
