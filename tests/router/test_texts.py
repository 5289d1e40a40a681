"""Text to ids and back, like Generate; and the end of a request by its id."""

from __future__ import annotations

import asyncio

import pytest
from router.asking import ask, failure, request
from router.fake_model import EOS, VOCAB_SIZE, ids_of
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until

from effuse.client.chat import Chat
from effuse.placement.records import PlacementRecord
from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

CHAT = Chat().user("how many?").to_input()
THEIRS = PlacementRecord(
    request_id="theirs", attempt=1, transfer_id="t", router_id="router-x", state="running",
    model="fake",
)  # fmt: skip


def test_text_and_chats_have_the_ids_that_a_worker_gets() -> None:
    async def body(fleet: FakeFleet) -> None:
        for asking in (
            model_pb2.TokenizeRequest(prompt="how many?", model="fake"),
            model_pb2.TokenizeRequest(chat=CHAT),
            model_pb2.TokenizeRequest(prompt="a<|eos|>", parse_special_tokens=True),
        ):
            told = await fleet.models.Tokenize(asking, timeout=30)
            given = {asking.WhichOneof("input"): getattr(asking, str(asking.WhichOneof("input")))}
            if "chat" in given:
                given["prompt"] = None
            await ask(fleet, parse_special_tokens=asking.parse_special_tokens, **given)
            sent = fleet.decode[0].requests[-1].prompt_token_ids
            assert told.token_ids == sent and len(sent) > 1
            assert told.max_model_len == 256

    run(body)


def test_ids_have_the_text_of_an_answer() -> None:
    async def body(fleet: FakeFleet) -> None:
        asking = model_pb2.DetokenizeRequest(token_ids=[*ids_of("é three"), EOS])
        assert (await fleet.models.Detokenize(asking, timeout=30)).text == "é three"
        assert (await fleet.models.Detokenize(model_pb2.DetokenizeRequest(), timeout=30)).text == ""

    run(body)


@pytest.mark.parametrize(
    ("asking", "field"),
    [
        (model_pb2.TokenizeRequest(), "prompt"),
        (model_pb2.TokenizeRequest(prompt=""), "prompt"),
        (model_pb2.TokenizeRequest(prompt="a", model="no name"), "model"),
        (model_pb2.DetokenizeRequest(token_ids=[1, VOCAB_SIZE]), "token_ids[1]"),
        (model_pb2.DetokenizeRequest(token_ids=[1] * 257), "token_ids"),
    ],
    ids=["nothing", "empty", "no model", "no id", "too many"],
)
def test_bad_input_names_its_field(
    asking: model_pb2.TokenizeRequest | model_pb2.DetokenizeRequest, field: str
) -> None:
    async def body(fleet: FakeFleet) -> None:
        if isinstance(asking, model_pb2.TokenizeRequest):
            error = await failure(fleet.models.Tokenize(asking, timeout=30))
        else:
            error = await failure(fleet.models.Detokenize(asking, timeout=30))
        assert isinstance(error, errors.InvalidRequest)
        assert [one.field for one in error.violations] == [field]
        assert "prompt_token_ids" not in error.message  # which neither call has

    run(body)


def test_who_asks_for_the_ids_of_a_chat_is_not_told_to_send_ids() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.router.tokenizer._chat_template = None
        fleet.router.tokenizer.has_chat_template = False
        asking = model_pb2.TokenizeRequest(chat=CHAT)
        error = await failure(fleet.models.Tokenize(asking, timeout=30))
        assert isinstance(error, errors.InvalidRequest)
        assert "model 'fake' has no chat template" in error.message
        assert "prompt_token_ids" not in error.message

    run(body)


async def cancel(fleet: FakeFleet, name: str) -> pb.CancelRequestResponse:
    return await fleet.generation.CancelRequest(
        pb.CancelRequestRequest(request_id=name), timeout=30
    )


def test_a_request_is_ended_by_its_id_on_its_workers_too() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached = asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event(), reached)
        asking = asyncio.create_task(ask(fleet, request_id="mine"))
        await reached.wait()
        assert (await cancel(fleet, "mine")).was_running
        error = await failure(asking)
        assert type(error) is errors.EndedById and error.code.name == "ABORTED"
        assert not error.retryable
        await fleet.decode[0].abort_came.wait()
        await fleet.idle()
        again = await cancel(fleet, "mine")
        assert (again.was_running, again.state) == (False, pb.REQUEST_STATE_CANCELLED)

    run(body)


def test_a_request_that_waits_is_ended_and_gives_its_place_back() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["start"] = holds(go, reached)
        first = asyncio.create_task(ask(fleet))
        await reached.wait()
        second = asyncio.create_task(ask(fleet, request_id="second"))
        await until(lambda: fleet.router.admission.num_waiting == 1)
        assert (await cancel(fleet, "second")).was_running
        assert type(await failure(second)) is errors.EndedById
        assert not fleet.router.admission.num_waiting
        go.set()
        await first

    run(body, max_concurrent_requests=1)


def test_a_request_of_another_router_is_named_and_left_alone() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.store.placements["theirs"] = THEIRS
        found = await cancel(fleet, "theirs")
        assert (found.was_running, found.router) == (False, "router-x")
        assert type(await failure(cancel(fleet, "nobody's"))) is errors.InvalidRequest
        assert type(await failure(cancel(fleet, "nobodys"))) is errors.NotFound

    run(body)


def test_a_class_moves_a_request_in_the_queue() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached, order = asyncio.Event(), asyncio.Event(), list[str]()
        fleet.decode[0].at["start"] = holds(go, reached)

        async def ask_as(priority: pb.Priority) -> None:
            await fleet.generation.Generate(request(priority=priority), timeout=30)
            order.append(pb.Priority.Name(priority))

        async with asyncio.TaskGroup() as group:
            group.create_task(ask_as(pb.PRIORITY_UNSPECIFIED))
            await reached.wait()
            for one in (pb.PRIORITY_LOW, pb.PRIORITY_NORMAL, pb.PRIORITY_HIGH):
                group.create_task(ask_as(one))
            await until(lambda: fleet.router.admission.num_waiting == 3)
            go.set()
        assert [one.removeprefix("PRIORITY_") for one in order[1:]] == ["HIGH", "NORMAL", "LOW"]

    run(body, max_concurrent_requests=1)
