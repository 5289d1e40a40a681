"""Makes Triton's interpreter quick in a process that was started for it."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def use_interpreter() -> None:
    """AssertionError in a process that was started without TRITON_INTERPRET=1.

    Triton patches its whole language at each launch and at each call of a helper, and builds a
    table at each look at a dtype: two fifths of all the time. Here the language stays patched.
    It also computes each sum of integers twice in search of overflows, which no device does.
    Its products are numpy's, whose float32 sums depend on a row's place in the tile (OpenBLAS on
    processors without AVX-512). No device does that either, so products are computed in float64.
    It copies a value of two bytes in two reads, between which another process may write. Devices
    read it at once, so volatile loads are repeated until two of them agree.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    found: dict[str, np.dtype[Any]] = {}
    look_up = interpreter._get_np_dtype

    def np_dtype(of: Any) -> np.dtype[Any]:
        name = of.scalar.name
        if name not in found:
            found[name] = look_up(of)
        return found[name]

    interpreter._get_np_dtype = np_dtype
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_masked_load = _create_load


_load_once = interpreter.InterpreterBuilder.create_masked_load


def _create_load(*given: Any, **named: Any) -> Any:
    found = _load_once(*given, **named)
    while named.get("is_volatile", given[-1]):
        again = _load_once(*given, **named)
        if np.array_equal(found.data, again.data):
            break
        found = again
    return found


def _create_dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)
