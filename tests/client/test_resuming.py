"""A stream that breaks off goes on where it was: the caller gets each text once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from client.fake_router import FakeRouter

import effuse
from effuse.client import retries
from effuse.client.streams import Resumption
from effuse.protos.errors import (
    AlreadyRunning,
    Cancelled,
    Draining,
    EffuseError,
    Unavailable,
    to_status,
)
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

SEED = 2**64 - 3


def commit(
    text: str, *ids: int, at: int = 0, answer: int = 0, seed: int | None = None, told: bool = False
) -> pb.GenerateStreamResponse:
    logprobs = [pb.TokenLogprobs(logprob=-float(one)) for one in ids if told]
    added = pb.BlockCommit(
        token_offset=at, num_tokens=len(ids), text=text, token_ids=ids, logprobs=logprobs
    )
    return pb.GenerateStreamResponse(answer_index=answer, commit=added, seed=seed)


def end(answer: int = 0) -> pb.GenerateStreamResponse:
    finished = pb.Finished(finish_reason=pb.FINISH_REASON_STOP, model="m", seed=SEED)
    return pb.GenerateStreamResponse(request_id="r", answer_index=answer, finished=finished)


def draft() -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(draft=pb.BlockDraft(text="?"))


def echo() -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(echo=pb.PromptEcho(text="prompt"))


def through(*attempts: Sequence[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    """The events that a caller gets of attempts, each of which but the last broke off."""
    resumption, told = Resumption(), list[pb.GenerateStreamResponse]()
    for events in attempts:
        resumption.begin(pb.GenerateRequest())
        told += filter(None, map(resumption.take, events))
    return told


WHOLE = [commit("ab", 1, 2), commit("c", 3, at=2), commit("\u00e9d", at=3), end()]


@pytest.mark.parametrize("broke_after", range(5))
@pytest.mark.parametrize(
    "second",
    [
        WHOLE,
        [commit("abc\u00e9d", 1, 2, 3), end()],
        [
            commit("a", 1),
            commit("b", 2, at=1),
            commit("c\u00e9", 3, at=2),
            commit("d", at=3),
            end(),
        ],
        # A part of a character, or of a stop string, is held back elsewhere.
        [commit("", 1, 2), commit("abc\u00e9", 3, at=2), commit("d", at=3), end()],
    ],
    ids=["equal blocks", "one block", "smaller blocks", "later text"],
)
def test_the_caller_gets_each_text_and_each_token_once(
    broke_after: int, second: list[pb.GenerateStreamResponse]
) -> None:
    told = through(WHOLE[:broke_after], second)
    commits = [event.commit for event in told if event.HasField("commit")]
    assert "".join(one.text for one in commits) == "abc\u00e9d"
    assert [token for one in commits for token in one.token_ids] == [1, 2, 3]
    ends = [one.token_offset + one.num_tokens for one in commits]
    assert ends == sorted(ends) and sum(one.num_tokens for one in commits) == 3
    assert [event.HasField("finished") for event in told].count(True) == 1


def test_it_may_break_off_again_and_again_and_earlier_than_before() -> None:
    one = [commit("abc", 1, 2, 3), commit("d", 4, at=3), end()]
    told = through(one[:2], one[:1], [commit("a", 1)], [], one)
    assert [event.commit.text for event in told] == ["abc", "d", ""]


def test_log_probabilities_are_cut_as_the_tokens_are() -> None:
    told = through([commit("a", 1, told=True)], [commit("abc", 1, 2, 3, told=True), end()])
    assert [one.logprob for event in told for one in event.commit.logprobs] == [-1, -2, -3]


@pytest.mark.parametrize("broke_after", range(4))
def test_without_ids_the_caller_gets_each_log_probability_once(broke_after: int) -> None:
    whole = [commit("ab", 1, 2, told=True), commit("", 3, 4, at=2, told=True), end()]
    again = [commit("ab", 1, 2, 3, told=True), commit("", 4, at=3, told=True), end()]
    for event in (*whole[:2], *again[:2]):
        event.commit.ClearField("token_ids")
    commits = [one.commit for one in through(whole[:broke_after], again) if one.HasField("commit")]
    assert [one.logprob for each in commits for one in each.logprobs] == [-1, -2, -3, -4]
    assert sum(one.num_tokens for one in commits) == 4


def test_each_of_several_answers_goes_on_by_itself() -> None:
    first = [commit("ab", 1, 2), commit("x", 7, answer=1), end()]
    again = [commit("xy", 7, 8, answer=1), end(1), commit("ab", 1, 2), end()]
    told = through(first, again)
    assert [(event.answer_index, event.commit.text) for event in told] == [
        (0, "ab"), (1, "x"), (0, ""), (1, "y"), (1, ""),
    ]  # fmt: skip


def test_the_prompt_is_told_once_and_drafts_only_of_what_is_new() -> None:
    told = through([echo(), draft(), commit("a", 1)], [echo(), draft(), commit("a", 1), draft()])
    kinds = [event.WhichOneof("event") for event in told]
    assert kinds == ["echo", "draft", "commit", "draft"]


@pytest.mark.parametrize(
    "second",
    [
        [commit("aX", 1, 9)],
        [commit("ab", 1, 9)],  # equal to read, and yet another answer
        [commit("a", 1), end()],
        [commit("b", 2)],
        [end()],
    ],
    ids=["another text", "another token", "a shorter one", "without its beginning", "nothing"],
)
def test_another_answer_is_refused_and_nothing_of_it_is_told(
    second: list[pb.GenerateStreamResponse],
) -> None:
    resumption = Resumption()
    resumption.take(commit("ab", 1, 2))
    resumption.begin(pb.GenerateRequest())
    with pytest.raises(Unavailable, match="another answer") as caught:
        for event in second:
            assert resumption.take(event) is None
    assert not caught.value.retryable


def test_the_seed_that_was_told_is_asked_for() -> None:
    resumption, asked = Resumption(), pb.GenerateRequest(prompt="p")
    resumption.take(commit("a", 1))
    assert resumption.begin(asked) == asked  # an older router told none
    resumption.take(commit("ab", 1, 2, seed=SEED))
    again = resumption.begin(asked)
    assert again.sampling.seed == SEED and again.prompt == "p"
    assert not asked.sampling.HasField("seed")
    asked.sampling.seed = 5
    assert resumption.begin(asked).sampling.seed == 5


def test_a_request_with_an_id_is_repeated_as_it_was() -> None:
    """Its id leads to its seed, and to an answer that is kept for just this message."""
    resumption, asked = Resumption(), pb.GenerateRequest(prompt="p", request_id="mine")
    resumption.take(commit("a", 1, seed=SEED))
    assert resumption.begin(asked) == asked


# Against real connections.


Attempt = Sequence[pb.GenerateStreamResponse | EffuseError]


class Script(FakeRouter):
    """Each call gets the next events; an error is how it breaks off then."""

    def __init__(self, *attempts: Attempt) -> None:
        super().__init__()
        self.attempts = [*attempts]

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self.asked.append(request.request)
        for event in self.attempts.pop(0):
            if isinstance(event, EffuseError):
                told = ("grpc-status-details-bin", to_status(event).SerializeToString())
                context.set_trailing_metadata((told,))
                context.abort(event.code, str(event))
            yield event
        if self.hangs:
            context.add_callback(self.cancelled.set)
            self.cancelled.wait(20)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)


Asked = tuple[list[str], effuse.Answer]
Ask = Callable[[str, str | None, int], Asked]


def ask(target: str, name: str | None, max_attempts: int) -> Asked:
    with effuse.Client(target, max_attempts=max_attempts) as client:
        stream = client.stream("p", request_id=name)
        return list(stream), stream.answer


def ask_too(target: str, name: str | None, max_attempts: int) -> Asked:
    async def asking() -> Asked:
        async with effuse.AsyncClient(target, max_attempts=max_attempts) as client:
            stream = client.stream("p", request_id=name)
            return [piece async for piece in stream], await stream.answer

    return asyncio.run(asking())


@pytest.fixture(params=[ask, ask_too], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(retries, "SPAN_S", 0.5)
    found: Ask = request.param
    return found


BROKEN: Attempt = [commit("ab", 1, 2, seed=SEED), Draining("ends")]
REST = [commit("a", 1, seed=SEED), commit("bc", 2, 3, at=1), end()]


def test_a_stream_that_breaks_goes_on_with_its_seed(client: Ask) -> None:
    script = Script(BROKEN, [Unavailable("nobody yet")], REST)
    with serving(script) as target:
        pieces, answer = client(target, None, 4)
    assert (pieces, answer.text, answer.token_ids) == (["ab", "c"], "abc", (1, 2, 3))
    seeds = [one.sampling.seed if one.sampling.HasField("seed") else None for one in script.asked]
    assert seeds == [None, SEED, SEED]


def test_a_router_that_has_not_taken_the_end_of_the_first_attempt_is_asked_again(
    client: Ask,
) -> None:
    script = Script(BROKEN, [AlreadyRunning("it still runs at router-0")], REST)
    with serving(script) as target:
        assert client(target, "mine", 4)[0] == ["ab", "c"]
    assert [one.request_id for one in script.asked] == ["mine"] * 3
    assert script.asked[0] == script.asked[2]
    with (
        serving(Script([AlreadyRunning("somebody else's")])) as target,
        pytest.raises(AlreadyRunning),
    ):
        client(target, "mine", 4)


def test_another_answer_ends_the_stream_with_an_error(client: Ask) -> None:
    script = Script(BROKEN, [commit("aX", 1, 9), end()], REST)
    with serving(script) as target, pytest.raises(Unavailable, match="another answer"):
        client(target, None, 4)
    assert len(script.asked) == 2


def test_one_attempt_is_all_that_a_client_of_one_attempt_makes(client: Ask) -> None:
    script = Script(BROKEN, REST)
    with serving(script) as target, pytest.raises(Draining):
        client(target, None, 1)
    assert len(script.asked) == 1


@pytest.mark.parametrize("breaks", [False, True])
def test_closing_a_stream_that_another_task_reads_ends_its_request(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SOON_S", 30.0)
    script = Script(BROKEN if breaks else BROKEN[:1])
    script.hangs = not breaks

    async def close(target: str) -> None:
        async with effuse.AsyncClient(target) as client:
            stream = client.stream("p")
            assert await anext(stream) == "ab"
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.3)
            await stream.aclose()
            with pytest.raises(Cancelled, match="stream was closed"):
                await reading
            assert [piece async for piece in stream] == []
            assert breaks or await asyncio.to_thread(script.cancelled.wait, 10)

    with serving(script) as target:
        asyncio.run(close(target))
