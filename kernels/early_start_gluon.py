# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The two ends of `early_start` in Gluon kernels, which has no words of its own for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def await_kernel_before():
    """Go on once the kernel before has ended and what it wrote can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allow_kernel_after():
    """Let the kernel after this one begin, once every program has said so or has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
