"""The options of `effuse.LLM`: flags of a decode worker, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from effuse.config.decoding import Algorithm
from effuse.worker.config import Attention, Device, Dtype, KVLayoutKind


class EngineOptions(TypedDict, total=False):
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
    attention: Attention
    enforce_eager: bool
    default_algorithm: Algorithm | None
    served_model_name: str | None
    tensor_parallel_size: int
    expert_parallel: bool


def check_options(options: Mapping[str, object]) -> None:
    """Raises TypeError for a name that is no option."""
    known = EngineOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"LLM: expected options among {', '.join(known)}; got {name!r}")
