"""Random lives: starts, pushes, aborts, lost writers, expired leases and small pools, interleaved.

After every step the pool's books hold; at the end each attempt ended once and every page is free.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from auditing import audit
from checkpoints import write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import INCARNATION, Rig, load_tiny, make_request
from decoding.source import SOURCE, Source
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.models.transformer import Transformer
from effuse.worker import messages
from effuse.worker.messages import Abort, StartDecode, WriterGone

TERMINAL = (messages.Finished, messages.Failed, messages.AbortDone)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_tiny(write_tiny_checkpoint(tmp_path_factory.mktemp("m") / "model", "sdar", seed=3))


class Storm:
    """One engine, one source, and the state of the requests between them."""

    def __init__(self, model: Transformer, seed: int, kind: type[Rig] = Rig) -> None:
        self.draw = random.Random(seed)
        self.rig = kind(model, num_pages=24, page_size=4, budget=64, max_num_seqs=6)
        self.hub = Hub(is_two_sided=seed % 2 == 0)
        self.target = LoopbackConnector(
            self.hub, self.rig.memory, INCARNATION, self.rig.fingerprint, self.rig.clock
        )
        self.target.start()
        self.rig.connect(self.target)
        self.source = Source(model, self.hub, self.rig.clock)
        self.started: dict[str, StartDecode] = {}
        self.prompt: list[int] = []

    def act(self) -> None:
        """One random thing happens, then one step."""
        self.draw.choice((self.start, self.start, self.push, self.push, self.abort, self.wait))()
        self.rig.step()

    def start(self) -> None:
        if len(self.started) == 50:
            return
        name = str(len(self.started))
        if len(self.started) % 3 == 0:  # three answers to each prompt
            count = self.draw.randint(1, 24)
            self.prompt = [self.draw.randrange(20, 90) for _ in range(count)]
        request = make_request(
            name,
            self.prompt,
            group=f"group-{len(self.started) // 3}",
            max_tokens=self.draw.randint(1, 40),
            writer=self.draw.choice((SOURCE, SOURCE, None)),
            window=self.draw.randint(1, 5),
            drafts=self.draw.random() < 0.3,
        )
        self.started[request.attempt.transfer_id] = request
        self.rig.start(request)

    def push(self) -> None:
        for name, request in self.started.items():
            events = self.rig.answers[name].events
            reserved = events[-1] if events else None
            if request.writer and isinstance(reserved, messages.Reserved):
                self.source.push(request, reserved.reservation)
                return

    def abort(self) -> None:
        if self.started:
            request = self.draw.choice(list(self.started.values()))
            if not self.is_over(request):
                self.rig.engine.handle(Abort(attempt=request.attempt))

    def wait(self) -> None:
        """A quarter of a lease passes; now and then a writer is gone."""
        self.rig.clock.now += 2.5
        if self.started and self.draw.random() < 0.3:
            name = self.draw.choice(list(self.started))
            self.rig.engine.handle(WriterGone(transfer_id=name, has_drained=True))

    def is_over(self, request: StartDecode) -> bool:
        events = self.rig.answers[request.attempt.transfer_id].events
        return bool(events) and isinstance(events[-1], TERMINAL)

    def settle(self) -> None:
        """Everything that still can end, ends; every writer is gone."""
        for _ in range(10):  # rounds: waiting requests get pages when others release theirs
            for _ in range(500):  # a device also steps while an answer waits for pages
                if not self.rig.step():
                    break
            self.rig.clock.now += 100.0
            for name in self.started:
                self.rig.engine.handle(WriterGone(transfer_id=name, has_drained=True))
            self.rig.collect()
        self.target.close()
        self.source.connector.close()


@pytest.mark.parametrize("rig", [Rig, DeviceRig])
def test_every_attempt_ends_once_and_every_page_is_free(model: Transformer, rig: type[Rig]) -> None:
    storms = [Storm(model, seed, rig) for seed in range(3)]
    kinds = [kind for storm in storms for kind in survive(storm)]
    assert sum(storm.rig.engine.counters.prompts_shared for storm in storms) > 20
    assert all(kinds.count(kind) > 5 for kind in TERMINAL), [kinds.count(k) for k in TERMINAL]


def survive(storm: Storm) -> list[type]:
    """Runs a storm to its end under audit; returns how its attempts ended."""
    for _ in range(250):
        storm.act()
    storm.settle()
    audit(storm.rig.engine)
    assert storm.rig.pool.num_free == storm.rig.pool.num_pages
    load = storm.rig.engine.load()
    assert (load.running, load.waiting, load.quarantined_pages) == (0, 0, 0)
    assert len(storm.started) == 50
    kinds = []
    calm = Rig(storm.rig.model, page_size=4, caches=False)
    for name, request in storm.started.items():
        events = storm.rig.answers[name].events
        ends = [event for event in events if isinstance(event, TERMINAL)]
        assert len(ends) == 1 and ends[0] is events[-1], request
        kinds.append(type(ends[0]))
        if isinstance(ends[0], messages.Finished):
            alone = calm.start(msgspec.structs.replace(request, writer=None, group=""))
            calm.run()
            assert storm.rig.answers[name].token_ids == alone.token_ids
    return kinds
