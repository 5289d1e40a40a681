"""Programmatic dependent launch: a kernel that begins before the one before it has ended.

Rotary allows what follows to begin, attention awaits it before it reads queries or pages, and so do
the merge of splits and attention. What a kernel reads before it waits (the lengths of sequences)
must have been written by an earlier kernel than the one right before it.
"""

import torch


def may_start_early(device: torch.device) -> bool:
    """Whether this device supports it: Hopper and later, and `meta`, to compile for without one."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"
