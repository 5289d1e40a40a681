"""Several answers to one request, side by side: each by itself, their events in one stream.

Each is placed, lost, resumed and ended like a request of its own. The first one brings the prompt's
KV to a decode worker, and the others join it as soon as that worker holds pages for it. If one of
them fails for good, or the client goes, all end. Not here: one answer (`answer.py`), the sharing
within a decode worker (`decode_worker/shared_prompts.py`)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace

from effuse.router.answer import AnswerRun
from effuse.router.client import Listener
from effuse.router.detokenizer import AnswerText
from effuse.router.parts import Parts
from effuse.router.policy import Placement, WorkerLife
from effuse.router.request import AnswerAttempts, AnswerState, Costs, Request
from effuse.router.request_states import State
from effuse.v1 import generation_pb2 as pb


class SideBySide(Listener):
    """All answers to one request, which is admitted and knows its prompt. Run once. `on_end` is
    called for each answer that ends well, because others may use its slot from then on."""

    def __init__(
        self,
        parts: Parts,
        request: Request,
        client: Listener,
        on_end: Callable[[Request], None],
    ) -> None:
        self._parts = parts
        self._client = client
        self._on_end = on_end
        self._writing = asyncio.Lock()  # a call takes one message at a time
        self._is_reserved = asyncio.Event()
        self._place: WorkerLife | None = None  # where the prompt's KV comes to
        asked, tokenizer = request.asked, parts.tokenizer
        texts = (
            AnswerText(tokenizer, asked.stops, asked.min_tokens) for _ in range(asked.num_answers)
        )
        # A canvas has no KV of a prompt that others could read.
        group = "" if asked.settings.is_canvas else secrets.token_hex(16)
        self._answers = split(request, texts, group)
        self._num_left = len(self._answers)

    async def run(self) -> pb.GenerateStreamResponse:
        """Sends the client all events except the last one, which is returned; raises `EffuseError`
        or `ClientGone`."""
        first, *others = self._answers
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run(first, self))]
                running += [group.create_task(self._follow(one)) for one in others]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        return next(last for task in running if (last := task.result()) is not None)

    async def _follow(self, one: Request) -> pb.GenerateStreamResponse | None:
        if one.attempts.group:
            await self._is_reserved.wait()  # the request's deadline ends it
            one.attempts.beside = self._place
        return await self._run(one, _Follower(self))

    async def _run(self, one: Request, told: Listener) -> pb.GenerateStreamResponse | None:
        """The last event of all, where this answer is the last one to end."""
        ended = await AnswerRun(self._parts, one, told).run()
        self._on_end(one)
        self._num_left -= 1
        self._forget_place()
        if not self._num_left:
            return ended
        await self.send(ended)
        return None

    def _forget_place(self) -> None:
        """Once none of them is there, the prompt's KV is gone. Answers without a seat then go to
        any worker, with a new handoff."""
        if not any(_is_at(one, self._place) for one in self._answers):
            for one in self._answers:
                one.attempts.beside = None

    # Events of the first answer, and some of the others.

    async def send(self, event: pb.GenerateStreamResponse) -> None:
        """Sends one event; raises `ClientGone`."""
        async with self._writing:
            await self._client.send(event)

    def begin_attempt(self, placement: Placement, transfer_id: str) -> None:
        """The request counts as being at the workers of its first answer."""
        self._client.begin_attempt(placement, transfer_id)

    def note_reserved(self, placement: Placement) -> None:
        """Others may join it there from now on; wherever it goes later, they live by themselves."""
        if self._place is None:
            self._place = placement.decode.life
            self._is_reserved.set()


class _Follower(Listener):
    """The listener of the other answers, whose attempts are not recorded."""

    def __init__(self, all_answers: SideBySide) -> None:
        self._all = all_answers

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        """Sends one event; raises `ClientGone`."""
        return self._all.send(event)


def _is_at(one: Request, place: WorkerLife | None) -> bool:
    is_placed = one.answer.state in (State.STARTING, State.PREFILLING, State.DECODING)
    return place is not None and is_placed and one.attempts.decode_worker == place[0]


def split(request: Request, texts: Iterable[AnswerText], group: str) -> tuple[Request, ...]:
    """The answers to a request, one for each of `texts`; they have its numbers of attempts in
    common. `group`: by which decode workers know that they share their prompt."""
    answers = tuple(
        Request(
            id=request.id,
            asked=replace(
                request.asked, sampling=replace(request.asked.sampling, answer_index=index)
            ),
            arrived=request.arrived,
            limit_s=request.limit_s,
            deadline=request.deadline,
            answer=AnswerState(text=text),
            tenant=request.tenant,
            prompt=request.prompt,
            attempts=AnswerAttempts(numbers=request.attempts.numbers, group=group),
            costs=Costs(queue_s=request.costs.queue_s),
        )
        for index, text in enumerate(texts)
    )
    request.answers = answers
    return answers


def add_up(request: Request) -> None:
    """Adds up the costs and attempts of a request's answers, if it has several."""
    if not request.answers:
        return
    first = request.answers[0].attempts
    attempts = request.attempts
    attempts.prefill_worker, attempts.decode_worker = first.prefill_worker, first.decode_worker
    attempts.count = sum(one.attempts.count for one in request.answers)
    request.costs = Costs.sum_of([one.costs for one in request.answers], request.costs.queue_s)
