"""A fake router to look at: it answers with a test's content, and nothing runs behind it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import grpc

from effuse.v1 import model_pb2, model_pb2_grpc, monitor_pb2, monitor_pb2_grpc

WORKER = model_pb2.Worker(
    worker_id="prefill-0", role=model_pb2.WORKER_ROLE_PREFILL, model="tiny",
    state=model_pb2.WORKER_STATE_READY, total_pages=64, free_pages=60, max_num_seqs=8,
    links=[model_pb2.WorkerLink(peer="decode-0", transport="cma", gigabytes_per_second=1.5)],
)  # fmt: skip
REQUEST = monitor_pb2.RunningRequest(
    name="5ebe2294ecd0", model="tiny", state="decoding", prefill_worker="prefill-0",
    decode_worker="decode-0", attempt=1, age=timedelta(seconds=1.25),
    prompt_tokens=11, max_tokens=64, num_tokens=8, block_size=4,
    blocks=[monitor_pb2.RunningBlock(token_offset=8, num_tokens=4, masks=b"\x06")],
)  # fmt: skip


class Models(model_pb2_grpc.ModelServiceServicer):
    def ListWorkers(
        self, request: model_pb2.ListWorkersRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListWorkersResponse:
        return model_pb2.ListWorkersResponse(workers=[WORKER])

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse()

    def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> model_pb2.TokenizeResponse:
        raise NotImplementedError

    def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> model_pb2.DetokenizeResponse:
        raise NotImplementedError

    def GetModel(
        self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> model_pb2.GetModelResponse:
        raise NotImplementedError


class Requests(monitor_pb2_grpc.MonitorServiceServicer):
    """A request whose block fills in; then none, and the end of the stream."""

    def WatchRequests(
        self, request: monitor_pb2.WatchRequestsRequest, context: grpc.ServicerContext
    ) -> Iterator[monitor_pb2.WatchRequestsResponse]:
        for masks in (b"\x06", b"\x02", b"\x00"):
            one = monitor_pb2.RunningRequest()
            one.CopyFrom(REQUEST)
            one.blocks[0].masks = masks
            yield monitor_pb2.WatchRequestsResponse(
                router="r", num_running=1, requests=[one], plan=PLAN.lines
            )
        yield monitor_pb2.WatchRequestsResponse(router="r")

    def GetPlan(
        self, request: monitor_pb2.GetPlanRequest, context: grpc.ServicerContext
    ) -> monitor_pb2.GetPlanResponse:
        return monitor_pb2.GetPlanResponse(plans=[PLAN, NO_PLAN])


PLAN = monitor_pb2.ModelPlan(
    model="large",
    times=monitor_pb2.PlanTimes(
        prompts=[monitor_pb2.PromptTime(tokens=1000, seconds=0.05)],
        answers=[
            monitor_pb2.AnswerPace(batch=1, tokens_per_second=640, gap_s=0.04),
            monitor_pb2.AnswerPace(batch=8, tokens_per_second=2560, gap_s=0.07),
        ],
    ),
    workload=monitor_pb2.PlanWorkload(rate=30, prompt=1000, answer=128),
    objectives=monitor_pb2.PlanObjectives(gap_s=0.08),
    mode="auto",
    roles=monitor_pb2.PlanSplit(prefill=3, decode=3, rate=60),
    desired=monitor_pb2.PlanSplit(prefill=0, decode=4, rate=40),
    lines=["as the router has it"],
)
NO_PLAN = monitor_pb2.ModelPlan(model="new", lines=["no plan yet: too few requests"])


@contextmanager
def router() -> Iterator[str]:
    """Gives its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    model_pb2_grpc.add_ModelServiceServicer_to_server(Models(), server)
    monitor_pb2_grpc.add_MonitorServiceServicer_to_server(Requests(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)
