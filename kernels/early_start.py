"""Programmatic dependent launch: a kernel begins before the previous one has ended.

Rotary lets the next kernel begin, and attention waits before it reads queries or pages; so do the
merge of splits and attention. Values that a kernel reads before it waits (the lengths of sequences)
must not come from the kernel right before it.
"""

import torch


def may_start_early(device: torch.device) -> bool:
    """Whether this device supports it: Hopper and later, and `meta` for compiling."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"
