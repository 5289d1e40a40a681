"""The plans of `gpu_fleet`: the loads of a fleet, and the fleets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from effuse.benchmarks.fleet_load import Shape, Steady
from effuse.benchmarks.fleet_runs import Loads, Variant
from effuse.benchmarks.gpu_models import MODELS
from effuse.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan."""

    model: str
    closed: tuple[tuple[Shape, int], ...]
    steady: tuple[Steady, ...]  # the time of a step
    # requests that decode while handoffs arrive, and their number
    beside_arrivals: tuple[Shape, int]
    alone: tuple[Shape, ...]
    served: Shape  # arrivals at rates
    rates: tuple[float, ...]
    swept_rates: tuple[float, ...]  # for all variants except the first
    split: tuple[Variant, ...]  # the first one gets all loads, others only arrivals
    colocated: tuple[Variant, ...]
    handoffs: tuple[int, ...]  # tokens
    zmq: tuple[int, ...]
    warm_s: float
    seconds: float
    rounds: int

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def longest(self) -> int:
        loads = [shape for shape, _ in (*self.closed, self.beside_arrivals)]
        loads += [one.shape(self.config.block_size) for one in self.steady]
        return max(shape.prompt + shape.answer for shape in (*loads, *self.alone, self.served))

    def loads(self, number: int, connector: str) -> Loads:
        """For the variant with this number. zmq is only measured with single requests."""
        if connector == "zmq":
            return Loads(alone=self.alone, alone_count=self.rounds)
        arriving = tuple((self.served, rate) for rate in self.rates)
        if number:
            swept = tuple((self.served, rate) for rate in self.swept_rates)
            return Loads(arriving=swept, warm_s=self.warm_s, seconds=self.seconds)
        return Loads(
            alone=self.alone,
            alone_count=self.rounds,
            closed=self.closed,
            steady=self.steady,
            arriving=arriving,
            warm_s=self.warm_s,
            seconds=self.seconds,
        )


def split(prompt_rows: int, max_num_seqs: int, connector: str = "nixl") -> Variant:
    """One worker of each kind."""
    return Variant(
        prefill=1,
        decode=1,
        connector=connector,
        prompt_rows=prompt_rows,
        max_num_seqs=max_num_seqs,
    )


def colocated(prompt_rows: int, max_num_seqs: int) -> Variant:
    """Two workers that prefill and decode."""
    return Variant(prefill=0, decode=2, prompt_rows=prompt_rows, max_num_seqs=max_num_seqs)


FULL = Plan(
    model="dream-7b",
    closed=(
        (Shape(512, 128), 32),
        (Shape(2048, 128), 32),
        (Shape(2048, 128), 64),
        (Shape(4096, 64), 32),
    ),
    steady=(Steady(512, 16, 16, 40), Steady(512, 32, 16, 40)),
    beside_arrivals=(Shape(512, 1024), 16),
    alone=(Shape(512, 128), Shape(2048, 128)),
    served=Shape(2048, 128),
    rates=(2, 4, 8, 12, 16, 18, 20, 22),
    swept_rates=(4, 8, 12, 16, 20),
    split=(split(4096, 64), split(2048, 16), split(4096, 16, "zmq")),
    colocated=(colocated(4096, 64), colocated(2048, 16), colocated(2048, 4)),
    handoffs=(512, 2048, 8192),
    zmq=(2048,),
    warm_s=3.0,
    seconds=6.0,
    rounds=20,
)
# The part that two GPUs measure in less than ten minutes, if fleets run one after another; STEPS is
# the rest.
PAIR = replace(
    FULL,
    steady=(),
    rates=(4, 8, 16, 20, 22),
    swept_rates=(4, 8),
    split=(split(4096, 64), split(4096, 16, "zmq")),
    colocated=(colocated(4096, 64), colocated(2048, 4)),
    warm_s=2.0,
    seconds=5.0,
)
# The closed loads of the split fleet with their limits.
LOADS = replace(
    PAIR,
    rates=(),
    swept_rates=(),
    split=PAIR.split[:1],
    colocated=(),
    handoffs=(),
    zmq=(),
)
# The cost of a fleet's processes for a step. One GPU with room for four models is enough, because
# the decode worker has it for itself while the prefill worker has no prompt.
STEPS = replace(LOADS, closed=(), steady=FULL.steady, alone=FULL.alone[:1], rounds=2)
# Enough to check that everything runs, on one GPU.
SHORT = Plan(
    model="dream-7b",
    closed=((Shape(512, 128), 8),),
    steady=(Steady(512, 4, 4, 12),),
    beside_arrivals=(Shape(512, 256), 4),
    alone=(Shape(2048, 128),),
    served=Shape(2048, 128),
    rates=(4,),
    swept_rates=(),
    split=(split(4096, 16),),
    colocated=(colocated(4096, 16),),
    handoffs=(2048,),
    zmq=(2048,),
    warm_s=1.0,
    seconds=4.0,
    rounds=8,
)
TINY = Plan(
    model="tiny",
    closed=((Shape(64, 64), 4),),
    steady=(Steady(64, 2, 1, 5, spare=80),),
    beside_arrivals=(Shape(64, 128), 2),
    alone=(Shape(64, 64),),
    served=Shape(64, 64),
    rates=(4, 8),
    swept_rates=(),
    split=(split(256, 8), split(256, 8, "zmq")),
    colocated=(colocated(256, 8),),
    handoffs=(512,),
    zmq=(512,),
    warm_s=0.5,
    seconds=1.5,
    rounds=3,
)
PLANS = {"full": FULL, "pair": PAIR, "loads": LOADS, "steps": STEPS, "short": SHORT, "tiny": TINY}
