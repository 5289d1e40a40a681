"""An engine process without a model: the first token of an attempt controls its behaviour.

Serves both roles. Pages are counted, so that a front that forgets an attempt is seen.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from slowness import patient

from effuse.config.decoding import DecodeSettings, DecodingDefaults
from effuse.kvtransfer.messages import Field, KVPart, PageRef, ReceiverAddress, Reservation, Shard
from effuse.placement.records import Load, ModelInfo
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.messages import (
    Abort,
    AbortDone,
    BlockState,
    Committed,
    CoreEvent,
    Draft,
    Failed,
    FailureCode,
    Finished,
    PrefillDone,
    PromptProgress,
    PromptPushed,
    PushRehearsal,
    PushTo,
    Ready,
    ReceiverGone,
    Reserved,
    StartDecode,
    StartPrefill,
    StartRehearsal,
    ToEngine,
    Verified,
    WriterGone,
)
from effuse.worker.watchdog import Pulse

CRASH, HANG, STAND_STILL, NO_ROOM, ENDLESS, BROKEN = 900, 901, 902, 903, 904, 905
COMPILE, LONG_FORWARD, KILLED, SLOW = 906, 907, 908, 909
SLOW_S = 0.04  # a step in which such an answer takes part
LONG_S = patient(6.0)
PAGES = 8


class FakeCore:
    """Commits the token 7 until the answer is long enough."""

    def __init__(self, incarnation: str, pulse: Pulse, connector: str) -> None:
        self._incarnation = incarnation
        self._connector = connector
        self._pulse = pulse
        self._out: list[CoreEvent] = []
        self._decodes: dict[str, StartDecode] = {}  # verified ones, that step
        # For a peer.
        self._waiting: dict[str, StartDecode | StartPrefill | StartRehearsal] = {}
        self._done: dict[str, int] = {}
        self._quarantined: set[str] = set()
        self.gone_receivers: list[str] = []
        self._steps = 0
        self._stands_still = False

    def handle(self, message: ToEngine) -> None:
        match message:
            case StartDecode():
                self._start_decode(message)
            case StartPrefill():
                self._start(message)
                self._report_part(message)
                self._out.append(PrefillDone(attempt=message.attempt, queue_s=0.0, compute_s=0.5))
            case PushTo():
                attempt = message.reservation.attempt
                self._waiting.pop(attempt.transfer_id)
                self._out.append(PromptPushed(attempt=attempt, pages=2, bytes=64, push_s=0.25))
            case StartRehearsal():
                self._start_rehearsal(message)
            case PushRehearsal():
                attempt = message.reservation.attempt
                self._out.append(
                    PromptPushed(
                        attempt=attempt, pages=2, bytes=64, push_s=0.25,
                        transport=" without ".join(["fake", *self.gone_receivers]),
                    )
                )  # fmt: skip
            case Abort():
                self._abort(message)
            case WriterGone():
                self._quarantined.discard(message.transfer_id)
            case ReceiverGone(incarnation=incarnation):
                self.gone_receivers.append(incarnation)

    def _start(self, message: StartDecode | StartPrefill) -> None:
        match message.prompt_token_ids[0]:
            case 900:
                os._exit(3)
            case 901:
                time.sleep(1000)
            case 902:
                self._stands_still = True
            case 906:
                with self._pulse.during("compiling"):
                    time.sleep(LONG_S)
            case 907:
                for layer in range(30):
                    time.sleep(LONG_S / 30)
                    self._pulse.mark(layer)
            case 908:  # as by a kernel out of memory
                os.kill(os.getpid(), signal.SIGKILL)
        self._waiting[message.attempt.transfer_id] = message

    def _report_part(self, message: StartPrefill | StartDecode) -> None:
        if message.progress:
            self._out.append(PromptProgress(attempt=message.attempt, computed_tokens=4))

    def _start_decode(self, message: StartDecode) -> None:
        if message.prompt_token_ids[0] == NO_ROOM:
            self._fail(message, "RESOURCE_EXHAUSTED", "no 3 pages are free of 8", True)
            return
        if message.prompt_token_ids[0] == BROKEN:
            self._fail(message, "INTERNAL", "the secret of the engine", False)
            return
        self._start(message)
        if message.resume is not None:
            self._done[message.attempt.transfer_id] = len(message.resume.committed_token_ids)
        self._out.append(Reserved(reservation=self._reservation(message)))
        if message.writer is None:
            self._out.append(Verified(attempt=message.attempt, bytes=0, pages=0, handoff_s=0.0))
            self._decodes[message.attempt.transfer_id] = message
            del self._waiting[message.attempt.transfer_id]

    def _start_rehearsal(self, message: StartRehearsal) -> None:
        if message.most_pages == NO_ROOM:
            self._fail(message, "RESOURCE_EXHAUSTED", "requests need the pages", True)
            return
        self._out.append(Reserved(reservation=self._reservation(message)))
        if message.most_pages == ENDLESS:  # no writer
            self._waiting[message.attempt.transfer_id] = message
        else:
            verified = Verified(attempt=message.attempt, bytes=64, pages=2, handoff_s=0.25)
            self._out.append(verified)

    def _shard(self) -> Shard:
        address = ReceiverAddress(connector=self._connector, endpoint="tcp://127.0.0.1:1")
        return Shard(address=address, part=KVPart(0, 1, 0, 1), page_bytes=32)

    def _reservation(self, message: StartDecode | StartRehearsal) -> Reservation:
        return Reservation(
            attempt=message.attempt,
            incarnation=self._incarnation,
            shards=(self._shard(),),
            num_pool_pages=PAGES,
            pages=(PageRef(3, 1), PageRef(4, 9)),
            fingerprint=(Field("weights", "w"),),
            digest_seed=0,
            lease_s=30.0,
        )

    def _fail(
        self, message: StartDecode | StartRehearsal, code: FailureCode, text: str, retryable: bool
    ) -> None:
        failed = Failed(attempt=message.attempt, code=code, message=text, retryable=retryable)
        self._out.append(failed)

    def _abort(self, message: Abort) -> None:
        name = message.attempt.transfer_id
        waiting, decode = self._waiting.pop(name, None), self._decodes.pop(name, None)
        if isinstance(waiting, StartDecode | StartRehearsal) and self._connector != "zmq":
            self._quarantined.add(name)
        known = waiting or decode
        self._out.append(AbortDone(attempt=message.attempt, was_running=known is not None))

    def is_working(self) -> bool:
        return False

    def step(self) -> bool:
        if self._stands_still or not self._decodes:
            return False
        self._steps += 1
        if any(one.prompt_token_ids[0] == SLOW for one in self._decodes.values()):
            time.sleep(SLOW_S)
        for name, decode in list(self._decodes.items()):
            self._advance(name, decode)
        return True

    def _advance(self, name: str, decode: StartDecode) -> None:
        done = self._done.get(name, 0)
        state = BlockState((7, 99), b"\x02", True, done)
        if not done:
            self._report_part(decode)
        if decode.drafts:
            self._out.append(Draft(attempt=decode.attempt, token_offset=done, block=state))
        self._out.append(
            Committed(
                attempt=decode.attempt,
                token_offset=done,
                token_ids=(7,),
                forward_passes=done + 1,
                frontier=(state,),
            )
        )
        self._done[name] = done + 1
        if decode.prompt_token_ids[0] == ENDLESS:
            time.sleep(0.002)
        elif done + 1 == decode.stopping.max_tokens:
            del self._decodes[name]
            self._out.append(
                Finished(
                    attempt=decode.attempt,
                    stopped=False,
                    num_tokens=done + 1,
                    forward_passes=done + 1,
                    preemptions=0,
                )
            )

    def outbox(self) -> Sequence[CoreEvent]:
        out, self._out = self._out, []
        return out

    def load(self) -> Load:
        running = len(self._decodes) + len(self._waiting)
        return Load(
            running=running,
            runnable=1 if self._stands_still else len(self._decodes),
            total_pages=PAGES,
            free_pages=max(0, PAGES - running - len(self._quarantined)),
            quarantined_pages=len(self._quarantined),
            steps=self._steps,
        )

    def close(self) -> None:
        print("engine closed", file=sys.stderr, flush=True)


def build(config: WorkerConfig, incarnation: str, pulse: Pulse) -> Engine:
    """Fails like a wrong checkpoint if the model has that name."""
    if config.served_model_name == "missing":
        raise ValueError("no such checkpoint")
    if config.served_model_name == "crashes":
        os._exit(9)
    if config.served_model_name == "slow":
        time.sleep(1000)
    connector = "zmq" if config.connector == "auto" else config.connector
    return Engine(
        FakeCore(incarnation, pulse, connector),
        Ready(
            model=ModelInfo(
                name=config.served_model_name or "fake",
                architecture="sdar",
                block_size=2,
                max_model_len=64,
                vocab_size=1000,
                mask_token_id=99,
                eos_token_ids=(1,),
                prompt_attention="causal_blocks",
                defaults=DecodingDefaults(
                    settings=DecodeSettings(algorithm="d2f", denoising_steps=2)
                ),
            ),
            fingerprint=(("weights", "w"),),
            page_size=config.page_size,
            total_pages=PAGES,
            connector=connector,
        ),
    )


if __name__ == "__main__":
    main(WorkerConfig, build)
