"""`effuse generate`: sends prompts or the turns of a chat to a running fleet, and prints answers.

Text goes to standard output as soon as it is final; other answers to a prompt follow the first. If
there are several answers, each has a heading; `--json` prints one object per line, for programs.
Figures and errors go to standard error.
"""

import argparse
import json
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice

from rich.console import Console

from effuse.cli.arguments import (
    add_knobs,
    add_router,
    calling,
    command,
    credentials_of,
    file,
    params_from,
    requests_to,
    seconds,
    text,
    token_ids,
)
from effuse.cli.streams import read_standard_input, read_text
from effuse.cli.watch import watch
from effuse.client.answer import Answer, Event
from effuse.client.chat import Chat, to_json
from effuse.client.client import Client
from effuse.client.credentials import Credentials
from effuse.client.params import Params, Prompt, make_request
from effuse.client.streams import Stream
from effuse.config.decoding import SettingError
from effuse.config.flags import CommandError
from effuse.protos.channels import fields_of

_LOOK_S = 0.2  # seconds between checks for Ctrl-C while a chat waits
_FIELDS = (
    *("text", "finish_reason", "stopped_by", "request_id", "model", "seed", "token_ids"),
    *("first_block_s", "total_s"),
)


class GenerateJob(argparse.Namespace):
    """The values of the flags, and what follows from them."""

    target: str
    timeout: float
    watch: bool
    stats: bool
    json: bool
    request_id: str | None

    prompts: tuple[Prompt, ...]  # the first turns of a chat, all of them text
    begun: Chat | None  # the beginning of a chat; None if each prompt is independent
    params: Params
    credentials: Credentials


def main(argv: Sequence[str]) -> int:
    job = parse(argv)
    run(job)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("generate", "Send prompts to a running fleet and print the answers.")
    add = parser.add_argument
    add("prompt", nargs="*", type=text, metavar="PROMPT",
        help="text to continue; - or no prompt reads standard input")  # fmt: skip
    add("--file", action="append", type=file, default=[], metavar="FILE",
        help="read a prompt from a UTF-8 file; a byte-order mark is left out")  # fmt: skip
    add("--ids", action="append", type=token_ids, default=[], metavar="ID,ID,..",
        help="prompt as token ids")  # fmt: skip
    add("--chat", action="store_true",
        help="chat; the user's turns are the prompts, then lines of standard input")  # fmt: skip
    add("--system", type=text, metavar="TEXT", help="system message at the beginning of a chat")
    add("--template-argument", action="append", type=_argument, default=[], metavar="NAME=JSON",
        help="variable for the chat template, such as enable_thinking=false")  # fmt: skip
    add("--watch", action="store_true", help="show the blocks while they are denoised")
    add("--stats", action="store_true", help="print the figures of each answer to standard error")
    add("--json", action="store_true",
        help="print each answer with its figures as one line of JSON (default: as text, with a "
        "heading if there are several)")  # fmt: skip
    add("--timeout", type=seconds, default=120.0, metavar="S",
        help="longest time for one prompt, in seconds (default: 120)")  # fmt: skip
    add("--request-id", type=text, metavar="ID",
        help="id of the request; only with one prompt (default: a new one)")  # fmt: skip
    add_knobs(parser)
    add_router(parser)
    return parser


def parse(argv: Sequence[str]) -> GenerateJob:
    """The job from the flags; exits with status 2 on bad ones."""
    parser = make_parser()
    job: GenerateJob = parser.parse_args(argv, GenerateJob())
    job.prompts = tuple(_prompts(parser, job))
    _check(parser, job)
    chat = Chat(template_arguments=dict(job.template_argument)) if job.chat else None
    job.begun = chat.system(job.system) if chat is not None and job.system else chat
    job.params = params_from(parser, job)
    job.credentials = credentials_of(parser, job)
    return job


def _argument(given: str) -> tuple[str, object]:
    name, equals, value = text(given).partition("=")
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = value  # text needs no quotes
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {given!r}")
    try:
        to_json({name: found}, name)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, found


def _check(parser: argparse.ArgumentParser, job: GenerateJob) -> None:
    """Exits with status 2 if flags contradict each other."""
    if job.json and job.watch:
        parser.error("--json: expected without --watch")
    if job.chat and (job.n or 1) > 1:
        parser.error(f"--n: expected 1 with --chat, which continues a single answer, got {job.n}")
    if job.chat and job.ids:
        parser.error("--ids: expected text with --chat, got ids")
    if not job.chat and (job.system or job.template_argument):
        parser.error("--system, --template-argument: expected together with --chat")
    if job.request_id is not None and (job.chat or len(job.prompts) > 1):
        got = "a chat" if job.chat else len(job.prompts)
        parser.error(f"--request-id: expected one prompt, got {got}")


def _prompts(parser: argparse.ArgumentParser, found: argparse.Namespace) -> list[Prompt]:
    """The prompts in the typed order: text, files, ids; text that is not UTF-8 ends the command."""
    try:
        typed = [read_standard_input() if one == "-" else one for one in found.prompt]
        prompts: list[Prompt] = [*typed, *map(read_text, found.file), *found.ids]
        if prompts or found.chat:
            return prompts
        if sys.stdin.isatty():
            parser.error("expected PROMPT, --file, --ids, --chat or text on standard input")
        return [read_standard_input()]
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run(job: GenerateJob) -> None:
    """Prints every answer. Raises CommandError."""
    with requests_to(job.target, job.credentials, job.timeout) as client:
        if job.begun is None:
            for at, prompt in enumerate(job.prompts):
                _show_answer(client, job, prompt, at)
            return
        chat = job.begun
        for at, turn in enumerate(_turns(job.prompts)):
            asked = chat.user(turn)
            try:
                answer = _show_answer(client, job, asked, at)
            except CommandError as error:
                if not sys.stdin.isatty():
                    raise
                # The user may try again; earlier turns stay.
                print(f"effuse generate: {error}", file=sys.stderr)
            else:
                chat = asked.assistant(answer.text)


def _turns(first: Iterable[Prompt]) -> Iterator[str]:
    """The user's turns: `first`, then each line of standard input that is not blank."""
    yield from map(str, first)
    while line := _read_line():
        try:
            turn = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            print("effuse generate: expected UTF-8 text, not sent", file=sys.stderr)
            continue
        if turn.strip():
            yield turn


def _read_line() -> bytes:
    """Empty at the end."""
    if not sys.stdin.isatty():
        return sys.stdin.buffer.readline()
    line = b""
    try:
        print("> ", end="", file=sys.stderr, flush=True)
        # A thread of gRPC may receive Ctrl-C, and a read would not notice it.
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            pass
        line = sys.stdin.buffer.readline()
    finally:
        if not line.endswith(b"\n"):  # Ctrl-C or Ctrl-D
            print(file=sys.stderr)
    return line


def _show_answer(client: Client, job: GenerateJob, prompt: Prompt, at: int) -> Answer:
    """Prints the answers to the prompt with index `at` of the job, or to a turn of its chat."""
    wants_ids = job.json or job.params.logprobs is not None
    request = make_request(
        prompt,
        job.params,
        request_id=job.request_id,
        token_ids=wants_ids,
        drafts=job.watch,
        prompt_progress=job.watch,
    )
    names = answer_names(1 if job.chat else len(job.prompts), job.params.n or 1, at)
    with calling(job.target, has_answered=True):
        stream = client.stream_of(request)
        answer = stream.answer if job.json else _print_answers(stream, job, names)
    if job.json:
        print("\n".join(json_lines(answer, at)), flush=True)
    for name, one in zip(names, answer.answers, strict=False):
        for line in logprob_lines(one):
            print(line, file=sys.stderr)
        if job.stats:
            text = figures(one, None if one is answer else answer)
            print(f"{name}: {text}" if name else text, file=sys.stderr)
    return answer


def _print_answers(stream: Stream, job: GenerateJob, names: Sequence[str]) -> Answer:
    """Prints the first answer while it grows, then the others, each under its name."""
    begun = [*islice(stream.events(), 1)]  # a request that is refused has no heading
    _print_heading(names[0])
    if job.watch:
        with watch(Console(), indent=0) as show:
            answer = follow(stream, show, begun)
    else:
        answer = _follow_text(stream, begun)
    for name, other in zip(names[1:], answer.others, strict=False):
        _print_heading(name)
        print(other.text)
    return answer


def _follow_text(stream: Stream, begun: Iterable[Event]) -> Answer:
    """Prints the text while it grows. Its line ends, whatever ends the stream."""
    end = "\n"  # of the text so far

    def show(event: Event) -> None:
        nonlocal end
        text = event.echo.text if event.HasField("echo") else event.commit.text
        print(text, end="", flush=True)
        end = text[-1:] or end

    try:
        answer = follow(stream, show, begun)
        end = ""  # a whole answer gets a line end in any case
        return answer
    finally:
        if end != "\n":
            print()


def _print_heading(name: str) -> None:
    if name:
        print(f"--- {name} ---", flush=True)


def answer_names(prompts: int, answers: int, at: int) -> list[str]:
    """The names of the answers to prompt `at`; empty texts if only one answer is printed."""
    prompt = [f"prompt {at + 1} of {prompts}"] if prompts > 1 else []
    each = [[f"answer {one + 1} of {answers}"] if answers > 1 else [] for one in range(answers)]
    return [", ".join([*prompt, *name]) for name in each]


def json_lines(answer: Answer, at: int) -> list[str]:
    """A JSON object for each answer to prompt `at`, with the field names of `Answer`; `prompt` is
    its index, and `echo` its text."""
    lines = []
    for index, one in enumerate(answer.answers):
        values = {name: getattr(one, name) for name in _FIELDS}
        values |= {"usage": fields_of(one.usage), "stats": asdict(one.stats)}
        values |= {"logprobs": [asdict(each) for each in one.logprobs]} if one.logprobs else {}
        values |= {} if answer.prompt is None else {"echo": answer.prompt}
        lines.append(json.dumps({"prompt": at, "answer": index, **values}))
    return lines


def follow(stream: Stream, show: Callable[[Event], None], begun: Iterable[Event] = ()) -> Answer:
    """The answer; `show` gets every event of the first one as it arrives, because mixed answers are
    unreadable. `begun`: events that the caller has read. Raises EffuseError and StreamBroken."""
    for event in chain(begun, stream.events()):
        if not event.answer_index:
            show(event)
    return stream.answer


def logprob_lines(answer: Answer) -> list[str]:
    return [
        f"{token:>7} {one.logprob:9.4f}" + "".join(f"  {i}: {own:.4f}" for i, own in one.top)
        for token, one in zip(answer.token_ids, answer.logprobs, strict=False)
    ]


def figures(answer: Answer, first: Answer | None = None) -> str:
    """The figures of one answer, on one line. `first` is the answer that counts their common
    prompt, if that is another one."""
    stats, usage = answer.stats, answer.usage
    counted = usage if first is None else first.usage
    cached = (first or answer).stats.cached_prompt_tokens
    prompt = f"{counted.prompt_tokens} prompt tokens, {cached} of them cached"
    moved = f"{stats.kv_bytes:,} KV bytes over {stats.connector}" if stats.connector else "no KV"
    return (
        f"{prompt if first is None else f'the same {prompt}'}, queued for "
        f"{stats.queue_s * 1e3:.0f} ms, prompt ready after {stats.prefill_s * 1e3:.0f} ms, first "
        f"block after {answer.first_block_s * 1e3:.0f} ms, {usage.completion_tokens} tokens in "
        f"{stats.forward_passes} forward passes ({stats.tokens_per_forward:.1f} each), {moved} "
        f"handed over, {answer.total_s * 1e3:.0f} ms in all, seed {answer.seed}"
    )
