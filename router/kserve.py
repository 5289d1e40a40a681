"""KServe's inference service (Open Inference Protocol v2), for clients that know tensors.

Requests are handled like those of other clients. Not here: the meaning of its messages
(`kserve_requests.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version

from effuse.compat import kserve_pb2 as kserve
from effuse.compat import kserve_pb2_grpc
from effuse.protos.errors import Bug, Cancelled, EffuseError
from effuse.protos.rpc import Context
from effuse.router.catalogue import Catalogue
from effuse.router.client import AnswerStream, ClientGone
from effuse.router.findings import Findings, check_model_name
from effuse.router.handler import Serving
from effuse.router.kserve_requests import (
    answer_of,
    check_version,
    describe_tensors,
    piece_of,
    request_of,
)
from effuse.router.request import Request
from effuse.router.seats import Seats
from effuse.v1 import generation_pb2 as pb

InferStream = AnswerStream[kserve.ModelStreamInferResponse]


class TextStream:
    """Sends the text of answers as it grows, in KServe's terms."""

    def __init__(
        self, asked: kserve.ModelInferRequest, request: Request, stream: InferStream
    ) -> None:
        self._asked = asked
        self._model_name = request.asked.model.name
        self._stream = stream
        self._num_left = request.asked.num_answers

    async def send(self, event: pb.GenerateStreamResponse) -> None:
        """Sends new text, or the end of an answer; raises `ClientGone`."""
        self._num_left -= event.HasField("finished")
        if event.commit.text or event.HasField("finished"):
            is_last = not self._num_left
            await self._stream.send(piece_of(self._asked, event, self._model_name, is_last=is_last))


class InferenceServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """GRPCInferenceService."""

    def __init__(self, serving: Serving, seats: Seats, catalogue: Catalogue) -> None:
        self._serving = serving
        self._seats = seats
        self._catalogue = catalogue

    async def ServerLive(
        self, request: kserve.ServerLiveRequest, context: Context
    ) -> kserve.ServerLiveResponse:
        """A process that answers is live."""
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: kserve.ServerReadyRequest, context: Context
    ) -> kserve.ServerReadyResponse:
        """The same as gRPC's own health of this service."""
        return kserve.ServerReadyResponse(ready=self._seats.can_serve())

    async def ModelReady(
        self, request: kserve.ModelReadyRequest, context: Context
    ) -> kserve.ModelReadyResponse:
        """Whether a request for the model could be placed; an unknown model is not ready either."""
        _check_model(request.name, request.version)
        return kserve.ModelReadyResponse(ready=self._seats.can_serve(request.name))

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        """The name and version of the server."""
        return kserve.ServerMetadataResponse(name="effuse", version=version("effuse"))

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        """A model's tensors; raises `NotFound` and `Unavailable`."""
        _check_model(request.name, request.version)
        return describe_tensors(self._catalogue.find(request.name).name)

    async def ModelInfer(
        self, request: kserve.ModelInferRequest, context: Context
    ) -> kserve.ModelInferResponse:
        """The whole answer, or all answers, at the end."""
        answer = await self._serving.answer(lambda: request_of(request), context)
        return answer_of(request, answer)

    async def ModelStreamInfer(  # type: ignore[override]  # the stub knows only generators
        self,
        request_iterator: AsyncIterator[kserve.ModelInferRequest],
        context: Context,
    ) -> None:
        """Answers one request after the other, until the client has no more. An error of a request
        goes into the stream, according to the protocol; a fault of ours ends the stream."""
        # Waits for requests without a deadline by intent: the client's own ends it.
        async for request in request_iterator:
            stream = InferStream(context)
            try:
                await self._serving.stream(
                    partial(request_of, request), context, stream,
                    partial(TextStream, request, stream=stream),
                )  # fmt: skip
            except (Bug, Cancelled):
                raise
            except EffuseError as error:
                await _tell_failure(stream, request, error)


def _check_model(name: str, model_version: str) -> None:
    findings = Findings()
    check_model_name(name, "name", findings)
    findings.raise_any()
    check_version(model_version)


async def _tell_failure(
    stream: InferStream, request: kserve.ModelInferRequest, error: EffuseError
) -> None:
    told = kserve.ModelStreamInferResponse(
        error_message=f"{error.code.name}: {error.message}",
        infer_response=kserve.ModelInferResponse(id=request.id),
    )
    try:
        await stream.send(told)
    except ClientGone as gone:
        raise Cancelled("the client cancelled") from gone
