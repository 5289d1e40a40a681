"""`effuse generate`: sends prompts to a running fleet and prints the answers.

Text goes to standard output as it becomes final; figures and errors go to standard error. `ask`,
which sends one request and shows each of its events, also serves the demo and `bench`.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from effuse.cli.arguments import command, is_unicode, seconds, target, text
from effuse.cli.knobs import add_knobs, params_from
from effuse.cli.watch import watch
from effuse.client.answer import Answer, Event, Gathering, StreamBroken
from effuse.client.options import DEFAULT_TARGET
from effuse.client.params import Params, make_request
from effuse.protos.rpc import connect
from effuse.protos.stubs import generation_stub
from effuse.v1 import generation_pb2

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What to ask for, and how to show it."""

    prompts: tuple[str, ...]
    params: Params
    target: str
    timeout_s: float
    watch: bool
    stats: bool
    request_id: str | None


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    job = parse(argv)
    try:
        asyncio.run(run(job))
    except grpc.aio.AioRpcError as error:
        print(f"effuse generate: {explain(error)}", file=sys.stderr)
        return 1
    except StreamBroken as error:
        print(f"effuse generate: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str]) -> GenerateJob:
    """The job that the flags describe; exits with status 2 on bad ones."""
    parser = command("generate", "Send prompts to a running fleet and print the answers.")
    add = parser.add_argument
    add(
        "prompt",
        nargs="+",
        type=text,
        metavar="PROMPT",
        help="text to answer; - reads standard input",
    )
    add("--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router")
    add("--watch", action="store_true", help="show the blocks as they are denoised")
    add("--stats", action="store_true", help="print each answer's figures to standard error")
    add("--timeout", type=seconds, default=120.0, metavar="S",
        help="longest a prompt may take (default: 120)")  # fmt: skip
    add("--request-id", type=text, metavar="ID", help="id of the request; for one prompt only")
    add_knobs(parser)
    return _job(parser, parser.parse_args(argv))


def _job(parser: argparse.ArgumentParser, found: argparse.Namespace) -> GenerateJob:
    prompts = tuple(_read_input(parser) if one == "-" else one for one in found.prompt)
    if found.request_id is not None and len(prompts) > 1:
        parser.error(f"--request-id: expected one prompt, got {len(prompts)}")
    return GenerateJob(
        prompts=prompts,
        params=params_from(found),
        target=found.target,
        timeout_s=found.timeout,
        watch=found.watch,
        stats=found.stats,
        request_id=found.request_id,
    )


def _read_input(parser: argparse.ArgumentParser) -> str:
    given = "\udcff"  # as bytes arrive that are no text
    with contextlib.suppress(UnicodeDecodeError):
        given = sys.stdin.read()
    if not is_unicode(given):
        parser.error("argument PROMPT: expected UTF-8 text on standard input")
    return given


async def run(job: GenerateJob) -> None:
    """Ask for the prompts, one after the other."""
    async with connect(job.target, keepalive=None) as channel:
        stub = generation_stub(channel)
        for prompt in job.prompts:
            request = make_request(prompt, job.params, request_id=job.request_id, drafts=job.watch)
            if job.watch:
                with watch(Console(), indent=0) as show:
                    answer = await ask(stub, request, timeout_s=job.timeout_s, on_event=show)
            else:
                answer = await ask(stub, request, timeout_s=job.timeout_s, on_event=_print_text)
                print()
            if job.stats:
                print(figures(answer), file=sys.stderr)


def _ignore(_: Event) -> None:
    return


async def ask(
    stub: "GenerationServiceAsyncStub",
    request: generation_pb2.GenerateRequest,
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] = _ignore,
) -> Answer:
    """Send `request` and gather its answer; `on_event` sees every event as it comes.

    Raises grpc.aio.AioRpcError with the server's status, and StreamBroken.
    """
    gathering = Gathering()
    async for event in stub.GenerateStream(request, timeout=timeout_s):
        on_event(event)
        gathering.take(event)
    return gathering.answer(request.request_id)


def _print_text(event: Event) -> None:
    if event.HasField("commit"):
        print(event.commit.text, end="", flush=True)


def figures(answer: Answer) -> str:
    """The figures of one answer, on one line."""
    stats = answer.stats
    moved = f"{stats.kv_bytes:,} KV bytes over {stats.connector}" if stats.connector else "no KV"
    return (
        f"{answer.usage.prompt_tokens} prompt tokens, first block after "
        f"{answer.first_block_s * 1e3:.0f} ms, {answer.usage.completion_tokens} tokens in "
        f"{stats.forward_passes} forward passes ({stats.tokens_per_forward:.1f} each), "
        f"{moved} handed over, {answer.total_s * 1e3:.0f} ms in all"
    )


def explain(error: grpc.aio.AioRpcError) -> str:
    """The status and its message on one line."""
    return f"{error.code().name}: {error.details() or 'no details'}"
