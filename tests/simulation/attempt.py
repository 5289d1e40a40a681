"""One attempt at a request, as a router of the simulation makes it: calls back, and no waits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from effuse.config.decoding import Sampling, Stopping
from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import WorkerRecord
from effuse.router.request_states import State
from effuse.worker.messages import CoreEvent, PromptPushed, Reserved, StartDecode, StartPrefill

from .clock import Violation
from .fleet import Writer
from .network import Call
from .pages import TOKENS
from .worker import Lost

if TYPE_CHECKING:
    from .router import Routed, Router


class Attempt:
    """One attempt, with a call to each of its workers."""

    def __init__(
        self,
        router: Router,
        routed: Routed,
        number: int,
        prefill: WorkerRecord | None,
        decode: WorkerRecord,
    ) -> None:
        name = routed.request.id
        self.id = AttemptId(name, number, f"{name}-{number}-{router.id}")
        self._router = router
        self._fleet = router.fleet
        self._routed = routed
        self._prefill = prefill
        self._decode = decode
        self._calls: dict[str, Call] = {}
        self._workers: list[str] = []
        self._is_over = False
        self._is_pushed = False

    def start(self) -> None:
        """The prompt goes to its prefill worker first, decode is asked a moment later."""
        question, prefill, decode = self._routed.question, self._prefill, self._decode
        workers = [one.worker_id for one in (prefill, decode) if one is not None]
        self._router.count(workers, 1)
        self._workers = workers
        writer = None
        if prefill is not None:
            writer = Writer(prefill.worker_id, prefill.incarnation)
            if not self._routed.request.attempts.is_patient:
                self._send_prompt(prefill)
        message = StartDecode(
            attempt=self.id,
            prompt_token_ids=question.prompt(),
            stopping=Stopping(max_tokens=question.max_tokens, stop_token_ids=frozenset()),
            sampling=Sampling(),
            settings=question.settings,
            writer=None if writer is None else writer.incarnation,
            resume=self._routed.resumption(),
        )
        self._call(decode, message, writer)

    def _send_prompt(self, prefill: WorkerRecord) -> None:
        prompt = self._routed.question.prompt()
        if self._fleet.fabric.mishaps.mixes_up(self.id.transfer_id):
            prompt = tuple(token + TOKENS for token in prompt)
        self._call(prefill, StartPrefill(attempt=self.id, prompt_token_ids=prompt), None)

    def end(self) -> None:
        """Ends both calls, and has both workers end the attempt."""
        if self._is_over:
            return
        self._is_over = True
        self._router.count(self._workers, -1)
        for worker_id, call in self._calls.items():
            call.cancel()
            self._fleet.abort(
                self._router.host, worker_id, self.id, lambda drained, incarnation: None
            )

    def break_off(self) -> None:
        """Its router has died, and with it both calls."""
        self._is_over = True
        for call in self._calls.values():
            call.break_off()

    def _call(
        self, worker: WorkerRecord, message: StartPrefill | StartDecode, writer: Writer | None
    ) -> None:
        host = worker.worker_id
        call = self._calls[host] = Call(self._fleet.network, self._router.host, host)

        def told(event: CoreEvent | Lost) -> None:
            if not self._is_over:
                self._take(worker, event)

        def arrive() -> None:
            front = self._fleet.fronts[host]
            if front.accept(call):
                front.when_awake(
                    partial(front.start, message, worker.incarnation, writer, call, told)
                )
            else:
                call.break_off()

        call.on_server_lost = lambda: told(Lost(f"{host} is gone"))
        call.ask(arrive)

    def _take(self, worker: WorkerRecord, event: CoreEvent | Lost) -> None:
        if isinstance(event, Lost):
            self._fail(worker, event)
            return
        if worker is self._prefill:
            self._is_pushed |= isinstance(event, PromptPushed)
            return
        self._routed.take(event)
        if isinstance(event, Reserved) and self._prefill is not None:
            self._pass_on(self._prefill, event)
        if self._routed.request.answer.is_ended:
            self._is_over = True
            self._router.count(self._workers, -1)

    def _pass_on(self, prefill: WorkerRecord, reserved: Reserved) -> None:
        host = prefill.worker_id
        if host not in self._calls:
            self._send_prompt(prefill)

        def arrive() -> None:
            front = self._fleet.fronts[host]
            front.when_awake(lambda: front.reserve(reserved.reservation))

        self._calls[host].ask(arrive)

    def _fail(self, worker: WorkerRecord, lost: Lost) -> None:
        is_after_handoff = self._routed.request.answer.state is State.DECODING
        if worker is self._prefill and (self._is_pushed or is_after_handoff):
            return  # the end of its call does not matter
        if not lost.is_retryable and not self._fleet.fabric.mishaps.are_any:
            raise Violation(f"{self.id} failed for good at {worker.worker_id}: {lost.text}")
        self.end()
        self._routed.request.attempts.is_patient |= lost.is_unreserved
        if not lost.is_unreserved:
            self._router.num_lost += 1
            self._router.avoid(worker.worker_id)
        self._routed.lose(f"{worker.worker_id}: {lost.text}")
