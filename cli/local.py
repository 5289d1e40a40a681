"""A decode engine in this process, prefilling for itself: no fleet, no wire, no handoff.

The yardstick of `effuse eval` and of `effuse bench --baseline`. Speaks token ids, not text.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from effuse.decode_worker.build import make_engine
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.receiver import HandoffReceiver, ReceiverIdentity
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.worker.engine_core import Forward
from effuse.worker.messages import Committed, Failed, Finished, Sampling, Settings, StartDecode

PAGE_SIZE = 16
_MAX_REQUEST_S = 3600.0
_IDENTITY = ReceiverIdentity(incarnation="local", fingerprint=(), page_bytes=0, lease_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, greedy."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    settings: Settings


@dataclass(slots=True)
class LocalAnswer:
    """What came of one request; times in seconds from when it was given to the engine."""

    began_s: float
    token_ids: list[int] = field(default_factory=list)
    commits: list[tuple[int, int]] = field(default_factory=list)  # (tokens, forwards) so far
    forward_passes: int = 0
    first_block_s: float = 0.0
    total_s: float = 0.0


class LocalEngineError(Exception):
    """The engine refused a request or failed at it."""


class LocalEngine:
    """Runs many requests, at most `max_num_seqs` of them at a time."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_num_seqs: int,
        max_model_len: int,
        observe: Callable[[Forward], Forward] = lambda forward: forward,
    ) -> None:
        """`observe` may put something between the engine and its forward that looks on."""
        config = model.config
        num_pages = max_num_seqs * (max_model_len // PAGE_SIZE + 1)
        limits = DecodeLimits(
            max_num_batched_tokens=max(2048, max_model_len),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            block_size=config.block_size,
        )
        pool = PagePool(num_pages)
        memory = PageMemory(layout_of(model), num_pages, model.device)
        runner = ModelRunner(
            model, memory.layer_views(), page_size=PAGE_SIZE, block_size=config.block_size
        )
        self._engine = make_engine(
            model,
            memory.layer_views(),
            observe(runner),
            pool,
            limits,
            HandoffReceiver(pool, None, _IDENTITY),
            on_device=model.device.type == "cuda",
            now=time.monotonic,
            max_request_s=_MAX_REQUEST_S,
        )
        self._stops = tuple(config.eos_token_ids)
        self._max_num_seqs = max_num_seqs

    def run(self, asks: Iterable[Ask], on_done: Callable[[], None]) -> list[LocalAnswer]:
        """Answer every request; answers are in their order. Raises LocalEngineError.

        `on_done` is called once for each request, when it is finished.
        """
        waiting = deque(enumerate(asks))
        answers: dict[int, LocalAnswer] = {}
        unfinished = 0
        while waiting or unfinished:
            while waiting and unfinished < self._max_num_seqs:
                index, ask = waiting.popleft()
                self._engine.handle(self._start(index, ask))
                answers[index] = LocalAnswer(began_s=time.monotonic())
                unfinished += 1
            self.step()
            done = self._gather(answers)
            unfinished -= done
            for _ in range(done):
                on_done()
        return [answers[index] for index in range(len(answers))]

    def step(self) -> bool:
        """One iteration of the engine; False if there was nothing to do."""
        return self._engine.step()

    def _start(self, index: int, ask: Ask) -> StartDecode:
        name = str(index)
        return StartDecode(
            attempt=AttemptId(request_id=name, attempt=1, transfer_id=name),
            prompt_token_ids=ask.prompt_token_ids,
            max_tokens=ask.max_tokens,
            stop_token_ids=self._stops,
            sampling=Sampling(),
            settings=ask.settings,
            writer=None,
        )

    def _gather(self, answers: dict[int, LocalAnswer]) -> int:
        """Take in what the engine said; how many requests it finished."""
        finished = 0
        for event in self._engine.outbox():
            match event:
                case Committed(attempt=attempt):
                    _commit(answers[int(attempt.request_id)], event)
                case Finished(attempt=attempt):
                    answer = answers[int(attempt.request_id)]
                    answer.forward_passes = event.forward_passes
                    answer.total_s = time.monotonic() - answer.began_s
                    finished += 1
                case Failed():
                    raise LocalEngineError(f"{event.code}: {event.message}")
                case _:
                    pass
        return finished


def _commit(answer: LocalAnswer, commit: Committed) -> None:
    if not answer.commits:
        answer.first_block_s = time.monotonic() - answer.began_s
    answer.token_ids.extend(commit.token_ids)
    answer.commits.append((len(answer.token_ids), commit.forward_passes))


def layout_of(model: Transformer) -> KVLayout:
    """How this model's KV lies in a page."""
    config = model.config
    dtype = str(model.dtype).removeprefix("torch.")
    return KVLayout(
        "unified", config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, dtype
    )


def pick_device() -> tuple[torch.device, torch.dtype]:
    """Where to compute, and in what: a GPU in bfloat16, or one CPU thread in float32."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    torch.set_num_threads(1)
    return torch.device("cpu"), torch.float32
