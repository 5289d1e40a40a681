"""A client without a router: it opens both legs of one request itself.

It uses the workers' own protocol with token ids and resolved settings. It saves the hop, and text,
admission, choice, placement and retries.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import cast

import grpc.aio

from effuse.v1 import worker_pb2, worker_pb2_grpc

DEADLINE_S = 20.0


class DirectClient:
    """One prefill and one decode worker, called without a router."""

    def __init__(self, prefill_address: str, decode_address: str) -> None:
        self._prefill_channel = grpc.aio.insecure_channel(prefill_address)
        self._decode_channel = grpc.aio.insecure_channel(decode_address)
        self._prefill = cast(
            "worker_pb2_grpc.PrefillServiceAsyncStub",
            worker_pb2_grpc.PrefillServiceStub(self._prefill_channel),
        )
        self._decode = cast(
            "worker_pb2_grpc.DecodeServiceAsyncStub",
            worker_pb2_grpc.DecodeServiceStub(self._decode_channel),
        )
        self._prefill_ref = worker_pb2.WorkerRef()
        self._decode_ref = worker_pb2.WorkerRef()

    async def connect(self) -> None:
        """Finds the workers."""
        self._prefill_ref = await _worker(self._prefill_channel)
        self._decode_ref = await _worker(self._decode_channel)

    async def close(self) -> None:
        """Closes both channels."""
        await self._prefill_channel.close()
        await self._decode_channel.close()

    async def generate(self, prompt: tuple[int, ...], max_tokens: int) -> int:
        """Tokens of the answer. Raises grpc.RpcError if a leg fails."""
        name = uuid.uuid4().hex
        attempt = worker_pb2.AttemptId(request_id=name, attempt=1, transfer_id=name)
        reserved: asyncio.Future[worker_pb2.Reservation] = asyncio.Future()
        async with asyncio.TaskGroup() as legs:
            legs.create_task(self._push(attempt, prompt, reserved))
            tokens = legs.create_task(self._answer(attempt, prompt, max_tokens, reserved))
        return tokens.result()

    async def _answer(
        self,
        attempt: worker_pb2.AttemptId,
        prompt: tuple[int, ...],
        max_tokens: int,
        reserved: asyncio.Future[worker_pb2.Reservation],
    ) -> int:
        request = worker_pb2.DecodeRequest(
            attempt=attempt,
            incarnation=self._decode_ref.incarnation,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=worker_pb2.DecodeSampling(top_p=1.0),
            settings=_SETTINGS,
            remote=self._prefill_ref,
        )
        tokens = 0
        async for response in self._decode.Decode(request, timeout=DEADLINE_S):
            if response.HasField("reservation"):
                reserved.set_result(response.reservation)
            for event in (response, *response.then):
                if event.HasField("finished"):
                    tokens = event.finished.num_tokens
        return tokens

    async def _push(
        self,
        attempt: worker_pb2.AttemptId,
        prompt: tuple[int, ...],
        reserved: asyncio.Future[worker_pb2.Reservation],
    ) -> None:
        async def send() -> AsyncIterator[worker_pb2.PrefillRequest]:
            yield worker_pb2.PrefillRequest(
                start=worker_pb2.PrefillStart(
                    attempt=attempt,
                    prompt_token_ids=prompt,
                    incarnation=self._prefill_ref.incarnation,
                )
            )
            yield worker_pb2.PrefillRequest(reservation=await reserved)

        async for _ in self._prefill.Prefill(send(), timeout=DEADLINE_S):
            pass


# Every candidate passes: a block is one forward, so that almost only the path is measured.
CONFIDENCE_THRESHOLD = 0.0

_SETTINGS = worker_pb2.DecodeSettings(
    algorithm="d2f",
    window=4,
    confidence_threshold=CONFIDENCE_THRESHOLD,
    block_add_threshold=0.1,
    full_activation_threshold=0.95,
    score="confidence",
    remasking="low_confidence_dynamic",
    denoising_steps=16,
)


async def _worker(channel: grpc.aio.Channel) -> worker_pb2.WorkerRef:
    stub = cast(
        "worker_pb2_grpc.WorkerServiceAsyncStub", worker_pb2_grpc.WorkerServiceStub(channel)
    )
    load = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=DEADLINE_S)
    return load.worker
