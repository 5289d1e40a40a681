"""`effuse generate`: prompts from arguments, files and standard input, and chats that go on."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
import router.fakes
from router.fake_model import ANSWER, PROMPT, ids_of
from router.fakes import FakeFleet

from effuse.cli import generate
from effuse.cli.generate import parse
from effuse.client.chat import Chat


class Terminal(io.StringIO):
    """Standard input with a person behind it."""

    def isatty(self) -> bool:
        return True


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a file"))
    assert parse(["typed", "-"]).prompts == ("typed", "from a file")


def test_other_bytes_on_standard_input_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff"))
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
    assert job.prompts == ("typed", "é\n", [5, 6]) and job.chat is None


def test_without_a_prompt_standard_input_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert parse([]).prompts == ("piped",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "expected PROMPT, --file, --ids, --chat or text on standard input"),
        (["--ids", "1,x"], "expected 0 to 4294967295, got 'x'"),
        (["--ids", "1,-2"], "expected 0 to 4294967295, got -2"),
        (["--ids", "1", "--chat"], "--ids: expected text with --chat"),
        (["a", "--system", "b"], "expected --chat with them"),
        (["--chat", "--template-argument", "a b=1"], "expected NAME=JSON"),
        (["--chat", "--template-argument", "a"], "expected NAME=JSON"),
        (["--chat", "--request-id", "mine"], "expected one prompt, got a chat"),
        (["--chat", "--n", "2"], "--n: expected 1 with --chat"),
        (["a", "--n", "0"], "expected an integer from 1 to 64, got 0"),
        (["--file", __file__ + "c"], "expected a file"),
        (["--file", "latin"], "expected UTF-8 text in latin"),
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
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_a_chat_begins_with() -> None:
    flags = ["--template-argument", "enable_thinking=false", "--template-argument", "style=terse"]
    job = parse(["--chat", "hi", "--system", "Be kind.", *flags])
    arguments = {"enable_thinking": False, "style": "terse"}
    assert job.chat == Chat(template_arguments=arguments).system("Be kind.")
    assert job.prompts == ("hi",)


def test_a_chat_keeps_its_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("\n\udcff\nand\n"))
    monkeypatch.setattr("effuse.cli.generate.select.select", lambda *_: ([0], [], []))
    answer = "the answer is three"

    async def body(fleet: FakeFleet) -> None:
        await generate.run(parse(["--chat", "hi", "--target", f"127.0.0.1:{fleet.router.port}"]))
        first, second = fleet.prefill[0].prompts
        assert first == [PROMPT, *ids_of("hi"), ANSWER]
        assert second[: len(first)] == first
        said = [PROMPT, *ids_of(answer), ANSWER, PROMPT, *ids_of("and"), ANSWER]
        assert second[len(first) :] == said

    router.fakes.run(body)
    told = capsys.readouterr()
    assert told.out == f"{answer}\n{answer}\n"
    assert told.err == "> > effuse generate: expected UTF-8 text, not sent\n> > "


def test_a_turn_that_is_refused_does_not_end_a_chat_with_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(fleet: FakeFleet) -> None:
        job = parse(["--chat", "hi", "--target", f"127.0.0.1:{fleet.router.port}"])
        monkeypatch.setattr(sys, "stdin", Terminal("x" * 500 + "\nand\n"))
        monkeypatch.setattr("effuse.cli.generate.select.select", lambda *_: ([0], [], []))
        await generate.run(job)
        first, second = fleet.prefill[0].prompts
        assert second[: len(first)] == first and second[-4:] == [*ids_of("and"), ANSWER]
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 500 + "\nand\n"))
        with pytest.raises(grpc.aio.AioRpcError):  # nobody is there to ask otherwise
            await generate.run(job)

    router.fakes.run(body)
    told = capsys.readouterr().err
    assert "effuse generate: INVALID_ARGUMENT: " in told and told.endswith("> > ")


@pytest.mark.parametrize("watch", [[], ["--watch"]], ids=["text", "watch"])
def test_several_answers_stand_one_behind_the_other(
    watch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].others = [ids_of("four"), ids_of("none")]
        target = f"127.0.0.1:{fleet.router.port}"
        await generate.run(parse(["how many?", "--n", "3", "--stats", "--target", target, *watch]))

    router.fakes.run(body)
    told = capsys.readouterr()
    assert told.out.endswith("\nfour\nnone\n") and "the answer is three" in told.out
    assert (told.out == "the answer is three\nfour\nnone\n") == (not watch)
    assert len(told.err.splitlines()) == 3, "the figures of each"


def test_ctrl_c_leaves_a_chat_that_waits_for_what_the_user_says() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "effuse.cli", "generate", "--chat"]
    child = subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        assert child.stderr.read(2) == b"> "
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
    finally:
        child.kill()
        child.communicate()
        os.close(ours)
        os.close(theirs)
