"""A batch in one process gives the same answers and refusals as a fleet."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint
from decoding.published import published_runs, write_published

import effuse
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.client.answer import Logprob
from effuse.models.config_keys import CheckpointError
from effuse.problems.problem import problem
from effuse.protos.errors import InvalidRequest, NotFound
from effuse.worker.engine_settings import Device
from effuse.worker.watchdog import GroupBroken

QUESTIONS = [problem(3, number).prompt for number in range(5)]
PARAMS = [
    effuse.Params(max_tokens=48),
    effuse.Params(max_tokens=20, temperature=0.8, top_p=0.9, seed=7),
    effuse.Params(algorithm="block_diffusion", denoising_steps=4, stop=("answer",)),
    effuse.Params(max_tokens=9, ignore_eos=True, stop_token_ids=(200,)),
    effuse.Params(max_tokens=32, n=3, temperature=0.9, seed=11),
    effuse.Params(
        max_tokens=24, min_tokens=20, temperature=0.7, seed=3, min_p=0.05, logit_bias={300: 4.0},
        repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2, echo=True,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[effuse.LLM]:
    with effuse.LLM(device="cpu", max_num_seqs=3, max_model_len=512) as made:
        yield made


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cuda", "--device cuda: no GPU was found on this machine"),
        ("cuda:7", "--device: expected one of auto, cpu, cuda, got 'cuda:7'"),
    ],
)
def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(
    device: Device, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("effuse.offline.llm.Tokenizer.load", None)
    with pytest.raises(ValueError, match=re.escape(told)):
        effuse.LLM(device=device)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs: expected a whole number, got '8'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: expected a whole number, got 2.5"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: expected True or False"),
        ({"kv_offloading_size": None}, "kv_offloading_size: expected a number, got None"),
        ({"served_model_name": 3}, "served_model_name: expected a string, got 3"),
        ({"adapter": 3}, "adapter: expected a path, got 3"),
    ],
)
def test_options_of_other_types_are_refused_by_name(option: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=re.escape(told)):
        effuse.LLM(**option)


@pytest.mark.parametrize("name", ["model", "adapter", "kv_offloading_dir"])
def test_an_empty_path_is_not_the_working_directory(name: str) -> None:
    option: dict[str, Any] = {name: ""}
    with pytest.raises(ValueError, match=f"^{name}: expected a path, got ''$"):
        effuse.LLM(**option)


def test_ranks_end_if_a_start_fails_late(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--kv-offloading-dir"):
        effuse.LLM(tensor_parallel_size=2, kv_offloading_size=0.1, kv_offloading_dir=file)
    left = [one.cmdline() for one in psutil.Process().children()]
    assert not [words for words in left if "effuse.decode_worker.rank" in words]


def test_ranks_that_do_not_meet_break_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have crashed, so a worker starts them again."""

    def fails(*_: object) -> None:
        raise ConnectionError("Connection reset by peer")

    monkeypatch.setattr("effuse.worker.assembly.join", fails)
    with pytest.raises(GroupBroken, match="the leader's part of the meeting failed: Connection"):
        effuse.LLM(tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["attention", "kv_layout", "default_algorithm"])
def test_a_choice_that_there_is_not_is_refused(name: str) -> None:
    option: dict[str, Any] = {name: "none such"}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: expected one of"):
        effuse.LLM(**option)


def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="--batch-invariant: expected float32 on a CPU, got bf"):
        effuse.LLM(device="cpu", dtype="bfloat16", batch_invariant=True)
    with effuse.LLM(device="cpu", dtype="bfloat16", max_model_len=512) as llm:
        (answer,) = llm.generate(QUESTIONS[0], effuse.Params(max_tokens=4))
        assert not answer.deterministic


def test_answers_are_those_of_a_fleet(llm: effuse.LLM) -> None:
    flags = ("--device", "cpu", "--max-model-len", "512")
    with Fleet(FleetConfig(worker_flags=flags)) as fleet, effuse.Client(fleet.address) as client:
        for params in PARAMS:
            answers = llm.generate(QUESTIONS, params)
            for question, answer in zip(QUESTIONS, answers, strict=True):
                theirs = client.generate(question, params)
                assert len(answer.answers) == len(theirs.answers) == (params.n or 1)
                for ours, other in zip(answer.answers, theirs.answers, strict=True):
                    _compare(ours, other)
                assert (answer.prompt is None) == (params.echo is None)
                assert len(answer.token_ids) >= (params.min_tokens or 0)
            assert answers[0].commits == client.stream(QUESTIONS[0], params).answer.commits != ()


def _compare(ours: effuse.Answer, theirs: effuse.Answer) -> None:
    assert ours.text == theirs.text
    assert ours.token_ids == theirs.token_ids
    assert ours.finish_reason == theirs.finish_reason
    assert ours.usage == theirs.usage
    assert ours.stats.forward_passes == theirs.stats.forward_passes
    assert ours.model == theirs.model
    assert ours.deterministic and theirs.deterministic
    assert ours.prompt == theirs.prompt
    assert ours.stopped_by == theirs.stopped_by
    assert _close(ours.logprobs, theirs.logprobs)


def _close(ours: tuple[Logprob, ...], theirs: tuple[Logprob, ...]) -> bool:
    """The same ids; the wire has single precision."""
    ids = [[i for i, _ in one.top] for one in ours] == [[i for i, _ in one.top] for one in theirs]
    return ids and [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs])


def test_torch_keeps_the_threads_that_the_process_has_given_it() -> None:
    before, during = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    try:
        with effuse.LLM(device="cpu", max_model_len=512) as llm:
            assert torch.get_num_threads() == 2
            llm.generate(
                QUESTIONS[0], PARAMS[0], progress=lambda *_: during.append(torch.get_num_threads())
            )
        assert (during, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_progress_is_told_answer_by_answer(llm: effuse.LLM) -> None:
    told: list[tuple[int, int]] = []
    llm.generate(QUESTIONS, PARAMS[0], progress=lambda *at: told.append(at))
    assert told == [(number, 5) for number in range(1, 6)]


def test_ids_and_a_single_prompt(llm: effuse.LLM) -> None:
    (by_text,) = llm.generate(QUESTIONS[0], PARAMS[0])
    assert 0 < by_text.first_block_s <= by_text.total_s
    assert by_text.usage.prompt_tokens > 0
    (by_ids,) = llm.generate([5, 6, 7], effuse.Params(max_tokens=4, ignore_eos=True))
    assert len(by_ids.token_ids) == 4 and by_ids.usage.prompt_tokens == 3
    assert llm.generate([]) == []


def test_a_chat_is_rendered_as_a_fleet_renders_it(llm: effuse.LLM) -> None:
    chat = effuse.Chat().user("other").assistant("words").user(QUESTIONS[0])
    (by_text,) = llm.generate(QUESTIONS[0])
    (by_chat,) = llm.generate(chat)
    assert (by_chat.text, by_chat.usage) == (by_text.text, by_text.usage)
    begun = effuse.Chat(chat.assistant(by_text.text[:9]).messages, continue_last=True)
    (rest, whole) = llm.generate([begun, chat])
    assert rest.usage.prompt_tokens > whole.usage.prompt_tokens
    assert by_text.text[:9] + rest.text == whole.text == by_text.text
    messages = [one.fields() for one in chat.messages]
    several: list[Any] = [messages, chat]
    assert [one.text for one in llm.generate(messages)] == [by_text.text]
    assert [one.text for one in llm.generate(several)] == [by_text.text] * 2
    with pytest.raises(InvalidRequest, match=r"chat: .*'this model knows user and assistant only"):
        llm.generate([chat.system("Be kind.")])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (effuse.Params(top_k=1 << 20), "sampling.top_k"),
        (effuse.Params(max_tokens=4096), "max_tokens"),
        (effuse.Params(window=2, algorithm="block_diffusion"), "decoding.window"),
    ],
)
def test_one_wrong_request_costs_nothing(
    llm: effuse.LLM, params: effuse.Params, words: str
) -> None:
    before = llm._core.load().steps
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(QUESTIONS, params)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([*QUESTIONS, ""])
    assert llm._core.load().steps == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (effuse.Params(window=9), "^decoding.window: .* max_window 8, got 9"),
        (
            effuse.Params(stop_token_ids=tuple(range(270, 290))),
            "^stopping.stop_token_ids: .* max_stop_ids 16, got 2",
        ),
    ],
)
def test_what_the_engine_refuses_is_found_before_anything_is_computed(
    llm: effuse.LLM, wrong: effuse.Params, words: str
) -> None:
    before = llm._core.load().steps
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(QUESTIONS, [*[PARAMS[0]] * 4, wrong])
    assert llm._core.load().steps == before


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (
            {"role": "user", "content": "a"},
            effuse.Params(),
            "prompt: expected a string, .* got dict",
        ),
        (5, effuse.Params(), "prompt: expected a string, .* got int"),
        ([5, "a"], effuse.Params(), "prompt: expected a string, .* got list of int, str"),
        (b"a", effuse.Params(), "prompt: expected a string, .* got bytes"),
        ("a", {"max_tokens": 4}, r"params: expected effuse\.Params, got dict"),
        ("a", [{"max_tokens": 4}], r"params: expected effuse\.Params, got dict"),
        ("a", None, r"params: expected effuse\.Params, got NoneType"),
    ],
)
def test_what_is_no_prompt_or_no_params_is_one_line(
    llm: effuse.LLM, prompts: Any, params: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=f"^{words}$"):
        llm.generate(prompts, params)


def test_limits_of_the_engine_can_be_set() -> None:
    ids = tuple(range(270, 290))
    with effuse.LLM(device="cpu", max_window=9, max_stop_ids=32, max_model_len=256) as llm:
        (answer,) = llm.generate("a", effuse.Params(window=9, stop_token_ids=ids, max_tokens=8))
        assert answer.finish_reason == "stop" or answer.usage.completion_tokens == 8
    with pytest.raises(ValueError, match=r"max.window"):
        effuse.LLM(device="cpu", max_window=65)
    with pytest.raises(ValueError, match=r"^--block-size: expected 1 to 2147483647, got 0$"):
        effuse.LLM(device="cpu", block_size=0)
    with pytest.raises(
        TypeError, match=r"^LLM: expected options among .*, device, .*; got 'port'$"
    ):
        effuse.LLM(device="cpu", port=1)  # type: ignore[call-arg]


def test_a_loop_may_run_in_the_thread_that_asks(llm: effuse.LLM) -> None:
    async def in_a_notebook() -> list[effuse.Answer]:
        return llm.generate(QUESTIONS[:2], PARAMS[0])

    told = [answer.text for answer in asyncio.run(in_a_notebook())]
    assert told == [answer.text for answer in llm.generate(QUESTIONS[:2], PARAMS[0])]


def test_prompts_may_come_one_by_one(llm: effuse.LLM) -> None:
    lengths = range(1, 4)
    answers = llm.generate(
        (question for question in QUESTIONS[:3]),
        (effuse.Params(max_tokens=length, ignore_eos=True) for length in lengths),
    )
    assert [len(answer.token_ids) for answer in answers] == [*lengths]


def test_a_batch_may_take_longer_than_a_fleets_request(
    llm: effuse.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = count(0.0, 3600.0)  # each time that the engine looks
    monkeypatch.setattr(llm._core, "_now", lambda: next(hours))
    (answer,) = llm.generate(QUESTIONS[0], PARAMS[0])
    assert answer.text and next(hours) > 10 * 3600.0


def test_a_batch_within_a_batch_is_refused(llm: effuse.LLM) -> None:
    def ask_again(done: int, of: int) -> None:
        llm.generate(QUESTIONS[2], PARAMS[0])

    with pytest.raises(RuntimeError, match="is answering another batch"):
        llm.generate(QUESTIONS[:2], PARAMS[0], progress=ask_again)
    assert llm.generate(QUESTIONS[2], PARAMS[0])[0].text


def test_each_prompt_may_have_params_of_its_own(llm: effuse.LLM) -> None:
    each = [effuse.Params(max_tokens=length, ignore_eos=True) for length in (3, 9)]
    answers = llm.generate(QUESTIONS[:2], each)
    assert [len(answer.token_ids) for answer in answers] == [3, 9]
    assert answers[0].seed != answers[1].seed
    for answer in answers:
        assert answer.stopped_by is None
        assert answer.commits[-1] == (len(answer.token_ids), answer.stats.forward_passes)
    with pytest.raises(ValueError, match="params for 3 prompts, got 2"):
        llm.generate(QUESTIONS[:3], each)


def test_several_answers_draw_for_themselves_and_share_the_prompt(llm: effuse.LLM) -> None:
    shared = llm._core.load().prompts_shared
    several = effuse.Params(
        n=3, max_tokens=24, temperature=30.0, seed=4, ignore_eos=True, echo=True
    )
    (answer,) = llm.generate(QUESTIONS[0], several)
    assert len({one.token_ids for one in answer.answers}) == 3
    assert llm._core.load().prompts_shared == shared + 2
    (alone,) = llm.generate(QUESTIONS[0], replace(several, n=1))
    assert alone.token_ids == answer.token_ids and alone.others == ()
    assert [one.usage.prompt_tokens > 0 for one in answer.answers] == [True, False, False]
    assert [one.prompt is not None for one in answer.answers] == [True, False, False]
    told: list[tuple[int, int]] = []
    llm.generate(QUESTIONS[:2], several, progress=lambda *at: told.append(at))
    assert told[-1] == (6, 6)


def test_another_model_is_not_here(llm: effuse.LLM) -> None:
    with pytest.raises(NotFound, match=r"'bundled'.*'x'"):
        llm.generate("hello", effuse.Params(model="x"))


def test_prompts_that_can_be_read_once_are_answered(llm: effuse.LLM) -> None:
    texts = ["Find the value of 2 + 3.", "Find the value of 3 + 4."]
    for prompts in (iter(texts), dict.fromkeys(texts).keys()):
        assert len(llm.generate(prompts, effuse.Params(max_tokens=4))) == 2


def test_a_batch_that_is_given_up_leaves_nothing(llm: effuse.LLM) -> None:
    def give_up(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(QUESTIONS, PARAMS[0], progress=give_up)
    (answer,) = llm.generate(QUESTIONS[1], PARAMS[0])
    assert answer.text
    load = llm._core.load()
    assert (load.running, load.waiting, load.free_pages) == (0, 0, load.total_pages)


def test_a_checkpoint_that_is_none_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        effuse.LLM(empty)
    (empty / "config.json").write_text('{"model_type": "rnd1", "architectures": ["RND1LM"]}')
    with pytest.raises(CheckpointError, match=r"does not serve 'rnd1' \(RND1LM\)"):
        effuse.LLM(empty)


def test_an_algorithm_that_does_not_fit_can_be_replaced(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "sdar")
    (tmp_path / "generation_config.json").write_text('{"algorithm": "llada"}')
    with effuse.LLM(tmp_path, device="cpu", default_algorithm="d2f", num_pages=64) as llm:
        assert llm.model.defaults.settings.algorithm == "d2f"


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_an_untuned_model_answers_as_its_authors_have_it(
    architecture: Architecture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_published(tmp_path_factory.mktemp("untuned") / "m", architecture, 1, block_size=8)
    known = [*published_runs(architecture)[:24], *published_runs("fast_dllm")]
    runs = [run for run in known if (run.architecture, run.checkpoint) == (architecture, 1)]
    with effuse.LLM(path, device="cpu", max_num_seqs=8) as llm:
        answers = llm.generate([run.prompt for run in runs], [run.params() for run in runs])
    assert [list(answer.token_ids) for answer in answers] == [run.tokens for run in runs]


def test_each_answer_is_handed_over_once_all_of_it_is_complete(llm: effuse.LLM) -> None:
    seen: list[tuple[int, effuse.Answer]] = []
    params = effuse.Params(max_tokens=16, n=2, temperature=0.8, seed=5)
    answers = llm.generate(QUESTIONS, params, on_answer=lambda at, one: seen.append((at, one)))
    assert sorted(seen, key=lambda pair: pair[0]) == list(enumerate(answers))
    assert all(len(one.answers) == 2 for _, one in seen)
