"""How calls to workers ended, if grpcio does not report it correctly."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from grpc.aio._call import StreamStreamCall
from router.asking import ask
from router.fake_workers import holds, once
from router.fakes import FakeFleet, run, until

from effuse.protos import errors
from effuse.router.attempt import Attempt
from effuse.router.calls import PrefillCall
from effuse.router.failures import Failure, FailureKind
from effuse.v1 import worker_pb2

TEXT = "the answer is three"


@pytest.mark.parametrize(
    "is_there, is_starting, kind",
    [
        (True, False, FailureKind.LATE),
        (True, True, FailureKind.LOST),
        (False, True, FailureKind.LOST),
    ],
    ids=["too late", "its engine ended", "it ended"],
)
def test_a_worker_whose_error_grpcio_has_lost_is_asked_how_it_is(
    is_there: bool, is_starting: bool, kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.Event()
    write = StreamStreamCall.write

    async def loses(call: Any, message: worker_pb2.PrefillRequest) -> None:
        if message.HasField("reservation") and not lost.is_set():
            call._cython_call.set_internal_error("Failed")  # as where the call has just ended
            lost.set()
            await call._raise_for_status()
        else:
            await write(call, message)

    async def body(fleet: FakeFleet) -> None:
        first, judged = fleet.prefill[0], list[Failure]()
        monkeypatch.setattr(fleet.router.fleet.standing, "note", judged.append)
        monkeypatch.setattr(StreamStreamCall, "write", loses)

        async def ends() -> None:
            await lost.wait()
            first.is_starting = is_starting
            if not is_there:
                await first.crash()
            raise errors.EngineLost("grpcio loses this")

        first.at["computed"] = once(ends)
        assert (await ask(fleet)).text == TEXT
        assert [(one.worker.worker_id, one.outcome) for one in judged] == [("p0", kind)]
        is_engine_lost = isinstance(judged[0].error, errors.EngineLost)
        assert is_engine_lost == (is_there and is_starting)

    run(body, num_prefill=2, prefill="remote")


def test_a_prompts_call_is_gone_once_the_answer_goes_on_without_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        release, reached = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 0"] = holds(fleet.prefill[0].idle)
        fleet.decode[0].at["commit 2"] = holds(release, reached)
        asked = asyncio.create_task(ask(fleet))
        await reached.wait()

        def is_gone() -> bool:
            gc.collect()  # by itself it comes only after many more objects
            return not any(type(one) is PrefillCall for one in gc.get_objects())

        await until(is_gone)
        assert not asked.done()
        release.set()
        assert (await asked).text == TEXT

    run(body, prefill="remote")


def test_an_attempt_is_gone_once_its_calls_are_without_the_garbage_collector() -> None:
    async def body(fleet: FakeFleet) -> None:
        gc.collect()
        gc.disable()
        try:
            assert (await ask(fleet)).text == TEXT
            while any(  # noqa: ASYNC110  # nothing tells of that
                type(one) is Attempt for one in gc.get_objects()
            ):
                await asyncio.sleep(0.01)
        finally:
            gc.enable()

    run(body)
