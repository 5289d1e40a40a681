"""Sizes of the device's slots and buffers, from an engine's limits. Only wires parts together."""

from collections.abc import Sequence

from effuse.decode_worker.device_buckets import bucket
from effuse.decode_worker.device_step import Adjust, DeviceStep, StepBuffers
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.scheduler import Limits
from effuse.kernels.slots import SlotLayout
from effuse.models.transformer import LayerKV, Transformer

_MAX_WINDOW = 8  # blocks of a request in flight
_MAX_STOPS = 16  # stop ids of a request


def make_stepper(
    model: Transformer,
    kv: Sequence[LayerKV],
    limits: Limits,
    *,
    uses_graphs: bool = True,
    adjust: Adjust | None = None,
) -> DeviceStepper:
    """A stepper with a slot for every request that may hold pages, its graphs captured."""
    layout = SlotLayout(
        limits.max_num_seqs,
        limits.block_size,
        max_window=_MAX_WINDOW,
        max_stops=_MAX_STOPS,
        max_pages=limits.pages_for(limits.max_model_len),
    )
    buffers = StepBuffers.empty(model, layout, bucket(limits.max_num_batched_tokens))
    step = DeviceStep(model, kv, buffers, page_size=limits.page_size, adjust=adjust)
    stepper = DeviceStepper(step, uses_graphs=uses_graphs)
    counts = range(1, limits.max_num_batched_tokens + 1)
    stepper.prepare(counts, counts, range(limits.max_model_len + 1))
    return stepper
