"""Chunks of OpenAI's API as values: places and bytes of tokens."""

from __future__ import annotations

import pytest
from router.fake_model import PAD, byte_tokenizer, ids_of
from router.test_detokenizer import byte_fallback_tokenizer

from effuse.protos.errors import InvalidRequest
from effuse.router.openai_answers import Rendering, error_body
from effuse.router.openai_requests import Endpoint, Json, request_of
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2 as pb

BYTES = Tokenizer(byte_tokenizer())
A, B, C, D, *PARTS = ids_of("abcd\N{EURO SIGN}")
FALLBACK = byte_fallback_tokenizer()
CAT, *EURO = map(FALLBACK.token_to_id, ["▁cat", "<0xE2>", "<0x82>", "<0xAC>"])
PART = "\N{REPLACEMENT CHARACTER}"


def rendering(endpoint: Endpoint, tokenizer: Tokenizer = BYTES, **fields: object) -> Rendering:
    asked: Json = {"stream": True, **fields}
    asked |= {"prompt": "hi"} if endpoint == "completion" else {"messages": [MESSAGE]}
    return Rendering(request_of(asked, endpoint), "req-1", 0, tokenizer)


MESSAGE = {"role": "user", "content": "hi"}


def commit(text: str, *tokens: int, answer: int = 0) -> pb.GenerateStreamResponse:
    told = [pb.TokenLogprobs(logprob=-1.0) for _ in tokens]
    said = pb.BlockCommit(text=text, num_tokens=len(tokens), token_ids=tokens, logprobs=told)
    return pb.GenerateStreamResponse(commit=said, answer_index=answer)


def test_places_of_tokens_do_not_depend_on_text_that_waits_for_a_stop_string() -> None:
    drawn = rendering("completion", logprobs=0)
    echo = pb.GenerateStreamResponse(echo=pb.PromptEcho(text="hi"))
    events = [echo, commit("ab", A, B, C), commit("", D), commit("cda", A)]
    chunks = [chunk["choices"][0] for event in events for chunk in drawn.chunks(0, event, 3)]
    places = [one["logprobs"]["text_offset"] for one in chunks if one["logprobs"]]
    assert places == [[2, 3, 4], [5], [6]]
    assert "".join(one["text"] for one in chunks) == "hiabcda"


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "places"),
    [
        (BYTES, [A, *PARTS, B, PAD, C], [2, 3, 3, 3, 4, 5, 5]),
        (BYTES, [PARTS[0], A, *PARTS, B], [2, 3, 4, 4, 4, 5]),  # one part that stays alone
        (Tokenizer(FALLBACK), [CAT, *EURO, CAT, CAT], [2, 5, 5, 5, 6, 10]),
    ],
)
def test_places_of_tokens_are_those_of_their_text(
    tokenizer: Tokenizer, tokens: list[int], places: list[int]
) -> None:
    """In a stream of any pieces and in an answer as a whole."""
    echo = pb.PromptEcho(text="hi")
    for step in (1, 2, len(tokens)):
        drawn = rendering("completion", tokenizer, logprobs=0)
        events = [commit("", *tokens[at : at + step]) for at in range(0, len(tokens), step)]
        assert list(drawn.chunks(0, pb.GenerateStreamResponse(echo=echo), 3))
        chunks = [chunk["choices"][0] for event in events for chunk in drawn.chunks(0, event, 3)]
        assert [place for one in chunks for place in one["logprobs"]["text_offset"]] == places
    said = commit("", *tokens).commit
    whole = pb.GenerateResponse(
        echo=echo, token_ids=tokens, logprobs=said.logprobs, finish_reason=pb.FINISH_REASON_STOP
    )
    (choice,) = rendering("completion", tokenizer, logprobs=0).whole([whole])["choices"]
    assert choice["logprobs"]["text_offset"] == places


def test_a_part_of_a_character_has_no_bytes() -> None:
    drawn = rendering("chat", logprobs=True)
    (chunk,) = drawn.chunks(0, commit("a", A, PARTS[0]), 3)
    told = chunk["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in told] == [[97], None]


def test_the_likeliest_of_several_tokens_with_one_text_counts() -> None:
    drawn = rendering("completion", logprobs=3)
    event = commit("a", A)
    event.commit.logprobs[0].top_token_ids.extend([PARTS[1], A, PARTS[0]])
    event.commit.logprobs[0].top_logprobs.extend([-0.5, -1.0, -3.0])
    (chunk,) = drawn.chunks(0, event, 3)
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{PART: -0.5, "a": -1.0}]


@pytest.mark.parametrize("count", [0, 1])
def test_the_drawn_token_stands_beside_the_likeliest(count: int) -> None:
    drawn = rendering("completion", logprobs=count)
    event = commit("a", A)
    event.commit.logprobs[0].top_token_ids.extend([B][:count])
    event.commit.logprobs[0].top_logprobs.extend([-0.5][:count])
    (chunk,) = drawn.chunks(0, event, 3)
    likeliest = {"b": -0.5} if count else {}
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{**likeliest, "a": -1.0}]


def test_usage_counts_the_tokens_up_to_each_chunk_if_each_has_it() -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    drawn = rendering("completion", logprobs=0, n=2, stream_options=options)
    end = pb.Finished(finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(completion_tokens=3))
    events = [
        commit("ab", A, B),
        commit("c", C, answer=1),
        commit("c", C),
        pb.GenerateStreamResponse(finished=end),
    ]
    chunks = [chunk for event in events for chunk in drawn.chunks(0, event, 7)]
    usages = [one["usage"] for one in (*chunks, drawn.last_chunk() or {})]
    assert [one["prompt_tokens"] for one in usages] == [7] * 5
    assert [one["completion_tokens"] for one in usages] == [2, 3, 4, 4, 4]
    assert [one["total_tokens"] for one in usages] == [9, 10, 11, 11, 11]


def test_the_message_of_an_error_is_cut() -> None:
    for length in (5, 1000, 1001, 100_000):
        error = InvalidRequest.of("", "\N{EURO SIGN}" * length)
        told = error_body(error)["error"]["message"]
        assert len(told) <= 1000 and told.endswith(" ...") == (length > 1000)
        assert (told == error.message) == (length <= 1000)
