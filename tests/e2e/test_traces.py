"""One trace holds what all processes did for a request, the handoff of its pages included."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from checkpoints import write_tiny_checkpoint
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from router.test_kserve import asked as kserve_request

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.compat import kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from effuse.telemetry.traces import MOST_STATE, Traces
from effuse.v1 import generation_pb2, generation_pb2_grpc

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Keeps each span with the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> object:
        for group in request.resource_spans:
            service = {a.key: a.value.string_value for a in group.resource.attributes}
            self.spans += [
                (service["service.name"], span) for one in group.scope_spans for span in one.spans
            ]
        return otlp.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    add: Any = otlp_grpc.add_TraceServiceServicer_to_server  # it comes without types
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)


def test_what_a_client_adds_to_a_trace_never_makes_our_own_calls_too_large() -> None:
    """A worker that refuses a call for its metadata is a worker lost."""
    traces = Traces(TracerProvider())
    parent = ("traceparent", f"00-{TRACE}-{CLIENT}-01")
    for length, is_passed_on in ((MOST_STATE, True), (MOST_STATE + 1, False)):
        state = f"a={'v' * 240},b={'v' * 240},c={'v' * (length - 488)}"
        assert len(state) == length
        with traces.span("generate", (parent, ("tracestate", state))):
            told = dict(traces.carrier())
        assert told["traceparent"].startswith(f"00-{TRACE}-")
        assert told.get("tracestate") == (state if is_passed_on else None)


def test_a_request_is_one_trace_across_all_processes(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "sdar")
    with collecting() as (collector, endpoint):
        flags = ("--otlp-traces-endpoint", endpoint)
        config = FleetConfig(
            model=model, router_flags=(*flags, "--prefill", "remote"), worker_flags=flags
        )
        with Fleet(config) as fleet, grpc.insecure_channel(fleet.address) as channel:
            request = generation_pb2.GenerateRequest(
                prompt_token_ids=generation_pb2.TokenIds(ids=range(40, 60)),
                stopping=generation_pb2.StoppingParams(max_tokens=8),
            )
            answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                request, timeout=60, metadata=(("traceparent", f"00-{TRACE}-{CLIENT}-01"),)
            )
            _ask_by_other_services(channel)
    others = [span for _, span in collector.spans if span.trace_id.hex() != TRACE]
    _check_roots(others)
    collector.spans = [one for one in collector.spans if one[1] not in others]
    spans = {span.name: (service, span) for service, span in collector.spans}
    assert {name: service for name, (service, _) in spans.items()} == {
        **dict.fromkeys(("generate", "queue", "attempt"), "effuse-router"),
        **dict.fromkeys(("prefill", "compute", "push"), "effuse-prefill"),
        **dict.fromkeys(("decode", "handoff"), "effuse-decode"),
    }
    assert {span.trace_id.hex() for _, span in spans.values()} == {TRACE}
    parents = {
        "generate": None, "queue": "generate", "attempt": "generate", "prefill": "attempt",
        "compute": "prefill", "push": "prefill", "decode": "attempt", "handoff": "decode",
    }  # fmt: skip
    for name, parent in parents.items():
        expected = CLIENT if parent is None else spans[parent][1].span_id.hex()
        assert spans[name][1].parent_span_id.hex() == expected, name
    told = {a.key: a.value for a in spans["generate"][1].attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == answer.usage.completion_tokens > 0


OTHERS = {name: f"{number}" * 32 for number, name in enumerate(("vllm", "kserve", "stream"), 1)}


def _ask_by_other_services(channel: grpc.Channel) -> None:
    """One request by each, in a trace of its own."""
    shown = {name: (("traceparent", f"00-{trace}-{CLIENT}-01"),) for name, trace in OTHERS.items()}
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    asked = kserve_request(parameters={"max_tokens": kserve_pb2.InferParameter(int64_param=4)})
    few = vllm_engine_pb2.SamplingParams(max_tokens=4)
    engine = vllm_engine_pb2.GenerateRequest(text="how many?", sampling_params=few)
    list(vllm.Generate(engine, timeout=60, metadata=shown["vllm"]))
    kserve.ModelInfer(asked, timeout=60, metadata=shown["kserve"])
    list(kserve.ModelStreamInfer(iter([asked]), timeout=60, metadata=shown["stream"]))


def _check_roots(spans: list[Span]) -> None:
    """Whichever service was asked, its request is one span in its client's trace."""
    roots = {span.trace_id.hex(): span for span in spans if span.name == "generate"}
    assert roots.keys() == set(OTHERS.values())
    for trace, root in roots.items():
        assert root.parent_span_id.hex() == CLIENT
        assert {a.key for a in root.attributes} >= {"effuse.request_id", "gen_ai.request.model"}
        attempts = [one for one in spans if one.name == "attempt" and one.trace_id.hex() == trace]
        assert [one.parent_span_id for one in attempts] == [root.span_id]
