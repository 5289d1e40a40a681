"""`effuse generate`: prompts from arguments, files and standard input, and chats that go on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import router.fakes
from router.fake_model import ANSWER, PROMPT, ids_of
from router.fakes import FakeFleet

from effuse.cli import generate
from effuse.cli.generate import answer_names, figures, parse
from effuse.client.answer import Answer, StreamBroken
from effuse.client.chat import Chat
from effuse.client.streams import Stream
from effuse.config.flags import CommandError
from effuse.v1 import generation_pb2 as pb


class Piped(io.TextIOWrapper):
    """Standard input in a plain locale, which changes line ends as text."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")


class Terminal(Piped):
    """Standard input with a person behind it."""

    def isatty(self) -> bool:
        return True


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b"from a file"))
    assert parse(["typed", "-"]).prompts == ("typed", "from a file")


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (b"a\r\nb\rc\n\x00\x85\r\n", None),
        ("\u00e9\u2028\u00a0\U0001f600".encode(), "\u00e9\u2028\u00a0\U0001f600"),
        (b"\xef\xbb\xbfa\xef\xbb\xbf", "a\ufeff"),
        (b"a\r\n\r\n", "a\r\n\r\n"),
        (b"\xff\xfea\x00", None),
    ],
)
def test_text_is_taken_as_its_bytes_are(
    held: bytes,
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A byte-order mark at the beginning is dropped; other encodings are refused in one line."""
    (tmp_path / "prompt").write_bytes(held)
    for words in (["--file", str(tmp_path / "prompt")], ["-"], []):
        monkeypatch.setattr(sys, "stdin", Piped(held))
        if text is not None:
            assert parse(words).prompts == (text,)
            continue
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 2
        line, hint = capsys.readouterr().err.splitlines()
        assert "expected UTF-8 text" in line and hint == "try 'effuse generate --help'"


def test_other_bytes_on_standard_input_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b"a\xff"))
    with pytest.raises(SystemExit) as ended:
        parse(["-"])
    assert ended.value.code == 2
    assert "expected UTF-8 text on standard input" in capsys.readouterr().err


def test_one_id_names_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["a", "b", "--request-id", "mine"])
    assert "--request-id: expected one prompt, got 2" in capsys.readouterr().err


def test_prompts_come_from_files_and_as_ids(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("é\n")
    job = parse(["typed", "--file", str(tmp_path / "prompt"), "--ids", "5,6"])
    assert job.prompts == ("typed", "é\n", [5, 6]) and job.begun is None


def test_without_a_prompt_standard_input_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b"piped"))
    assert parse([]).prompts == ("piped",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "expected PROMPT, --file, --ids, --chat or text on standard input"),
        (["--ids", "1,x"], "expected 0 to 4294967295, got 'x'"),
        (["--ids", "1,,2"], "expected ids with commas between them, got '1,,2'"),
        (["--ids", "1,-2"], "expected 0 to 4294967295, got -2"),
        (["--ids", "1", "--chat"], "--ids: expected text with --chat"),
        (["a", "--system", "b"], "expected together with --chat"),
        (["--chat", "--template-argument", "a b=1"], "expected NAME=JSON"),
        (["--chat", "--template-argument", "a"], "expected NAME=JSON"),
        (["--chat", "--request-id", "mine"], "expected one prompt, got a chat"),
        (["--chat", "--n", "2"], "--n: expected 1 with --chat"),
        (["a", "--n", "0"], "expected an integer from 1 to 64, got 0"),
        (["--file", __file__ + "c"], "expected a file"),
        (["--file", "latin"], "expected UTF-8 text in latin, got byte 0xe9 at 0"),
        (["--file", "."], "expected a file, got '.'"),
        (["a", "--json", "--watch"], "--json: expected without --watch"),
    ],
)
def test_what_does_not_fit_is_refused(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    monkeypatch.setattr(sys, "stdin", Terminal(b""))
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens: expected at most max_tokens 8"),
        (["--stop", "a", "--stop", "a"], "stop: expected different strings"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_at_once(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["hi", *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NaN", "1e999", "[" * 101 + "]" * 101, '"\\ud800"'])
def test_an_argument_that_no_request_holds_is_refused_at_once(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--chat", "hi", "--template-argument", f"a={value}"])
    assert ended.value.code == 2
    assert "a: expected values that JSON can express" in capsys.readouterr().err


def test_what_a_chat_begins_with() -> None:
    flags = ["--template-argument", "enable_thinking=false", "--template-argument", "style=terse"]
    job = parse(["--chat", "hi", "--system", "Be kind.", *flags])
    arguments = {"enable_thinking": False, "style": "terse"}
    assert job.begun == Chat(template_arguments=arguments).system("Be kind.")
    assert job.prompts == ("hi",)


def test_a_chat_keeps_its_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(b"\n\xff\nand\r\n"))
    monkeypatch.setattr("effuse.cli.generate.select.select", lambda *_: ([0], [], []))
    answer = "the answer is three"

    async def body(fleet: FakeFleet) -> None:
        job = parse(["--chat", "hi", "--target", f"127.0.0.1:{fleet.router.ports.grpc}"])
        await asyncio.to_thread(generate.run, job)
        first, second = fleet.prefill[0].prompts
        assert first == [PROMPT, *ids_of("hi"), ANSWER]
        assert second[: len(first)] == first
        said = [PROMPT, *ids_of(answer), ANSWER, PROMPT, *ids_of("and"), ANSWER]
        assert second[len(first) :] == said

    router.fakes.run(body)
    told = capsys.readouterr()
    assert told.out == f"{answer}\n{answer}\n"
    assert told.err == "> > effuse generate: expected UTF-8 text, not sent\n> > \n"


def test_a_turn_that_is_refused_does_not_end_a_chat_with_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(fleet: FakeFleet) -> None:
        job = parse(["--chat", "hi", "--target", f"127.0.0.1:{fleet.router.ports.grpc}"])
        monkeypatch.setattr(sys, "stdin", Terminal(b"x" * 500 + b"\nand\n"))
        monkeypatch.setattr("effuse.cli.generate.select.select", lambda *_: ([0], [], []))
        await asyncio.to_thread(generate.run, job)
        first, second = fleet.prefill[0].prompts
        assert second[: len(first)] == first and second[-4:] == [*ids_of("and"), ANSWER]
        monkeypatch.setattr(sys, "stdin", Piped(b"x" * 500 + b"\nand\n"))
        with pytest.raises(CommandError):  # otherwise no user would be there
            await asyncio.to_thread(generate.run, job)

    router.fakes.run(body)
    told = capsys.readouterr().err
    assert "effuse generate: INVALID_ARGUMENT: " in told and told.endswith("> > \n")


def _generate(*words: str) -> None:
    """Sends a prompt to a fleet whose decode worker gives "four" and "none" as other answers."""

    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of("four"), ids_of("none")]
        target = f"127.0.0.1:{fleet.router.ports.grpc}"
        await asyncio.to_thread(generate.run, parse([*words, "--target", target]))

    router.fakes.run(body)


@pytest.mark.parametrize("watch", [[], ["--watch"]], ids=["text", "watch"])
def test_a_heading_stands_before_each_of_several_answers(
    watch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _generate("how many?", "--n", "3", "--stats", *watch)
    told = capsys.readouterr()
    assert told.out.startswith("--- answer 1 of 3 ---\n")
    assert told.out.endswith(
        "the answer is three\n--- answer 2 of 3 ---\nfour\n--- answer 3 of 3 ---\nnone\n"
    )
    first, second, third = told.err.splitlines()
    assert first.startswith("answer 1 of 3: 11 prompt tokens, 2 of them cached, ")
    for at, line in ((2, second), (3, third)):
        assert line.startswith(f"answer {at} of 3: the same 11 prompt tokens, 2 of them cached")


@pytest.mark.parametrize("watch", [[], ["--watch"]], ids=["text", "watch"])
def test_a_refusal_has_no_heading(watch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        _generate("x" * 500, "--n", "2", *watch)
    assert caught.group_contains(CommandError, match="INVALID_ARGUMENT")
    assert capsys.readouterr().out == ""


def test_one_answer_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("how many?")
    assert capsys.readouterr().out == "the answer is three\n"


def test_several_prompts_have_headings_too(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("how many?", "and?")
    assert capsys.readouterr().out == (
        "--- prompt 1 of 2 ---\nthe answer is three\n--- prompt 2 of 2 ---\nthe answer is three\n"
    )
    assert answer_names(2, 2, 1) == ["prompt 2 of 2, answer 1 of 2", "prompt 2 of 2, answer 2 of 2"]


def test_programs_get_a_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("how many?", "and?", "--n", "2", "--json", "--logprobs", "0", "--echo")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["prompt"], one["answer"], one["text"]) for one in told] == [
        (0, 0, "the answer is three"),
        (0, 1, "four"),
        (1, 0, "the answer is three"),
        (1, 1, "four"),
    ]
    assert [one["echo"] for one in told] == ["how many?", "how many?", "and?", "and?"]
    assert told[0]["usage"]["prompt_tokens"] == 11
    assert told[1]["token_ids"] == ids_of("four")
    assert told[1]["stats"]["decode_worker"]


def test_json_has_token_ids_also_without_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("how many?", "--n", "2", "--json")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["token_ids"] == ids_of("the answer is three")
    assert second["token_ids"] == ids_of("four")


class Broken:
    """A stream that ends badly after a part of its answer."""

    def __init__(self, text: str, error: BaseException) -> None:
        self._left = self._all(text, error)

    def events(self) -> Iterator[pb.GenerateStreamResponse]:
        """Those that are left."""
        return self._left

    @staticmethod
    def _all(text: str, error: BaseException) -> Iterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(commit=pb.BlockCommit(text=text))
        raise error


@pytest.mark.parametrize(("text", "shown"), [("half", "half\n"), ("a\n", "a\n"), ("", "")])
@pytest.mark.parametrize("error", [StreamBroken("lost"), KeyboardInterrupt()])
def test_the_line_of_a_broken_answer_ends(
    text: str, shown: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = cast("Stream", Broken(text, error))
    with pytest.raises(type(error)):
        generate._print_answers(stream, parse(["how many?"]), [""])
    assert capsys.readouterr().out == shown


def test_figures_have_the_tokens_that_were_cached() -> None:
    response = pb.GenerateResponse(
        usage=pb.Usage(prompt_tokens=40), stats=pb.GenerationStats(cached_prompt_tokens=32)
    )
    response.others.add()
    answer = Answer.of(response, 1.0)
    assert figures(answer).startswith("40 prompt tokens, 32 of them cached, ")
    assert figures(answer.others[0], answer).startswith("the same 40 prompt tokens, 32 of them")


def test_ctrl_c_leaves_a_chat_that_waits_for_what_the_user_says() -> None:
    async def body(fleet: FakeFleet) -> None:
        await asyncio.to_thread(_interrupt_chat, f"127.0.0.1:{fleet.router.ports.grpc}")

    router.fakes.run(body)


def _interrupt_chat(target: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "effuse.cli", "generate", "--chat", "--target", target]
    child = subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        assert child.stderr.read(2) == b"> "
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr.read() == b"\n"  # the shell's prompt has a line of its own
    finally:
        child.kill()
        child.communicate()
        os.close(ours)
        os.close(theirs)
