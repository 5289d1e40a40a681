"""Makes Triton's interpreter quick in a process that was started for it."""

from __future__ import annotations

import os
from functools import cache
from inspect import getmembers
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def use_interpreter() -> None:
    """AssertionError in a process that was started without TRITON_INTERPRET=1."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(language: object, builder: object, scope: Any) -> None:
    """Does the same as Triton's function of this name, but looks for the builtins only once.

    Triton searches its whole language at each call of a helper, in up to half of all the time.
    """
    for name in _builtins(language):
        if tl.core.is_builtin(member := getattr(language, name)):
            interpreter._patch_attr(language, name, member, builder, scope)


@cache
def _builtins(language: object) -> list[str]:
    return [name for name, member in getmembers(language) if tl.core.is_builtin(member)]
