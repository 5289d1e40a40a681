"""A router for tests of clients: it answers in one fixed way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import grpc

from effuse.protos.errors import InvalidRequest, to_status
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc

WHOLE = pb.GenerateResponse(
    request_id="r",
    text="abc",
    token_ids=[1, 2, 3],
    finish_reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(prompt_tokens=2, completion_tokens=3),
    stats=pb.GenerationStats(time_to_first_block=timedelta(seconds=0.25)),
    model="m",
)
EVENTS = [
    pb.GenerateStreamResponse(commit=pb.BlockCommit(text="ab", num_tokens=2, token_ids=[1, 2])),
    pb.GenerateStreamResponse(draft=pb.BlockDraft(text="?")),
    pb.GenerateStreamResponse(commit=pb.BlockCommit(text="", num_tokens=0)),
    pb.GenerateStreamResponse(commit=pb.BlockCommit(text="c", num_tokens=1, token_ids=[3])),
    pb.GenerateStreamResponse(
        request_id="r",
        finished=pb.Finished(
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(completion_tokens=3),
            model="m",
            seed=9,
            stop_string="d",
        ),
    ),
]


@dataclass
class FakeRouter(
    generation_pb2_grpc.GenerationServiceServicer, model_pb2_grpc.ModelServiceServicer
):
    """Fails as many calls as it should, and streams its events."""

    failures: int = 0
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    events: list[pb.GenerateStreamResponse] = field(default_factory=lambda: list(EVENTS))
    hangs: bool = False
    takes_s: float = 0.0  # before a request is answered, or until the end of the test
    over: threading.Event = field(default_factory=threading.Event)
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        self._note(request, context)
        return WHOLE

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._note(request.request, context)
        context.add_callback(self.cancelled.set)
        yield from self.events
        if self.hangs:
            self.cancelled.wait(20)

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[model_pb2.Model(name="m")])

    def GetRequest(self, request: object, context: object) -> pb.GetRequestResponse:
        raise NotImplementedError

    def CancelRequest(
        self, request: pb.CancelRequestRequest, context: object
    ) -> pb.CancelRequestResponse:
        return pb.CancelRequestResponse(was_running=request.request_id == "mine")

    def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: object
    ) -> model_pb2.TokenizeResponse:
        said = request.prompt or request.chat.messages[0].content
        return model_pb2.TokenizeResponse(token_ids=said.encode())

    def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: object
    ) -> model_pb2.DetokenizeResponse:
        return model_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: object, context: object) -> model_pb2.GetModelResponse:
        raise NotImplementedError

    def ListWorkers(
        self, request: model_pb2.ListWorkersRequest, context: object
    ) -> model_pb2.ListWorkersResponse:
        """One a page."""
        page = int(request.page_token or 0)
        worker = model_pb2.Worker(worker_id=f"w{page}")
        token = str(page + 1) if page < 2 else ""
        return model_pb2.ListWorkersResponse(workers=[worker], next_page_token=token)

    def _note(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        self.left_s.append(context.time_remaining())
        self.over.wait(self.takes_s)
        if len(self.asked) <= self.failures:
            context.abort(self.code, "told to fail")
        if request.sampling.top_k == 7:
            wrong = InvalidRequest.of("sampling.top_k", "at most 6")
            details = to_status(wrong).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", details),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
