"""An engine that denoises on the device or from the host, and the sizes of the device's slots.

Only wires parts together.
"""

from collections.abc import Callable, Sequence

from effuse.decode_worker.boundary import Boundary
from effuse.decode_worker.device_buckets import bucket
from effuse.decode_worker.device_engine import DeviceDecodeEngine
from effuse.decode_worker.device_step import Adjust, DeviceStep, StepBuffers
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.engine import DecodeEngine, Forward
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.step_slots import SlotLayout
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.receiver import HandoffReceiver
from effuse.models.transformer import LayerKV, Transformer

# What a slot has room for; requests beyond it are denoised from the host.
_MAX_WINDOW = 8  # blocks in flight
_MAX_STOPS = 16  # stop ids


def make_engine(
    model: Transformer,
    kv: Sequence[LayerKV],
    forward: Forward,
    pool: PagePool,
    limits: DecodeLimits,
    handoffs: HandoffReceiver,
    *,
    on_device: bool,
    now: Callable[[], float],
    max_request_s: float,
) -> DecodeEngine:
    """A decode engine over the pages `kv`, its graphs captured where it denoises `on_device`."""
    config, intake = model.config, Intake(model.config, limits)
    hidden_size = config.hidden_size if config.shift_logits else None
    boundary = Boundary(hidden_size=hidden_size, dtype=model.dtype, device=model.device)
    if not on_device:
        return DecodeEngine(
            forward, pool, intake, handoffs, boundary, now=now, max_request_s=max_request_s
        )
    return DeviceDecodeEngine(
        forward,
        pool,
        intake,
        handoffs,
        boundary,
        make_stepper(model, kv, limits),
        now=now,
        max_request_s=max_request_s,
    )


def make_stepper(
    model: Transformer,
    kv: Sequence[LayerKV],
    limits: DecodeLimits,
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
