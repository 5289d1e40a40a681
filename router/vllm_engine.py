"""vLLM's engine service, for gateways that serve HTTP on top of one (SMG, sglang's router).

A gateway renders chats, encodes and decodes with the tokenizer that it gets here, and receives ids.
Requests are handled like those of other clients: checks, queue, placement, recovery. Not here: the
meaning of its messages (`vllm_requests.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from effuse.compat import vllm_engine_pb2 as engine
from effuse.compat import vllm_engine_pb2_grpc
from effuse.protos.errors import NotFound
from effuse.protos.rpc import Context
from effuse.router.admission import Admission
from effuse.router.catalogue import Catalogue
from effuse.router.client import AnswerStream, WholeAnswer
from effuse.router.fleet import RoutedFleet
from effuse.router.handler import Serving
from effuse.router.request import Request
from effuse.router.seats import Seats
from effuse.router.tokenizer import bundled_directory
from effuse.router.vllm_requests import chunk_of, complete_of, describe_model, request_of
from effuse.v1 import generation_pb2 as pb

TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "config.json", "generation_config.json",
)  # fmt: skip
PIECE_BYTES: Final = 1 << 20


class EngineAnswer:
    """Sends an answer in vLLM's terms: chunks if they are asked for, and last the end."""

    def __init__(
        self, request: Request, stream: AnswerStream[engine.GenerateResponse], *, is_stream: bool
    ) -> None:
        self._request = request
        self._stream = stream
        self._is_stream = is_stream
        self._whole = WholeAnswer()

    async def send(self, event: pb.GenerateStreamResponse) -> None:
        """Sends new tokens, or the end of an answer; raises `ClientGone`. Text is the gateway's own
        matter."""
        self._whole.take(event)
        request = self._request
        prompt_tokens = len(request.prompt.token_ids) or request.kept_prompt_tokens or 0
        if event.HasField("finished"):
            answer = self._whole.one(event.answer_index)
            await self._stream.send(complete_of(answer, event.answer_index, prompt_tokens))
        elif self._is_stream and event.commit.token_ids:
            await self._stream.send(chunk_of(event, prompt_tokens))


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """VllmEngine."""

    def __init__(
        self,
        serving: Serving,
        seats: Seats,
        catalogue: Catalogue,
        admission: Admission,
        fleet: RoutedFleet,
        directory: Path | None,
    ) -> None:
        """directory: that of the tokenizer, None for the bundled one."""
        self._serving = serving
        self._seats = seats
        self._catalogue = catalogue
        self._admission = admission
        self._fleet = fleet
        self._directory = directory or bundled_directory()
        self._began = time.monotonic()
        self._archive: bytes | None = None

    async def Generate(  # type: ignore[override]  # the stub knows only generators
        self,
        request: engine.GenerateRequest,
        context: Context,
    ) -> None:
        """The answer as it grows, or at its end."""
        stream = AnswerStream[engine.GenerateResponse](context)
        await self._serving.stream(
            lambda: request_of(request, self._serving.parts.tokenizer.chat_end_ids),
            context,
            stream,
            lambda accepted: EngineAnswer(accepted, stream, is_stream=request.stream),
            is_stream=request.stream,
        )

    async def Abort(self, request: engine.AbortRequest, context: Context) -> engine.AbortResponse:
        """Ends what runs here of these requests, as far as they are the caller's own."""
        tenant = self._serving.entrance.tenant().name
        for request_id in request.request_ids:
            self._serving.parts.requests.cancel(request_id, tenant)
        return engine.AbortResponse()

    async def HealthCheck(
        self, request: engine.HealthCheckRequest, context: Context
    ) -> engine.HealthCheckResponse:
        """The same as gRPC's own health of this service; raises `Unavailable` as long as no model
        is known, so that a gateway asks again before it asks for one."""
        self._catalogue.find(None)
        healthy = self._seats.can_serve()
        why = "" if healthy else "no live worker can accept a request"
        return engine.HealthCheckResponse(healthy=healthy, message=why)

    async def GetModelInfo(
        self, request: engine.GetModelInfoRequest, context: Context
    ) -> engine.GetModelInfoResponse:
        """The one model of the fleet; raises `Unavailable`, and `InvalidRequest` if it has more."""
        return describe_model(self._catalogue.find(None))

    async def GetServerInfo(
        self, request: engine.GetServerInfoRequest, context: Context
    ) -> engine.GetServerInfoResponse:
        """This router, described like one engine."""
        return engine.GetServerInfoResponse(
            active_requests=self._serving.parts.requests.num_running,
            uptime_seconds=time.monotonic() - self._began,
            server_type="effuse",
            data_parallel_size=1,
            max_num_seqs=self._admission.max_running,
        )

    async def GetLoads(
        self, request: engine.GetLoadsRequest, context: Context
    ) -> engine.GetLoadsResponse:
        """Requests of this router, pages of the fleet's decode workers."""
        admission = self._admission
        records = self._fleet.records()
        decode = [record for record in records if record.role == "decode"]
        most = sum(one.capacity.total_pages * one.capacity.page_size for one in decode)
        free = sum(one.load.free_pages * one.capacity.page_size for one in decode)
        load = engine.SchedulerLoad(
            num_running_reqs=admission.num_running,
            num_waiting_reqs=admission.num_waiting,
            num_total_reqs=admission.num_running + admission.num_waiting,
            num_used_tokens=most - free,
            max_total_num_tokens=most,
            token_usage=(most - free) / most if most else 0.0,
            max_running_requests=admission.max_running,
        )
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version("effuse"),
            dp_rank_count=1, loads=[load],
        )  # fmt: skip

    async def GetTokenizer(
        self, request: engine.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[engine.GetTokenizerChunk]:
        """The tokenizer's files, zipped once. Raises `NotFound` if they are gone."""
        if self._archive is None:
            self._archive = await asyncio.to_thread(archive, self._directory)
        whole = self._archive
        for at in range(0, len(whole), PIECE_BYTES):
            is_last = at + PIECE_BYTES >= len(whole)
            yield engine.GetTokenizerChunk(
                data=whole[at : at + PIECE_BYTES],
                sha256=hashlib.sha256(whole).hexdigest() if is_last else "",
            )


def archive(directory: Path) -> bytes:
    """The files of a checkpoint that its tokenizer needs, in a zip archive; equal files make equal
    bytes. Raises `NotFound`."""
    there = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not there:
        raise NotFound("the tokenizer's files have been moved or removed")
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in there:
            zipped.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return held.getvalue()
