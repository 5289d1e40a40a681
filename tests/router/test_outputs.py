"""Parts of an answer besides text: log-probabilities of its tokens, and the prompt again."""

from __future__ import annotations

import pytest
from router.asking import ask, request
from router.fake_model import ids_of
from router.fake_workers import ends_its_engine
from router.fakes import FakeFleet, run

from effuse.client.answer import Answer, Gathering
from effuse.client.chat import Chat
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

TEXT = "the answer is three"
WANTED = pb.OutputOptions(token_ids=True, logprobs=2)


def is_told(answer: Answer) -> bool:
    """Whether each token has its own, as the fakes invent them."""
    return [(one.logprob, one.top) for one in answer.logprobs] == [
        (-token / 2, ((token, -token / 2), (token + 1, -(token + 1) / 2)))
        for token in answer.token_ids
    ]


async def stream(fleet: FakeFleet, asked: pb.GenerateRequest) -> Answer:
    gathering = Gathering()
    call = fleet.generation.GenerateStream(pb.GenerateStreamRequest(request=asked), timeout=30)
    async for event in call:
        gathering.take(event)
    return gathering.answer()


@pytest.mark.parametrize("stop", ["", "wer is"])
def test_each_token_has_its_log_probabilities(stop: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        stopping = pb.StoppingParams(stop=[stop] if stop else [])
        asked = request(request_id="mine", output=WANTED, stopping=stopping)
        first = Answer.of(await fleet.generation.Generate(asked, timeout=30), 0.0)
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        kept = await stream(fleet, asked)
        fresh = await stream(fleet, request(output=WANTED, stopping=stopping))
        for answer in (first, kept, fresh):
            assert is_told(answer)
            assert len(answer.logprobs) == answer.usage.completion_tokens > 5
        assert len(fleet.decode[0].requests) == 2

    run(body)


def test_nothing_is_told_that_was_not_asked_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet)
        assert not answer.logprobs and not answer.HasField("echo")
        bare = await ask(fleet, output=pb.OutputOptions(logprobs=0))
        assert len(bare.logprobs) == bare.usage.completion_tokens
        assert not any(one.top_token_ids for one in bare.logprobs)

    run(body)


def test_they_go_on_with_another_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        dying, other = fleet.decode
        dying.at["commit 2"] = ends_its_engine(dying)
        while not dying.requests:
            assert is_told(Answer.of(await ask(fleet, output=WANTED), 0.0))
        assert other.requests[-1].num_logprobs == 2
        assert other.requests[-1].HasField("resume")

    run(body, num_decode=2)


def test_a_worker_that_leaves_them_out_breaks_the_protocol() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            del response.commit.logprobs[1:]
            return response

        bad, good = fleet.decode
        bad.twist = twist
        for _ in range(2):  # one of them begins on the bad one
            assert is_told(Answer.of(await ask(fleet, output=WANTED), 0.0))
        assert bad.requests and len(good.requests) == 2

    run(body, num_decode=2)


def test_the_prompt_comes_first_where_it_is_asked_for() -> None:
    async def body(fleet: FakeFleet) -> None:
        echo = pb.OutputOptions(echo=True, token_ids=True)
        asked = request(request_id="mine", prompt="how many?", output=echo)
        answer = await fleet.generation.Generate(asked, timeout=30)
        assert (answer.echo.text, answer.text) == ("how many?", TEXT)
        assert answer.echo.token_ids == fleet.decode[0].requests[0].prompt_token_ids
        await fleet.store.until(lambda held: held["mine"].state == "finished")
        wrapped = pb.GenerateStreamRequest(request=asked)
        events = [event async for event in fleet.generation.GenerateStream(wrapped, timeout=30)]
        assert events[0].echo == answer.echo
        assert not any(event.HasField("echo") for event in events[1:])
        bare = await ask(fleet, prompt=None, prompt_token_ids=pb.TokenIds(ids=ids_of("ab")),
                         output=pb.OutputOptions(echo=True))  # fmt: skip
        assert (bare.echo.text, list(bare.echo.token_ids)) == ("ab", [])
        chat = await ask(fleet, prompt=None, chat=Chat().user("how many?").to_input(),
                         output=pb.OutputOptions(echo=True))  # fmt: skip
        assert "how many?" in chat.echo.text

    run(body)


def test_a_worker_that_tells_no_log_probabilities_takes_no_tokens_along() -> None:
    """Such as one of an earlier version: another one continues at the client's position."""

    async def body(fleet: FakeFleet) -> None:
        def bare(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.HasField("commit"):
                response.commit.ClearField("logprobs")
            return response

        fleet.decode[0].twist = bare
        answer = await ask(fleet, output=WANTED)
        assert answer.text == TEXT
        assert len(fleet.decode[0].requests) == len(fleet.decode[1].requests) == 1

    run(body, num_decode=2)
