"""LLVM in this process: IR text -> object code. llvmlite is imported on the first compile, never on a warm
start."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any

from whit.helpers import CompileError, blake2b, cache_get, cache_put
from whit.runtime import elf

_lock = threading.Lock()  # LLVM's global context is not for two threads


def _new_lock() -> None:
    """After a fork another thread of the parent may seem to hold the lock for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


@lru_cache(1)
def host() -> tuple[str, frozenset[str]]:
    """(what identifies the CPU model, its feature flags), read without LLVM.

    >>> isinstance(host()[1], frozenset)
    True
    """
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(16384).decode(errors="replace")
    except OSError:
        return elf.MACHINE, frozenset()
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")
    model = ".".join([fields[n] for n in names if n in fields])
    return f"{elf.MACHINE}.{model}", frozenset(
        (fields.get("flags") or fields.get("Features") or "").split()
    )


@lru_cache(1)
def host_key() -> str:
    """A short digest of the CPU's model and features: code compiled for one key runs wherever the key is
    equal."""
    model, flags = host()
    return blake2b(f"{model}|{' '.join(sorted(flags))}".encode(), digest_size=8).hexdigest()


class _LLVM:
    """llvmlite set up for this machine."""

    def __init__(self) -> None:
        import llvmlite.binding as binding

        self.binding = binding
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_triple(binding.get_process_triple())
        features = binding.get_host_cpu_features().flatten()
        self.machine = target.create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features, opt=2, reloc="pic", codemodel="small"
        )
        options = binding.create_pipeline_tuning_options(speed_level=2)
        self.builder = binding.create_pass_builder(self.machine, options)
        self.triple = self.machine.triple

    def passes(self) -> Any:
        """Registers out of memory and local clean-up: codegen has unrolled, vectorised and hoisted
        already."""
        manager = self.binding.create_new_function_pass_manager()
        manager.add_sroa_pass()
        manager.add_instruction_combine_pass()
        manager.add_simplify_cfg_pass()
        return manager


@lru_cache(1)
def _llvm() -> _LLVM:
    return _LLVM()


def compile_ir(source: str, name: str) -> bytes:
    """LLVM IR text -> a relocatable object for this machine. CompileError if LLVM refuses the text."""
    with _lock:
        llvm = _llvm()
        try:
            module = llvm.binding.parse_assembly(source)
            module.verify()
        except RuntimeError as error:
            raise CompileError(
                f"compile kernel {name}",
                because=f"LLVM refuses its code: {str(error).strip()}",
                fix="report it with the output of DEBUG=4",
            ) from error
        module.triple = llvm.triple
        for function in module.functions:
            if not function.is_declaration:
                llvm.passes().run(function, llvm.builder)
        return bytes(llvm.machine.emit_object(module))


def disassemble(binary: bytes) -> str:
    """Machine code of an object as text, by objdump or llvm-objdump."""
    import shutil  # none of these is needed on a warm start
    import subprocess
    import tempfile

    tools = ["objdump", *[f"llvm-objdump-{version}" for version in range(25, 11, -1)], "llvm-objdump"]
    tool = next((path for path in map(shutil.which, tools) if path), None)
    if tool is None:
        return f"{len(binary)} bytes of machine code; install objdump (binutils) to see them"
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(binary)
        file.flush()
        result = subprocess.run(
            [tool, "-d", "--no-show-raw-insn", file.name], capture_output=True, check=False
        )
    lines = result.stdout.decode(errors="replace").splitlines()
    return "\n".join(
        [line for line in lines if ":\t" in line or line.endswith(">:")]
    ) or result.stderr.decode(errors="replace")


def load_cached(source: str, name: str) -> elf.Image:
    """Compile and link a piece of IR text, through the disk cache."""
    key = blake2b(f"{host_key()}|{source}".encode(), digest_size=16).hexdigest()
    binary = cache_get("native", key)
    if binary is not None:
        try:
            return elf.load(binary)
        except CompileError:
            pass  # an entry from somewhere else: made anew
    binary = compile_ir(source, name)
    cache_put("native", key, binary)
    return elf.load(binary)
