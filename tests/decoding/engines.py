"""A decode engine in this process on a tiny checkpoint, and requests of many shapes for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import oracle.settings
import torch
from auditing import audit
from checkpoints import EOS_TOKEN_ID, MASK_TOKEN_ID, VOCAB_SIZE

from effuse.config.decoding import DecodeSettings, Remasking, Sampling, Stopping
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.layout import (
    Fingerprint,
    Identity,
    KVLayout,
    ModelFacts,
    PageMemory,
    fingerprint,
)
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.units import UnitCache, unit_tokens_of
from effuse.models.part import Forward
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.worker import messages
from effuse.worker.messages import CoreEvent, StartDecode, StartRehearsal

INCARNATION = "decode-1"


@dataclass
class Clock:
    """Time that a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """The engine's events of one attempt."""

    events: list[CoreEvent] = field(default_factory=list)

    def of(self, kind: type[CoreEvent]) -> list[CoreEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def said(self) -> list[CoreEvent]:
        """The events after the reservation, without what this engine measured or ran beside."""
        measured = {"compute_s", "prompts_s", "batch"}
        return [
            msgspec.structs.replace(
                event, **dict.fromkeys(measured & {*event.__struct_fields__}, 0)
            )
            for event in self.events
            if not isinstance(event, messages.Reserved)
        ]

    @property
    def commits(self) -> list[messages.Committed]:
        return [event for event in self.events if isinstance(event, messages.Committed)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All committed tokens; checks that each commit begins where the last one ended."""
        tokens: list[int] = []
        for commit in self.commits:
            assert commit.token_offset == len(tokens)
            tokens += commit.token_ids
        return tuple(tokens)

    @property
    def finished(self) -> messages.Finished:
        last = self.events[-1]
        assert isinstance(last, messages.Finished), last
        return last

    @property
    def failed(self) -> messages.Failed:
        last = self.events[-1]
        assert isinstance(last, messages.Failed), last
        return last


class Rig:
    """An engine, its parts, and all of its events by transfer id."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int = 256,
        page_size: int = 4,
        budget: int = 4096,
        max_num_seqs: int = 64,
        max_model_len: int = 512,
        forward: Forward | None = None,
        lease_s: float = 10.0,
        max_request_s: float = 1000.0,
        kv_layout: str = "unified",
        max_window: int = 8,
        max_stop_ids: int = 16,
        caches: bool = True,
        tiers: Callable[[PageMemory, Callable[[], float]], Tiers] | None = None,
    ) -> None:
        config = model.config
        self.clock = Clock()
        self.layout = layout_of(model, page_size, kv_layout)
        self.memory = PageMemory(self.layout, num_pages, model.device)
        self.pool = PagePool(num_pages)
        outside = tiers and tiers(self.memory, self.clock)
        self.cache = cache_of(model, self.pool, page_size, is_on=caches, tiers=outside)
        self.fingerprint = fingerprint_of(model, self.layout)
        self.connector: Connector | None = None
        self.answers: dict[str, Answer] = {}
        self.limits = DecodeLimits(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            block_size=config.block_size,
            max_window=max_window,
            max_stop_ids=max_stop_ids,
        )
        self.forward = forward or ModelRunner(
            model, self.memory.layer_views(), page_size=page_size, block_size=config.block_size
        )
        self.model, self._lease_s, self._max_request_s = model, lease_s, max_request_s
        self.connect(None)

    def connect(self, connector: Connector | None) -> None:
        """Makes the engine, anew, with this connector."""
        config = self.model.config
        identity = Identity(INCARNATION, self.fingerprint, self.layout)
        self.engine = DecodeEngine(
            self.make_executor(),
            self.pool,
            self.cache,
            Intake(config, self.limits),
            HandoffReceiver(self.pool, connector, identity, self._lease_s),
            Boundary(
                config.hidden_size if config.shift_logits else None,
                self.model.dtype,
                self.model.device,
            ),
            now=self.clock,
            max_request_s=self._max_request_s,
        )

    def make_executor(self) -> Executor:
        """The executor of the engine's steps."""
        return Executor(self.forward, self.memory.copy_page)

    def start(self, request: StartDecode | StartRehearsal) -> Answer:
        self.engine.handle(request)
        self.collect()
        return self.answers.setdefault(request.attempt.transfer_id, Answer())

    def step(self) -> bool:
        """One step that does something, if there is anything to do; a device may take its time for
        it. The pool's books are checked after it."""
        while not (worked := self.engine.step()) and self._device_works():
            pass
        self.collect()
        audit(self.engine)
        return worked

    def _device_works(self) -> bool:
        is_copying = self.cache.is_copying
        return is_copying or (self.model.device.type == "cuda" and self.engine.is_working())

    def settle(self) -> None:
        """Steps until no unit is on its way to another tier."""
        cache = self.cache
        while isinstance(cache, TieredCache) and (
            cache.is_copying or cache._due or any(one.writing for one in cache.tiers.stores)
        ):
            self.step()
            time.sleep(0.0005)

    def evict(self) -> None:
        """Others use all free pages once, after units have had the time to leave."""
        self.settle()
        pages = self.pool.allocate_committed(self.pool.num_free)
        assert pages is not None
        self.pool.release(pages)

    def run(self, most_steps: int = 5000) -> None:
        """Steps until nothing moves."""
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most_steps} steps")

    def collect(self) -> None:
        for event in self.engine.outbox():
            attempt = (
                event.reservation.attempt if isinstance(event, messages.Reserved) else event.attempt
            )
            self.answers.setdefault(attempt.transfer_id, Answer()).events.append(event)


def layout_of(model: Transformer, page_size: int, kind: str = "unified") -> KVLayout:
    config = model.config
    num_kv_heads = len(model.shard.kv_heads)
    return KVLayout(kind, config.num_layers, num_kv_heads, config.head_dim, page_size, "float32")


def cache_of(
    model: Transformer,
    pool: PagePool,
    page_size: int,
    *,
    is_on: bool = True,
    tiers: Tiers | None = None,
) -> UnitCache:
    is_causal = model.config.prompt_attention == "causal_blocks"
    size = unit_tokens_of(page_size, model.config.block_size)
    if tiers is None:
        return UnitCache(
            pool, page_size=page_size, unit_size=size, is_causal=is_causal, is_on=is_on
        )
    return TieredCache(pool, tiers, page_size=page_size, unit_size=size, is_causal=is_causal)


def fingerprint_of(model: Transformer, layout: KVLayout) -> Fingerprint:
    config = model.config
    facts = ModelFacts(
        weights="test",
        architecture=config.architecture,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        prompt_attention=config.prompt_attention,
        commit_rule="settled",
    )
    return fingerprint(layout, facts)


def load_tiny(directory: Path, device: str = "cpu") -> Transformer:
    torch.set_num_threads(1)
    return load_model(directory, device=device)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    writer: str | None = None,
    drafts: bool = False,
    resume: messages.Resume | None = None,
    group: str = "",
    sampling: Sampling | None = None,
    stop_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    **settings: object,
) -> StartDecode:
    """A request with the published defaults; settings by their names."""
    asked = {"algorithm": "d2f", "denoising_steps": 4} | settings
    return StartDecode(
        attempt=AttemptId(f"request-{name}", 1, f"transfer-{name}"),
        prompt_token_ids=tuple(prompt),
        stopping=Stopping(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids)),
        sampling=sampling or Sampling(),
        settings=DecodeSettings(**asked),  # type: ignore[arg-type]
        writer=writer,
        drafts=drafts,
        resume=resume,
        group=group,
    )


def random_requests(
    count: int, algorithm: str, *, block_size: int, seed: int = 0, sampled: bool = False
) -> list[StartDecode]:
    """Requests of different lengths and settings; the first prompt is shorter than a block."""
    draw = random.Random(f"{seed}/{algorithm}/{block_size}")
    requests = []
    # From a draw of its own: tests give the requests of `draw` pages that just do not suffice.
    entropy = random.Random(f"{seed}/entropy")
    for index in range(count):
        is_bounded, bound = entropy.random() < 0.3, entropy.choice((0.0, 0.35, 2.0))
        length = 1 if index == 0 else draw.randint(1, 6 * block_size)
        requests.append(
            make_request(
                f"{seed}-{index}",
                [draw.choice(_PLAIN_IDS) for _ in range(length)],
                max_tokens=draw.randint(1, 8 * block_size),
                sampling=Sampling(
                    temperature=draw.choice((0.5, 1.0)) if sampled else 0.0,
                    top_p=draw.choice((0.9, 1.0)) if sampled else 1.0,
                    top_k=draw.choice((0, 20)) if sampled else 0,
                    seed=draw.randrange(2**64),
                    answer_index=index // 3 % 2,
                ),
                stop_token_ids=draw.sample(_PLAIN_IDS, draw.choice((0, 8, 16))),
                algorithm=algorithm,
                window=draw.choice((1, 2, 4, 6)),
                confidence_threshold=draw.choice((0.6, 0.9, 0.95)),
                block_add_threshold=draw.choice((0.0, 0.1, 0.5)),
                full_activation_threshold=draw.choice((0.5, 0.95, 1.0)),
                score=draw.choice(("confidence", "margin", "neg_entropy")),
                remasking=_order(draw, is_bounded),
                entropy_bound=bound,
                denoising_steps=draw.randint(1, block_size),
            )
        )
    return requests


def _order(draw: random.Random, is_bounded: bool) -> Remasking:
    order: Remasking = draw.choice(
        ("low_confidence_dynamic", "low_confidence_static", "sequential")
    )
    return "entropy_bounded" if is_bounded else order


def of_length(request: StartDecode, max_tokens: int) -> StartDecode:
    """The same request for another length."""
    stopping = msgspec.structs.replace(request.stopping, max_tokens=max_tokens)
    return msgspec.structs.replace(request, stopping=stopping)


_PLAIN_IDS = [i for i in range(VOCAB_SIZE) if i not in (EOS_TOKEN_ID, MASK_TOKEN_ID)]


def oracle_settings(request: StartDecode) -> oracle.settings.Settings:
    """The same request in the oracle's terms."""
    asked, sampling = request.settings, request.sampling
    assert asked.algorithm == "d2f" or asked.algorithm == "block_diffusion"
    assert asked.remasking != "low_confidence" and asked.remasking != "random"
    return oracle.settings.Settings(
        algorithm=asked.algorithm,
        max_tokens=request.stopping.max_tokens,
        stop_token_ids=tuple(request.stopping.stop_token_ids),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        answer_index=sampling.answer_index,
        score=asked.score,
        confidence_threshold=asked.confidence_threshold,
        window=asked.window,
        block_add_threshold=asked.block_add_threshold,
        full_activation_threshold=asked.full_activation_threshold,
        remasking=asked.remasking,
        denoising_steps=asked.denoising_steps,
        entropy_bound=asked.entropy_bound,
        min_tokens=request.stopping.min_tokens,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
    )
