"""`effuse generate`: sends prompts, or a chat turn by turn, to a running fleet and prints answers.

Text goes to standard output as it becomes final, of several answers the first one's, and the others
behind it; figures and errors go to standard error. `ask`, which sends one request and shows each of
its events, also serves the demo and `bench`.
"""

import argparse
import asyncio
import contextlib
import json
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from effuse.cli.arguments import (
    add_credentials,
    command,
    credentials_of,
    file,
    is_unicode,
    seconds,
    target,
    text,
    token_ids,
    with_hint,
)
from effuse.cli.knobs import add_knobs, params_from
from effuse.cli.watch import watch
from effuse.client.answer import Answer, Event, Gathering, StreamBroken
from effuse.client.chat import Chat
from effuse.client.credentials import Credentials
from effuse.client.options import DEFAULT_TARGET
from effuse.client.params import Params, Prompt, make_request
from effuse.protos.rpc import CALLER_KEEPALIVE, FLEET_LIMITS, channel_options
from effuse.protos.stubs import generation_stub
from effuse.v1 import generation_pb2

if TYPE_CHECKING:
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_LOOK_S = 0.2  # between looks at whether Ctrl-C came while a chat waits


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """What to ask for, and how to show it."""

    prompts: tuple[Prompt, ...]  # of a chat: the first turns, all text
    chat: Chat | None  # what a chat begins with; None where each prompt stands for itself
    params: Params
    target: str
    credentials: Credentials
    timeout_s: float
    watch: bool
    stats: bool
    request_id: str | None


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    job = parse(argv)
    try:
        asyncio.run(run(job))
    except (grpc.aio.AioRpcError, StreamBroken) as error:
        _report(error)
        return 1
    return 0


def _report(error: grpc.aio.AioRpcError | StreamBroken) -> None:
    told = explain(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
    print(f"effuse generate: {told}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command("generate", "Send prompts to a running fleet and print the answers.")
    add = parser.add_argument
    add("prompt", nargs="*", type=text, metavar="PROMPT",
        help="text to go on with; - reads standard input, as does no prompt at all")  # fmt: skip
    add("--file", action="append", type=file, default=[], metavar="FILE",
        help="take a prompt from a file")  # fmt: skip
    add("--ids", action="append", type=token_ids, default=[], metavar="ID,ID,..",
        help="take a prompt as token ids")  # fmt: skip
    add("--chat", action="store_true",
        help="a chat: prompts, then lines of standard input, are what the user says")  # fmt: skip
    add("--system", type=text, metavar="TEXT", help="what a chat begins with")
    add("--template-argument", action="append", type=_argument, default=[], metavar="NAME=JSON",
        help="variable for a chat's template, as in enable_thinking=false")  # fmt: skip
    add("--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router")
    add("--watch", action="store_true", help="show the blocks as they are denoised")
    add("--stats", action="store_true", help="print each answer's figures to standard error")
    add("--timeout", type=seconds, default=120.0, metavar="S",
        help="longest a prompt may take (default: 120)")  # fmt: skip
    add("--request-id", type=text, metavar="ID",
        help="id of the request; for one prompt only (default: a new one)")  # fmt: skip
    add_knobs(parser)
    add_credentials(parser)
    return parser


def parse(argv: Sequence[str]) -> GenerateJob:
    """The job that the flags describe; exits with status 2 on bad ones."""
    parser = make_parser()
    return _job(parser, parser.parse_args(argv))


def _argument(given: str) -> tuple[str, object]:
    name, equals, value = text(given).partition("=")
    try:
        found = json.loads(value)
    except ValueError:
        found = value  # text need not be quoted
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {given!r}")
    return name, found


def _job(parser: argparse.ArgumentParser, found: argparse.Namespace) -> GenerateJob:
    typed = [_read_input(parser) if one == "-" else one for one in found.prompt]
    prompts: list[Prompt] = [*typed, *(_read(parser, path) for path in found.file), *found.ids]
    if not (found.chat or prompts):
        if sys.stdin.isatty():
            parser.error("expected PROMPT, --file, --ids, --chat or text on standard input")
        prompts = [_read_input(parser)]
    if found.chat and (found.n or 1) > 1:
        parser.error(f"--n: expected 1 with --chat, which goes on with one answer, got {found.n}")
    if found.chat and found.ids:
        parser.error("--ids: expected text with --chat, got ids")
    if not found.chat and (found.system or found.template_argument):
        parser.error("--system, --template-argument: expected --chat with them, got none")
    if found.request_id is not None and (found.chat or len(prompts) > 1):
        got = "a chat" if found.chat else len(prompts)
        parser.error(f"--request-id: expected one prompt, got {got}")
    chat = Chat(template_arguments=dict(found.template_argument)) if found.chat else None
    return GenerateJob(
        prompts=tuple(prompts),
        chat=chat.system(found.system) if chat is not None and found.system else chat,
        params=params_from(found),
        target=found.target,
        credentials=credentials_of(parser, found),
        timeout_s=found.timeout,
        watch=found.watch,
        stats=found.stats,
        request_id=found.request_id,
    )


def _read(parser: argparse.ArgumentParser, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"argument --file: expected UTF-8 text in {path}: {error}")


def _read_input(parser: argparse.ArgumentParser) -> str:
    given = "\udcff"  # as bytes arrive that are no text
    with contextlib.suppress(UnicodeDecodeError):
        given = sys.stdin.read()
    if not is_unicode(given):
        parser.error("argument PROMPT: expected UTF-8 text on standard input")
    return given


async def run(job: GenerateJob) -> None:
    """Ask for the prompts, one after the other, or for the answers of a chat."""
    options = channel_options(CALLER_KEEPALIVE, FLEET_LIMITS.max_message_bytes)
    async with job.credentials.aio_channel(job.target, options) as channel:
        stub = generation_stub(channel)
        if job.chat is None:
            for prompt in job.prompts:
                await _show_answer(stub, job, prompt)
            return
        chat = job.chat
        for said in _turns(job.prompts):
            asked = chat.user(said)
            try:
                answer = await _show_answer(stub, job, asked)
            except (grpc.aio.AioRpcError, StreamBroken) as error:
                if not sys.stdin.isatty():
                    raise
                _report(error)  # a person may ask otherwise; what was said before stays
            else:
                chat = asked.assistant(answer.text)


def _turns(first: Iterable[Prompt]) -> Iterator[str]:
    """What the user says: `first`, then each line of standard input that says something."""
    yield from map(str, first)
    while line := _read_line():
        if not is_unicode(line):
            print("effuse generate: expected UTF-8 text, not sent", file=sys.stderr)
        elif line.strip():
            yield line.rstrip("\r\n")


def _read_line() -> str:
    """Blocks; nothing else has to go on meanwhile. Empty at the end."""
    # asyncio's handler would have the task end at its next await, which a read is not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
            # A thread of gRPC may be given the signal, of which a read would not hear.
            while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
                pass
        return sys.stdin.readline()
    except UnicodeDecodeError:
        return "\udcff"
    finally:
        signal.signal(signal.SIGINT, before)


async def _show_answer(
    stub: "GenerationServiceAsyncStub", job: GenerateJob, prompt: Prompt
) -> Answer:
    wants_ids = job.params.logprobs is not None
    request = make_request(
        prompt, job.params, request_id=job.request_id, token_ids=wants_ids, drafts=job.watch
    )
    if job.watch:
        with watch(Console(), indent=0) as show:
            answer = await ask(stub, request, timeout_s=job.timeout_s, on_event=_of_first(show))
    else:
        show_text = _of_first(_print_text)
        answer = await ask(stub, request, timeout_s=job.timeout_s, on_event=show_text)
        print()
    for other in answer.others:
        print(other.text)
    for one in answer.answers:
        for line in logprob_lines(one):
            print(line, file=sys.stderr)
        if job.stats:
            print(figures(one), file=sys.stderr)
    return answer


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
    async for event in stub.GenerateStream(
        generation_pb2.GenerateStreamRequest(request=request), timeout=timeout_s
    ):
        on_event(event)
        gathering.take(event)
    return gathering.answer()


def _of_first(show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Shows the first answer as it grows; others at once would be nobody's text."""
    return lambda event: None if event.answer_index else show(event)


def _print_text(event: Event) -> None:
    if event.HasField("echo"):
        print(event.echo.text, end="", flush=True)
    if event.HasField("commit"):
        print(event.commit.text, end="", flush=True)


def logprob_lines(answer: Answer) -> list[str]:
    """A line for each token: its id, its log-probability, and those of the likeliest ids."""
    return [
        f"{token:>7} {told.logprob:9.4f}" + "".join(f"  {i}: {own:.4f}" for i, own in told.top)
        for token, told in zip(answer.token_ids, answer.logprobs, strict=False)
    ]


def figures(answer: Answer) -> str:
    """The figures of one answer, on one line."""
    stats = answer.stats
    moved = f"{stats.kv_bytes:,} KV bytes over {stats.connector}" if stats.connector else "no KV"
    return (
        f"{answer.usage.prompt_tokens} prompt tokens, a seat after {stats.queue_s * 1e3:.0f} ms, "
        f"prompt computed after {stats.prefill_s * 1e3:.0f} ms, first block after "
        f"{answer.first_block_s * 1e3:.0f} ms, {answer.usage.completion_tokens} tokens in "
        f"{stats.forward_passes} forward passes ({stats.tokens_per_forward:.1f} each), "
        f"{moved} handed over, {answer.total_s * 1e3:.0f} ms in all, seed {answer.seed}"
    )


def explain(error: grpc.aio.AioRpcError) -> str:
    """The status and its message on one line, and which flags a router may ask for."""
    return with_hint(error.code(), error.details() or "no details")
