"""The least that a hop costs: a server of the public service that only opens a request's two calls.

It has no text, admission, choice, placement, deadlines, retries or metrics.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

import grpc.aio
import uvloop

from effuse.benchmarks.direct import DirectClient
from effuse.v1 import generation_pb2 as pb


@contextmanager
def running(prefill_address: str, decode_address: str) -> Iterator[str]:
    """A proxy in a process of its own, which ends afterwards; yields its address. Raises
    RuntimeError if it does not start."""
    command = [sys.executable, "-m", __name__, prefill_address, decode_address]
    with Popen(command, stdout=PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            if not (port := proxy.stdout.readline().strip()):
                raise RuntimeError("the proxy did not start")
            yield f"127.0.0.1:{port}"
        finally:
            proxy.kill()  # it holds nothing


async def _serve(prefill_address: str, decode_address: str) -> None:
    workers, server = DirectClient(prefill_address, decode_address), grpc.aio.server()
    await workers.connect()

    async def generate(request: pb.GenerateRequest, _: object) -> pb.GenerateResponse:
        prompt = tuple(request.prompt_token_ids.ids)
        num_tokens = await workers.generate(prompt, request.stopping.max_tokens)
        return pb.GenerateResponse(usage=pb.Usage(completion_tokens=num_tokens))

    handler = grpc.unary_unary_rpc_method_handler(
        generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    service = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Generate": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(*sys.argv[1:]))
