"""Compiles a launcher's Triton kernels for sm_90 without a GPU and reads what ptxas made of them.

A launcher is run on meta tensors with its kernels replaced by recorders; every recorded launch is
compiled with the specialisation (pointer types, divisibility, constants) it would have on a GPU.
Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, serialize_specialization_data
from triton.tools.tensor_descriptor import TensorDescriptor as HostDescriptor

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
Argument = torch.Tensor | int | float | bool


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """The resources of one kernel variant on the device."""

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    sass: str

    def count(self, opcode: str) -> int:
        return len(re.findall(rf"\b{re.escape(opcode)}", self.sass))

    def programs_per_processor(self) -> int:
        """How many fit one Hopper processor: 64 Ki registers, 227 KiB of shared memory."""
        by_registers = 65_536 // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        return min(by_registers, 227 * 1024 // max(1, self.shared_bytes + 1024))

    def __str__(self) -> str:
        counts = {op: self.count(op) for op in ("HGMMA", "HMMA", "LDGSTS", "LDL", "STL")}
        shown = " ".join(f"{op} {n}" for op, n in counts.items())
        return (
            f"{self.kernel}: {self.registers} registers, {self.stack_bytes} B stack, "
            f"{self.shared_bytes} B shared, {self.programs_per_processor()} a processor, {shown}"
        )


@dataclass(slots=True)
class Recorder:
    """Stands in for a jitted kernel and keeps the arguments of its launches."""

    name: str
    kernel: JITFunction
    launches: list[dict[str, Argument]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Argument, **named: Argument) -> None:
            self.launches.append(dict(zip(self.kernel.arg_names, args, strict=False)) | named)

        return launch


def device_code(modules: Sequence[ModuleType], launch: Callable[[], object]) -> list[DeviceCode]:
    """Compile every launch of a kernel of ``modules`` that ``launch()`` makes."""
    recorders: list[Recorder] = []
    with ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    recorders.append(Recorder(name, value))
                    stack.enter_context(patch.object(module, name, recorders[-1]))
        launch()
    return [
        _compile(recorder.name, recorder.kernel, arguments)
        for recorder in recorders
        for arguments in recorder.launches
    ]


def _compile(name: str, kernel: JITFunction, arguments: dict[str, Argument]) -> DeviceCode:
    options = {key: arguments.pop(key) for key in OPTIONS if key in arguments}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Argument] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1
        if parameter.is_constexpr or is_one or value is None:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", 90, 32)
    # A launch fails if Triton cannot describe it to compilation hooks, which engines use.
    described = make_backend(target).parse_options(options)
    serialize_specialization_data(name, signature, constants, attributes, described, "key", target)
    compiled = triton.compile(source, target=target, options=options)
    return _read(name, compiled)


def _type_of(value: Argument) -> str:
    if isinstance(value, HostDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>"
    if isinstance(value, TensorDescriptor):
        element = POINTERS[value.base.dtype][1:]
        return f"tensordesc<{element}{value.block_shape},{value.layout!r}>".replace(", 64]", ",64]")
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _read(name: str, compiled: CompiledKernel) -> DeviceCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("cuobjdump", "-sass", file.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return DeviceCode(name, found["REG"], found["STACK"], shared, warps, sass)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(BIN / tool), *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout
