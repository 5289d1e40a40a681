"""GenerationService: public calls, each handed to who answers it; and what every service that
serves requests does around one."""

from __future__ import annotations

from contextlib import AbstractContextManager

import grpc.aio

from effuse.router.client import AnswerStream, WholeAnswer
from effuse.router.findings import Findings, check_request_id
from effuse.router.handler import Handler, Response, Sent, accept
from effuse.router.router import Router
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        """The whole answer, or all answers, at the end."""
        answer = WholeAnswer()
        with request_span(self._router, context):
            accepted = accept(self._router, request, context, is_stream=False)
            answer.take(await Handler(self._router, accepted, answer).serve())
        return answer.response(accepted.id)

    async def GenerateStream(  # type: ignore[override]  # the stub knows only generators
        self,
        request: pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
    ) -> None:
        """The answer as it grows, or several.

        Written through the context: a generator would be left hanging when its call is cancelled.
        """
        with request_span(self._router, context):
            accepted = accept(self._router, request.request, context, is_stream=True)
            stream = AnswerStream(context)
            async with stream.ending():
                await stream.send(await Handler(self._router, accepted, stream).serve())

    async def CancelRequest(
        self,
        request: pb.CancelRequestRequest,
        context: grpc.aio.ServicerContext[pb.CancelRequestRequest, pb.CancelRequestResponse],
    ) -> pb.CancelRequestResponse:
        """Ends a request that runs here; of others says where they are."""
        findings, requests = Findings(), self._router.requests
        check_request_id(request.request_id, findings)
        findings.raise_any()
        name = request.request_id
        tenant = self._router.tenant().name
        if requests.cancel(name, tenant):
            return pb.CancelRequestResponse(request_id=name, was_running=True)
        found = requests.find(name, tenant) or await requests.find_stored(name, tenant)
        return pb.CancelRequestResponse(request_id=name, state=found.state, router=found.router)

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Where a request is, or how it ended, with its answer while that is kept; of other routers
        what Redis knows."""
        findings = Findings()
        check_request_id(request.request_id, findings)
        findings.raise_any()
        requests = self._router.requests
        tenant = self._router.tenant().name  # nobody reads another's answer
        known = requests.find(request.request_id, tenant)
        found = known or await requests.find_stored(request.request_id, tenant)
        return await requests.add_answer(found)


def request_span(
    router: Router, context: grpc.aio.ServicerContext[Sent, Response]
) -> AbstractContextManager[None]:
    """A request's own span, within that of its client if there is one; whichever service it came
    by."""
    return router.traces.span("generate", context.invocation_metadata() or ())
