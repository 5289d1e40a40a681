"""Traces that are off, or asked for where they cannot be had."""

from __future__ import annotations

import sys

import pytest

from effuse.telemetry.traces import Traces, TracesUnavailable


def test_off_nothing_is_said_and_what_fails_within_passes() -> None:
    traces = Traces.to(None, "router")
    with pytest.raises(KeyError), traces.span("generate", [("traceparent", "x")], {"a": 1}):
        traces.record("queue", 0.1)
        traces.annotate({"b": 2})
        assert traces.carrier() == ()
        raise KeyError
    traces.close()


def test_without_its_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # like without an installation
    with pytest.raises(TracesUnavailable, match="install effuse with the extra `traces`"):
        Traces.to("http://127.0.0.1:4317", "router")
