"""The relay between a client and fake workers: one good answer, whatever dies below."""

from __future__ import annotations

from router.fakes import FakeFleet, run

from effuse.v1 import generation_pb2 as pb

TEXT = "the answer is three"


async def ask(fleet: FakeFleet, **fields: object) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    return await fleet.generation.Generate(request, timeout=10)


def test_an_answer_comes_through_both_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert answer.finish_reason == pb.FINISH_REASON_STOP

    run(body)
