"""`effuse.LLM`: answers a batch of prompts in this process like a fleet.

The engine is a decode worker's, which prefills for itself; checks, defaults, tokens and stop
strings are the router's. So a request means the same in both.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypedDict, TypeVar, Unpack

import torch

from effuse.client.answer import Answer, Gathering
from effuse.client.params import Params, Prompt, make_request, read_prompt
from effuse.config.decoding import Algorithm, Stopping
from effuse.config.flags import from_python
from effuse.decode_worker.build import build
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.replicas import ReplicatedEngine
from effuse.decode_worker.sequence import RequestError
from effuse.kvtransfer.messages import AttemptId
from effuse.models.defaults import refuse_unserved
from effuse.protos.channels import filled
from effuse.protos.errors import InvalidRequest, NotFound
from effuse.router.client import commit_of, echo_of, finished_of
from effuse.router.request import AnswerState, EncodedPrompt, Request
from effuse.router.request_states import State
from effuse.router.tokenizer import AnswerText, Tokenizer, bundled_directory
from effuse.router.validation import encode_prompt, fit, validate
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2
from effuse.worker.attempts import to_error
from effuse.worker.config import DecodeConfig
from effuse.worker.engine_settings import Attention, Device, Dtype, KVLayoutKind
from effuse.worker.gpus import check_device
from effuse.worker.messages import Abort, Committed, CoreEvent, Failed, Finished, StartDecode

Progress = Callable[[int, int], None]  # of the number of finished answers and of all
_DEFAULTS = Params()
_MOST_REQUEST_S = 1e9  # the caller waits for its batch, for days on a slow machine
Result = TypeVar("Result")


class GroupOptions(TypedDict, total=False):
    """A decode worker's flags for several GPUs."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel: bool
    data_parallel_size: int
    decode_context_parallel_size: int


class EngineOptions(GroupOptions, total=False):
    """A decode worker's flags with these names, and its defaults."""

    device: Device
    dtype: Dtype
    block_size: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_window: int
    max_stop_ids: int
    page_size: int
    num_pages: int | None
    gpu_memory_utilization: float
    kv_layout: KVLayoutKind
    enable_prefix_caching: bool
    kv_offloading_size: float
    kv_offloading_dir_size: float
    attention: Attention
    batch_invariant: bool
    enforce_eager: bool
    default_algorithm: Algorithm | None
    served_model_name: str | None


class LLM:
    """A model in this process, for one thread at a time. `model` has its name, block size, context
    and vocabulary."""

    def __init__(
        self,
        model: Path | str | None = None,
        *,
        adapter: Path | str | None = None,
        kv_offloading_dir: Path | str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """model: checkpoint directory, or None for the bundled one. Raises TypeError for an unknown
        option or a wrong type, and ValueError, CheckpointError or TokenizerError if files or
        settings do not fit.
        """
        known = EngineOptions.__annotations__
        for name in options.keys() - known.keys():
            raise TypeError(f"LLM: expected options among {', '.join(known)}; got {name!r}")
        paths = {"model": model, "adapter": adapter, "kv_offloading_dir": kv_offloading_dir}
        given = from_python(DecodeConfig, {**paths, **options})
        directory = given["model"] = given["model"] or bundled_directory()
        # Pages never leave the process, so no connector is needed.
        config = DecodeConfig(max_request_s=_MOST_REQUEST_S, connector="zmq", **given)
        algorithm, adapted, limits = config.default_algorithm, adapter is not None, vars(config)
        refuse_unserved(directory, config.block_size, algorithm, adapted=adapted, limits=limits)
        check_device(config.device)
        self._tokenizer = Tokenizer.load(directory)
        with _threads_kept():
            engine = self._engine = build(config, "offline", connects=False)
            self._num_threads = torch.get_num_threads()  # that an engine computes with
        assert isinstance(engine.core, DecodeEngine | ReplicatedEngine), "it is a decode worker's"
        self._core, self.model = engine.core, engine.ready.model
        self._most = config.max_num_seqs * config.num_replicas
        self._busy = threading.Lock()
        self._is_closed = False
        self._num_asked = 0

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Iterable[Params] = _DEFAULTS,
        *,
        progress: Progress | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """The answers in the order of the prompts; one prompt gives a list of one. If `n` asks for
        several, the first answer has the others.

        on_answer: called with the index of each prompt and its answer, once that is complete.

        params: for all prompts, or one for each. Raises EffuseError for the first request that is
        wrong or fails; then nothing more is computed. Raises TypeError for wrong types of prompts
        or params, ValueError unless there are as many params as prompts, and RuntimeError while
        another batch is running, and after `close`.
        """
        listed = _listed(prompts)
        each = _each(params, len(listed))
        with self._alone():
            batch = [self._check(*pair) for pair in zip(listed, each, strict=True)]
            places = {id(one): at for at, answers in enumerate(batch) for one in answers}

            def ended(one: _Running) -> None:
                at = places[id(one)]
                if on_answer is not None and all(each.answer for each in batch[at]):
                    on_answer(at, self._answer(batch[at]))

            self._compute([one for answers in batch for one in answers], progress, ended)
        return [self._answer(answers) for answers in batch]

    def close(self) -> None:
        """Ends the tokenizer's threads and the engine; memory is freed with the object."""
        self._is_closed = True
        self._tokenizer.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two batches at a time would take each other's events, and wait for ever."""
        if self._is_closed:
            raise RuntimeError("this LLM is closed and answers nothing more")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is answering another batch; one thread at a time may use it"
            )
        try:
            with _threads_kept():
                torch.set_num_threads(self._num_threads)
                yield
        finally:
            self._busy.release()

    def _answer(self, answers: Sequence[_Running]) -> Answer:
        """The first answer to a prompt, which has the others."""
        first, *others = (one.answer for one in answers if one.answer is not None)
        return replace(first, others=tuple(others))

    def _compute(
        self,
        whole: Sequence[_Running],
        progress: Progress | None,
        ended: Callable[[_Running], None],
    ) -> None:
        """Runs these requests to their end."""
        waiting, running, num_done = list(reversed(whole)), dict[str, _Running](), 0
        try:
            while waiting or running:
                while waiting and len(running) < self._most:
                    one = waiting.pop()
                    running[one.start.attempt.transfer_id] = one
                    one.begin()
                    self._core.handle(one.start)
                while not self._core.step() and self._core.is_working():
                    time.sleep(0)
                for event in self._core.outbox():
                    if (complete := self._take(event, running)) is not None:
                        num_done += 1
                        ended(complete)
                        if progress is not None:
                            progress(num_done, len(whole))
        except BaseException:
            self._abort(running.values())
            raise

    def _check(self, prompt: Prompt, params: Params) -> list[_Running]:
        """Its answers, each of which is a request of the engine."""
        request = make_request(prompt, params, token_ids=True)
        if request.HasField("model") and request.model != self.model.name:
            raise NotFound(
                f"expected the model {self.model.name!r} of this LLM, got {request.model!r}"
            )
        asked = validate(
            request,
            self.model,
            self._tokenizer.reserved_ids,
            is_stream=False,
            takes_chats=self._tokenizer.has_chat_template,
            chat_end_ids=self._tokenizer.chat_end_ids,
        ).seeded(secrets.randbits(64))
        ids = tuple(_result_of(encode_prompt(asked, self._tokenizer)))
        self._num_asked += 1
        stopping, count = request.stopping, asked.num_answers
        texts = [
            AnswerText(self._tokenizer, stopping.stop, stopping.min_tokens) for _ in range(count)
        ]
        whole = Request(
            id=f"offline-{self._num_asked}",
            asked=asked,
            arrived=0.0,
            limit_s=math.inf,
            deadline=math.inf,
            answer=AnswerState(text=texts[0]),
            prompt=EncodedPrompt(ids, fit(len(ids), asked)),
        )
        parts = whole.split(texts, whole.id)
        for one in parts:
            one.answer.fingerprint = self._engine.ready.fingerprint
        starts = [_start_of(one) for one in parts]
        try:
            self._core.check(starts[0])
        except RequestError as error:
            raise InvalidRequest.of(error.field, str(error)) from error
        prompt = _result_of(self._tokenizer.text_of(ids)) if asked.sent.output.echo else ""
        return [_Running(one, start, prompt) for one, start in zip(parts, starts, strict=True)]

    def _take(self, event: CoreEvent, running: dict[str, _Running]) -> _Running | None:
        """Takes an event of the engine; returns the request whose answer it completes."""
        match event:
            case Failed(attempt=attempt) if attempt.transfer_id in running:
                raise to_error(event)
            case Committed(attempt=attempt):
                one = running.get(attempt.transfer_id)
                if one is None or not one.take(event):
                    return None
                self._core.handle(Abort(attempt=attempt))
                del running[attempt.transfer_id]
                return one
            case Finished(attempt=attempt):
                one = running.pop(attempt.transfer_id, None)
                if one is not None:
                    one.finish(event)
                return one
            case _:
                return None

    def _abort(self, running: Iterable[_Running]) -> None:
        for one in running:
            self._core.handle(Abort(attempt=one.start.attempt))
        self._core.outbox()


class _Running:
    """One answer of a batch: makes events of what the engine reports, by a router's own rules."""

    def __init__(self, request: Request, start: StartDecode, prompt: str) -> None:
        """prompt: its text, if the request asks for it."""
        self.start = start
        self.answer: Answer | None = None  # once it has ended
        self._request, self._prompt = request, prompt
        self._gathering = Gathering()

    def begin(self) -> None:
        self._gathering = Gathering()
        self._request.arrived = time.monotonic()
        self._request.answer.state = State.DECODING
        if self._request.asked.sent.output.echo and not self._request.index:
            self._gathering.take(echo_of(self._request, self._prompt))

    def take(self, event: Committed) -> bool:
        """Takes tokens; True if a stop string ends the answer."""
        commit = filled(worker_pb2.DecodeCommit, event, frontier=())
        self._gather(commit_of(self._request, self._request.add_commit(commit, time.monotonic())))
        is_stopped = self._request.answer.text.is_stopped
        if is_stopped:
            self._end(pb.FINISH_REASON_STOP)
        return is_stopped

    def finish(self, event: Finished) -> None:
        finished = filled(worker_pb2.DecodeFinished, event)
        self._gather(commit_of(self._request, self._request.add_finished(finished)))
        is_stopped = event.stopped or self._request.answer.text.is_stopped
        self._end(pb.FINISH_REASON_STOP if is_stopped else pb.FINISH_REASON_LENGTH)

    def _end(self, reason: pb.FinishReason) -> None:
        self._gather(finished_of(self._request, reason, time.monotonic()))
        self.answer = self._gathering.answer()

    def _gather(self, event: pb.GenerateStreamResponse | None) -> None:
        if event is not None:
            self._gathering.take(event)


def _start_of(request: Request) -> StartDecode:
    """One of the answers to a prompt, which share its KV."""
    asked, name, index = request.asked, request.id, request.index
    return StartDecode(
        attempt=AttemptId(request_id=name, attempt=index + 1, transfer_id=f"{name}/{index}"),
        prompt_token_ids=tuple(request.prompt.token_ids),
        stopping=Stopping(
            max_tokens=request.prompt.max_tokens,
            stop_token_ids=frozenset(asked.stop_token_ids),
            min_tokens=asked.sent.stopping.min_tokens,
        ),
        sampling=asked.sampling,
        settings=asked.settings,
        num_logprobs=asked.num_logprobs,
        writer=None,
        group=name if asked.num_answers > 1 else "",
    )


def _result_of(work: Coroutine[Any, Any, Result]) -> Result:
    with ThreadPoolExecutor(1) as thread:  # this one may have a loop, as in a notebook
        return thread.submit(asyncio.run, work).result()


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restores torch's number of threads at the end, because it is global in the process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A text, a chat, a list of messages or a list of ids is one prompt."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | bytearray | Mapping):
        return [read_prompt(prompts)]
    listed = list(prompts)
    if any(isinstance(one, SupportsIndex | Mapping) for one in listed):
        return [read_prompt(listed)]
    return [read_prompt(one) for one in listed]


def _each(params: Params | Iterable[Params], count: int) -> list[Params]:
    if isinstance(params, Params):
        return [params] * count
    is_one = isinstance(params, Mapping | str) or not isinstance(params, Iterable)
    each: list[Any] = [params] if is_one else list(params)
    for one in each:
        if not isinstance(one, Params):
            raise TypeError(f"params: expected effuse.Params, got {type(one).__name__}")
    if len(each) != count:
        raise ValueError(f"expected params for {count} prompts, got {len(each)}")
    return each
