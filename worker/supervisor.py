"""Keeps an engine alive: starts it, listens, replaces it under a new incarnation when it ends.

What runs in an engine that is lost fails with a retryable error; the front goes on. Whether an
engine hangs is `watchdog.py`'s to say, when to give up `backoff.py`'s.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from effuse.placement.records import Load
from effuse.protos import errors
from effuse.worker import engine_home
from effuse.worker.attempts import Attempts
from effuse.worker.backoff import Backoff
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_client import EngineClient, EngineGone
from effuse.worker.messages import Heartbeat, Phase, Ready, StartupFailed, ToEngine, ToFront
from effuse.worker.watchdog import Limits, Progress, look, observe, verdict

LOG = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
_MOST_ENDED = 1024
_RETRY_AFTER_S = 1.0  # about the time in which a small engine is back


class GaveUp(Exception):
    """No engine can be started; the message says why."""


@dataclass(slots=True)
class EngineLife:
    """An engine that is ready, and what was last heard of it."""

    client: EngineClient
    ready: Ready
    load: Load
    began: float  # when it was ready, by the supervisor's clock

    @property
    def incarnation(self) -> str:
        """Id of this life."""
        return self.client.incarnation


class Supervisor:
    """Runs one engine after the other; `life` is the one that can be spoken to, if any."""

    def __init__(
        self,
        module: str,
        config: WorkerConfig,
        attempts: Attempts,
        *,
        on_change: Callable[[], None],
        backoff: Backoff | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._module = module
        self._config = config
        self._attempts = attempts
        self._on_change = on_change  # called whenever `life` has come or gone
        self.backoff = backoff or Backoff()
        self._now = now
        self._progress = Progress.begin(now())  # of the present engine, ready or not
        self._told_phase: Phase = "serving"  # the phase that was logged last
        self.life: EngineLife | None = None
        self.last_life: EngineLife | None = None  # the newest that was ready, over or not
        self.restarts = 0
        self.ended: deque[str] = deque(maxlen=_MOST_ENDED)  # lives whose process is gone

    def send(self, message: ToEngine, incarnation: str) -> None:
        """Says something to the engine of that incarnation; in vain if it is gone."""
        if self.life is not None and self.life.incarnation == incarnation:
            self.life.client.send(message)

    async def run(self) -> None:
        """Runs until cancelled, then stops the engine; raises `GaveUp`."""
        engine_home.sweep()
        while True:
            client = await EngineClient.spawn(self._module, self._config)
            LOG.info("engine %s starts as process %d", client.incarnation, client.pid)
            try:
                await self._follow(client)
            except EngineGone as lost:
                await self._lose(client, lost)
            except asyncio.CancelledError:
                await client.stop(0.0 if self.life is None else _STOP_GRACE_S)
                self.life = None
                self.ended.append(client.incarnation)
                raise
            await asyncio.sleep(self.backoff.pause_s)
            self.restarts += 1

    async def _follow(self, client: EngineClient) -> None:
        """Follows an engine from its start to its end, which raises `EngineGone`."""
        limits = Limits(
            startup_s=self._config.startup_timeout_s, serving_s=self._config.hang_timeout_s
        )
        patience_s = limits.serving_s / 10
        self._progress = Progress.begin(self._now())
        while True:
            messages = await client.receive(patience_s)
            now = self._now()
            self._progress, stood_still_s = look(self._progress, now, patience_s)
            if stood_still_s:
                LOG.warning("this process stood still for %.1f s", stood_still_s)
            for message in messages:
                self._take(client, message, now)
            if why := verdict(self._progress, now, limits):
                raise EngineGone(f"the engine hangs: {why}")

    def _take(self, client: EngineClient, message: ToFront, now: float) -> None:
        if isinstance(message, Heartbeat):
            self._take_beat(client, message, now)
        elif self.life is not None and not isinstance(message, Ready | StartupFailed):
            self._attempts.deliver(message)
        elif self.life is None and isinstance(message, Ready):
            self._begin_life(client, message, now)
        elif self.life is None and isinstance(message, StartupFailed):
            raise EngineGone(message.message, permanent=message.permanent)
        else:
            when = "before it was ready" if self.life is None else "while it ran"
            raise EngineGone(f"the engine said {type(message).__name__} {when}")

    def _take_beat(self, client: EngineClient, beat: Heartbeat, now: float) -> None:
        # A start compiles dozens of kernels, most of them in a millisecond from the cache.
        is_news = self.life is not None or beat.phase in ("loading", "capturing")
        if is_news and beat.phase != self._told_phase:
            LOG.info("engine %s is now %s", client.incarnation, beat.phase)
            self._told_phase = beat.phase
        self._progress = observe(self._progress, beat, now)
        if self.life is not None:
            self.life.load = beat.load

    def _begin_life(self, client: EngineClient, ready: Ready, now: float) -> None:
        load = Load(total_pages=ready.total_pages, free_pages=ready.total_pages)
        self.life = self.last_life = EngineLife(client, ready, load, now)
        self._progress = replace(self._progress, is_ready=True)
        self._told_phase = "serving"
        LOG.info("engine %s is ready", client.incarnation)
        self._on_change()

    async def _lose(self, client: EngineClient, lost: EngineGone) -> None:
        """Buries an engine; only once its memory is gone do its attempts hear of it."""
        LOG.error("engine %s is lost: %s", client.incarnation, lost)
        if self.life is None:
            self.backoff = self.backoff.failed()
        else:
            self.backoff = self.backoff.ended(self._now() - self.life.began)
        self.life = None
        self._on_change()
        await client.kill()
        self.ended.append(client.incarnation)
        self._attempts.lose_engine(
            errors.EngineLost(
                "the engine of this worker was lost while the request ran; another try may succeed",
                retry_after_s=_RETRY_AFTER_S,
                labels={"incarnation": client.incarnation},
            )
        )
        if lost.permanent or self.backoff.is_over:
            raise GaveUp(str(lost))
