"""Benchmarks of steps on the CPU run torch operators, because no Triton kernel runs there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from decoding.torch_step import TorchStep

from effuse.benchmarks import gpu_serve, gpu_step
from effuse.decode_worker import device_stepper


@pytest.fixture(scope="module", autouse=True)
def torch_steps() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (gpu_serve, gpu_step, device_stepper):
            stack.enter_context(patch.object(module, "DeviceStep", TorchStep))
        yield
