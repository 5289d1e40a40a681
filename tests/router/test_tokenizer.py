"""Encoding prompts: text stays text, the template's tokens are added, long text leaves the loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import tokenizers
from router.asking import ask
from router.fake_model import ANSWER, EOS, MASK, PAD, PROMPT, byte_tokenizer, ids_of
from router.fakes import FakeFleet, run, until
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from effuse.router.tokenizer import Tokenizer, TokenizerError
from effuse.v1 import model_pb2


def encode(text: str) -> list[int]:
    return asyncio.run(Tokenizer(byte_tokenizer()).encode(text))


def test_the_template_is_added() -> None:
    assert encode("hi") == [PROMPT, *ids_of("hi"), ANSWER]


def test_parsed_text_gets_the_template_of_a_vocabulary_that_drops_letters() -> None:
    backend = tokenizers.Tokenizer(BPE(vocab={"[B]": 0, "x": 1, "[E]": 2}, merges=[]))
    backend.add_special_tokens(["[B]", "[E]"])
    backend.post_processor = TemplateProcessing("[B] $A [E]", None, [("[B]", 0), ("[E]", 2)])
    tokenizer = Tokenizer(backend)
    assert asyncio.run(tokenizer.encode("ax[E]", parses_special=True)) == [0, 1, 2, 2]


@pytest.mark.parametrize("spelled", ["<|mask|>", "<|eos|>", "a <|answer|> b", "<|pad|><|pad|>"])
def test_special_tokens_that_are_spelled_stay_text(spelled: str) -> None:
    ids = encode(spelled)[1:-1]
    assert not {EOS, MASK, PAD, PROMPT, ANSWER} & set(ids)
    assert Tokenizer(byte_tokenizer()).decode(ids) == spelled


@pytest.mark.parametrize(
    "text", ["\x00 nul \x00", "\ufeffbom", "‮bidi", "zero\u200bwidth", "e\u0301" * 50, "🙂" * 50]
)
def test_odd_text_goes_round(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decode(encode(text)[1:-1]) == text


def test_long_text_is_encoded_by_another_thread() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    threads: list[str] = []
    original = tokenizer._encode

    def spy(text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return original(text)

    tokenizer._encode = spy  # type: ignore[method-assign]

    async def main() -> None:
        assert len(await tokenizer.encode("a" * 5000)) == 5002
        await tokenizer.encode("a")

    asyncio.run(main())
    tokenizer.close()
    assert threads[0].startswith("tokenizer")
    assert threads[1] == threading.main_thread().name


def test_reserved_ids_are_found_by_their_names() -> None:
    assert Tokenizer(byte_tokenizer()).reserved_ids == {MASK, PAD}


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(pad_id=PAD, pad_token="<|pad|>", length=64)
    assert len(asyncio.run(Tokenizer(backend).encode("abcdefgh"))) == 10


def test_a_directory_without_tokenizer_json_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="effuse convert-tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_pointer_of_git_lfs_is_called_that(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 162944\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json .*: a Git LFS pointer.*`git lfs pull`"
    ):
        Tokenizer.load(tmp_path)


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert asyncio.run(tokenizer.encode("<|mask|>")) == encode("<|mask|>")


def test_the_loop_turns_while_long_text_is_encoded() -> None:
    """Another thread is not enough: the library must let go of the interpreter meanwhile."""
    tokenizer = Tokenizer(byte_tokenizer())
    running = threading.Event()
    original = tokenizer._encode

    def spy(text: str) -> list[int]:
        running.set()
        ids = original(text)
        running.clear()
        return ids

    tokenizer._encode = spy  # type: ignore[method-assign]

    async def main() -> int:
        turns = 0
        encoding = asyncio.create_task(tokenizer.encode("many words " * 50_000))
        while not encoding.done():
            turns += running.is_set()
            await asyncio.sleep(0)
        assert len(encoding.result()) == 550_002
        return turns

    assert asyncio.run(main()) > 100
    tokenizer.close()


def test_calls_to_tokenize_leave_a_thread_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effuse.router.tokenizer.INLINE_BYTES", 100)

    async def body(fleet: FakeFleet) -> None:
        tokenizer, may_end = fleet.router.tokenizer, threading.Event()
        original = tokenizer._encode

        def spy(text: str) -> list[int]:
            if text.startswith("slow"):
                may_end.wait(30)
            return original(text)

        tokenizer._encode = spy  # type: ignore[method-assign]
        asked = model_pb2.TokenizeRequest(prompt="slow " * 200)
        calls = [asyncio.ensure_future(fleet.models.Tokenize(asked, timeout=30)) for _ in range(4)]
        await until(tokenizer.turns.locked)
        assert (await ask(fleet, prompt="a long prompt " * 10)).text
        assert not any(call.done() for call in calls)
        may_end.set()
        assert {len(found.token_ids) for found in await asyncio.gather(*calls)} == {1002}

    run(body)
