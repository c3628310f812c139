"""The CPU: kernels compiled in this process by LLVM ("CPU"), or by a C compiler ("CPU:CLANG", "CPU:GCC").

Handles are addresses of host memory. Compiled objects are linked by `elf`, so a warm start runs no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from whit.codegen.target import Target
from whit.helpers import CompileError, DeviceError, cpu_threads
from whit.renderer import CPU_OPS
from whit.runtime import elf, native, pool
from whit.runtime.device import Buffer, Device, Launch, Plan, PlanCall, Program
from whit.runtime.memory import memory
from whit.uop import Op, Ops, UOp

# ---- memory ------------------------------------------------------------------------------------------------

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Writable view of host memory, which must stay alive while the view is used."""
    return _view(address, nbytes, 0x200)  # type: ignore[no-any-return]  # PyBUF_WRITE; ctypes' py_object is untyped


# ---- programs ----------------------------------------------------------------------------------------------

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
# by number of values: handles and variables to the arrays that a kernel takes (a bytes object is one, and is
# thread-safe)
_pack_pointers: list[Callable[..., bytes]] = [struct.Struct(f"{n}Q").pack for n in range(64)]
_pack_values: list[Callable[..., bytes]] = [struct.Struct(f"{n}q").pack for n in range(64)]


def pointers(handles: Sequence[int]) -> bytes:
    """An array of addresses."""
    return (
        _pack_pointers[len(handles)](*handles)
        if len(handles) < 64
        else struct.pack(f"{len(handles)}Q", *handles)
    )


def values(variables: Sequence[int]) -> bytes:
    """An array of int64."""
    return (
        _pack_values[len(variables)](*variables)
        if len(variables) < 64
        else struct.pack(f"{len(variables)}q", *variables)
    )


class CPUProgram(Program):
    """A linked kernel. `address` is the function, `tasks` how many values its thread index has."""

    def __init__(self, image: elf.Image, name: str, tasks: int) -> None:
        self.image, self.name, self.tasks = image, name, tasks
        self.address = image[name]
        self.function = _KERNEL(self.address)

    def __call__(
        self, handles: Sequence[Any], variables: Sequence[int] = (), wait: bool = False
    ) -> float | None:
        buffers, numbers = pointers(handles), values(variables)
        if wait:
            start = time.perf_counter()
            self.run(buffers, numbers)
            return time.perf_counter() - start
        if self.tasks == 1:
            self.function(buffers, numbers, 0)
        else:
            self.run(buffers, numbers)
        return None

    def run(self, buffers: bytes, variables: bytes) -> None:
        """Every task, on all threads of the pool when there are several."""
        if self.tasks == 1:
            self.function(buffers, variables, 0)
        else:
            workers = pool.pool()
            workers.run(workers.state, self.address, buffers, variables, self.tasks)


# ---- the device --------------------------------------------------------------------------------------------


def _cache_bytes(level: int, default: int) -> int:
    """Size of the first CPU's data cache of a level."""
    for index in range(8):
        texts = []
        for name in ("level", "type", "size"):
            try:
                with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/{name}") as file:
                    texts.append(file.read().strip())
            except OSError:
                return default
        if texts[0] == str(level) and texts[1] != "Instruction" and texts[2][:-1].isdigit():
            return int(texts[2][:-1]) << {"K": 10, "M": 20}.get(texts[2][-1], 10)
    return default


@functools.lru_cache(None)
def cpu_target(language: str, compiler: str) -> Target:
    """What this machine's CPU can do."""
    model, flags = native.host()
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    vector_bytes = 64 if wide else 32 if "avx2" in flags else 16
    arm = elf.MACHINE in ("aarch64", "arm64")
    ops = CPU_OPS
    if not (arm or "fma" in flags):
        ops -= {Ops.MULACC}
    if not (arm or "sse4_1" in flags):
        ops -= {Ops.TRUNC, Ops.FLOOR}
    if wide and language == "llvm":
        ops |= {Ops.LDEXP}
    if language == "llvm":
        ops |= dot_ops(flags)
    threads, l1, l2 = cpu_threads(), _cache_bytes(1, 32 << 10), _cache_bytes(2, 1 << 20)
    last = _cache_bytes(3, 0) or l2 * threads
    # elsewhere than on x86 a non-temporal store is a hint of little effect
    stream = last // 4 if elf.MACHINE == "x86_64" else 0
    key = f"cpu-{compiler}-{native.host_key()}-{threads}t-{l1 >> 10}k-{l2 >> 10}k-{stream >> 10}k"
    return Target(
        key=key,
        language=language,
        vector_bytes=vector_bytes,
        vector_registers=32 if wide or arm else 16,
        # Zen 4 does each half of a wide vector by itself
        multiplies=1 if wide and model.startswith("x86_64.AuthenticAMD.25.") else 2,
        threads=threads,
        native=ops,
        l1_bytes=l1,
        l2_bytes=l2,
        masked_memory=wide or "avx2" in flags,
        stream_bytes=stream,
    )


def dot_ops(flags: frozenset[str]) -> frozenset[Op]:
    """The ops for sums of products of small numbers that a CPU with these features has instructions for."""
    ops: set[Op] = set()
    if elf.MACHINE in ("aarch64", "arm64"):
        ops |= {Ops.DOT4} if "asimddp" in flags else set()
        ops |= {Ops.DOT4U} if "i8mm" in flags else set()
    elif elf.MACHINE == "x86_64":
        ops |= {Ops.DOT2} if "avx2" in flags else set()
        ops |= {Ops.DOT4U} if has_vnni(flags) else set()
        ops |= {Ops.DOT2B} if {"avx512_bf16", "avx512vl"} <= flags else set()
    return frozenset(ops)


def has_vnni(flags: frozenset[str]) -> bool:
    """Whether an x86 multiplies bytes and adds up four products in one instruction."""
    return {"avx512_vnni", "avx512vl"} <= flags or "avx_vnni" in flags


def has_half() -> bool:
    """Whether the CPU converts float16 in hardware."""
    return elf.MACHINE in ("aarch64", "arm64") or "f16c" in native.host()[1]


class CCompiler:
    """gcc or clang, run on one file at a time in a folder of its own."""

    flags = (
        "-std=gnu11",
        "-O2",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fwrapv",
        "-fno-strict-aliasing",
        "-ffreestanding",
        "-fno-builtin",
        "-fPIC",
        "-fno-stack-protector",
        "-fno-asynchronous-unwind-tables",
        "-fcf-protection=none",
        "-mprefer-vector-width=512",
        "-w",
        "-x",
        "c",
    )

    def __init__(self, kind: str) -> None:
        import shutil

        names = [kind, *[f"{kind}-{version}" for version in range(25, 11, -1)]]
        self.path = next((path for path in map(shutil.which, names) if path), None)
        if self.path is None:
            raise DeviceError(
                f"device CPU:{kind.upper()}",
                because=f"there is no {kind} in PATH",
                fix=f"install {kind}, or use CPU, which needs no system compiler",
            )
        state = os.stat(self.path)
        self.kind, self.key = kind, f"{kind}.{state.st_size:x}.{int(state.st_mtime):x}"

    def compile(self, source: str, name: str) -> bytes:
        """C text -> a relocatable object. CompileError with the compiler's words if it fails."""
        import subprocess  # neither is needed on a warm start
        import tempfile

        flags = [f for f in self.flags if f != "-fcf-protection=none" or elf.MACHINE == "x86_64"]
        if self.kind == "gcc":
            flags += ["-fno-tree-loop-distribute-patterns", "-fno-stack-clash-protection"]
        try:
            with tempfile.TemporaryDirectory(prefix="whit-") as folder:
                output = os.path.join(folder, "kernel.o")
                result = subprocess.run(
                    [str(self.path), *flags, "-c", "-", "-o", output],
                    input=source.encode(),
                    capture_output=True,
                    cwd=folder,
                    check=False,
                )
                if result.returncode == 0:
                    with open(output, "rb") as file:
                        return file.read()
                words = result.stderr.decode(errors="replace").strip()[:2000]
                why = words or f"it ended with code {result.returncode} and said nothing"
        except OSError as error:
            why = str(error)
        raise CompileError(
            f"compile kernel {name} with {self.path}",
            because=f"it failed: {why}",
            fix="DEBUG=4 prints the source; DEV=CPU needs no system compiler",
        )


class CPUDevice(Device):
    """This machine's CPU. Names: CPU (= CPU:LLVM; CPU:1, CPU:2, … are further devices on it), CPU:CLANG,
    CPU:GCC."""

    host_visible = True

    def __init__(self, name: str) -> None:
        kind = name.partition(":")[2].upper()
        if kind not in ("", "LLVM", "CLANG", "GCC") and not kind.isdigit():
            raise DeviceError(
                f"device {name!r}",
                because="the CPU has no such compiler",
                fix="use CPU, CPU:LLVM, CPU:CLANG or CPU:GCC",
            )
        self.compiler = CCompiler(kind.lower()) if kind in ("CLANG", "GCC") else None
        super().__init__(
            name, cpu_target("c", self.compiler.key) if self.compiler else cpu_target("llvm", "llvm")
        )

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        return memory.allocate(nbytes)

    def free(self, handle: int, nbytes: int) -> None:
        memory.free(handle, nbytes)

    def trim(self) -> None:
        memory.release()

    def offset(self, handle: int, nbytes: int) -> int:
        return handle + nbytes

    def copyin(self, handle: int, data: memoryview) -> None:
        bytes_at(handle, data.nbytes)[:] = data if data.format == "B" and data.ndim == 1 else data.cast("B")

    def copyout(self, data: memoryview, handle: int) -> None:
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        data[:] = bytes_at(handle, data.nbytes)

    def from_memory(self, address: int, nbytes: int, keep: object = None) -> Buffer:
        """A buffer on memory that something else owns (`keep`, held as long as the buffer lives): nothing is
        copied."""
        return Buffer(self.name, nbytes, keep=keep, handle=address)

    # ---- code

    def render(self, linear: UOp, name: str) -> str:
        if self.compiler is not None:
            from whit.renderer import c

            # gcc turns (float)half != 0 into a library call: it gets the bit arithmetic, which it vectorises
            return c.render(linear, name, half=has_half() and self.compiler.kind != "gcc")
        from whit.renderer import llvm

        fence = "llvm.x86.sse.sfence" if elf.MACHINE == "x86_64" else ""
        dots = llvm.ARM_DOTS  # of which the target's native ops are used
        if elf.MACHINE == "x86_64":
            dots = llvm.x86_dots(self.target.vector_bytes)
        return llvm.render(linear, name, half=has_half(), fence=fence, dots=dots)

    def compile(self, source: str, name: str) -> bytes:
        return (
            native.compile_ir(source, name) if self.compiler is None else self.compiler.compile(source, name)
        )

    def load(self, binary: bytes, name: str, launch: Launch) -> CPUProgram:
        return CPUProgram(elf.load(binary), name, launch.tasks)

    def plan(self, calls: Sequence[PlanCall]) -> Plan:
        if all(isinstance(call.program, CPUProgram) for call in calls):
            return pool.NativePlan(calls)
        return Plan(calls)

    def disassemble(self, binary: bytes) -> str:
        return native.disassemble(binary)
