"""Compiles a launcher's Triton kernels for sm_90 without a GPU and reads what ptxas made of them.

A launcher is run on meta tensors with its kernels replaced by recorders; every recorded launch is
compiled with the specialisation (pointer types, divisibility, constants) it would have on a GPU.
Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TypeAlias
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, serialize_specialization_data
from triton.tools.tensor_descriptor import TensorDescriptor as HostDescriptor

INSTRUCTION_BYTES = 16
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
Kernel: TypeAlias = tuple[str, CompiledKernel]


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
        pattern = re.compile(rf"\b{re.escape(opcode)}")
        return sum(
            number * len(pattern.findall(word)) for word, number in _words(self.sass).items()
        )

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


def kernels_of(modules: Sequence[ModuleType], launch: Callable[[], object]) -> list[Kernel]:
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
        (recorder.name, _compile(recorder.name, recorder.kernel, arguments))
        for recorder in recorders
        for arguments in recorder.launches
    ]


def codes_of(kernels: Sequence[Kernel]) -> list[DeviceCode]:
    """The code of each kernel. Cheaper for many at a time."""
    codes = _disassembled([kernel.asm["cubin"] for _, kernel in kernels])
    return [
        DeviceCode(
            name,
            *_usage(kernel.asm["cubin"]),
            kernel.metadata.shared,
            kernel.metadata.num_warps,
            codes[kernel.asm["cubin"]],
        )
        for name, kernel in kernels
    ]


def _compile(name: str, kernel: JITFunction, arguments: dict[str, Argument]) -> CompiledKernel:
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
    return triton.compile(source, target=target, options=options)


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


@cache
def _words(sass: str) -> Counter[str]:
    """How often each word, such as an opcode with its suffixes, stands in the code."""
    return Counter(re.findall(r"[\w.]+", sass))


@cache
def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a kernel."""
    with _file_of(cubin) as name:
        usage = _run("cuobjdump", "-res-usage", name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return found["REG"], found["STACK"]


def _disassembled(cubins: Sequence[bytes]) -> dict[bytes, str]:
    """The code of each kernel. One run of the tool reads all of them, because its start takes
    0.3 s."""
    texts = {cubin: _text_of(cubin) for cubin in cubins}
    with _file_of(b"".join(texts.values())) as name:
        shown = _run("nvdisasm", "--binary", "SM90a", "--no-dataflow", name)
    lines = iter(re.findall(r"^ *(/\*[0-9a-f]{4,}\*/.*)$", shown, re.MULTILINE))
    codes = {
        cubin: "\n".join(islice(lines, len(text) // INSTRUCTION_BYTES))
        for cubin, text in texts.items()
    }
    assert all(codes.values()) and not list(lines), "the tool printed other instructions"
    return codes


def _text_of(cubin: bytes) -> bytes:
    """The instructions in an ELF file of one kernel: its section `.text.KERNEL`."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * place) for place in range(count)]
    (text,) = (
        cubin[begin : begin + size]
        for name, _, _, _, begin, size in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    )
    return text


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        yield file.name


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(BIN / tool), *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout
