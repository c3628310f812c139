"""LLVM in this process: IR text -> object code. llvmlite is imported on the first compile, never on a warm
start."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from whit.helpers import CompileError, blake2b, cache_get, cache_put
from whit.runtime import elf


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


LITTLE_WORK = '"whit-work"="little"'  # what the renderer writes on a function that is done in no time
BY_HAND = '"whit-work"="by hand"'  # and on one that codegen has not shaped


class _LLVM:
    """llvmlite set up for this machine. One thread at a time uses one: `_free` keeps those that rest."""

    def __init__(self) -> None:
        import llvmlite.binding as binding

        self.binding = binding
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self.target = binding.Target.from_triple(binding.get_process_triple())
        self.features = binding.get_host_cpu_features().flatten()
        self.machines: dict[int, Any] = {}  # by optimisation level
        self.builders: dict[int, Any] = {}

    def machine(self, level: int) -> Any:
        """The code generator of an optimisation level."""
        if level not in self.machines:
            name = self.binding.get_host_cpu_name()
            made = self.machines[level] = self.target.create_target_machine(
                cpu=name, features=self.features, opt=level, reloc="pic", codemodel="small"
            )
            options = self.binding.create_pipeline_tuning_options(speed_level=level)
            self.builders[level] = self.binding.create_pass_builder(made, options)
        return self.machines[level]

    def compile(self, source: str, name: str) -> bytes:
        """LLVM IR text -> object. Full effort for code that runs for a while, little for what is done in no
        time anyway."""
        by_hand = BY_HAND in source
        level = 0 if LITTLE_WORK in source else 2
        machine = self.machine(level)
        context = self.binding.create_context()  # of its own: contexts are not for two threads
        try:
            module = self.binding.parse_assembly(source, context)
            module.verify()
        except RuntimeError as error:
            raise CompileError(
                f"compile kernel {name}",
                because=f"LLVM refuses its code: {str(error).strip()}",
                fix="report it with the output of DEBUG=4",
            ) from error
        module.triple = machine.triple
        if by_hand:
            self.all_passes(module, level)
            return self.emit(machine, module)
        for function in module.functions:
            if not function.is_declaration:
                self.passes(function, level)
        return self.emit(machine, module)

    def passes(self, function: Any, level: int) -> None:
        """Registers out of memory and, with full effort, local clean-up: codegen has unrolled, vectorised and
        hoisted already."""
        manager = self.binding.create_new_function_pass_manager()
        manager.add_sroa_pass()
        if level:
            manager.add_instruction_combine_pass()
            manager.add_simplify_cfg_pass()
        run = _direct(self.binding.ffi.lib.LLVMPY_RunNewFunctionPassManager)
        run(manager, function, self.builders[level])

    def all_passes(self, module: Any, level: int) -> None:
        """LLVM's own pipeline, vectorisation of loops included: nobody else has done anything."""
        options = self.binding.create_pipeline_tuning_options(speed_level=level)
        options.loop_vectorization = True
        options.slp_vectorization = False
        options.loop_unrolling = True
        builder = self.binding.create_pass_builder(self.machine(level), options)
        builder.getModulePassManager().run(module, builder)

    def emit(self, machine: Any, module: Any) -> bytes:
        """The object file of a module."""
        ffi = self.binding.ffi
        with ffi.OutputString() as error:
            buffer = _direct(ffi.lib.LLVMPY_TargetMachineEmitToMemory)(machine, module, 1, error)
            if not buffer:
                raise CompileError(f"emit machine code: {error}")
        try:
            start, size = ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer)
            return ctypes.string_at(start, size)
        finally:
            ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def _direct(function: Any) -> Any:
    """A function of llvmlite without the lock that llvmlite holds around each call, as far as it has one:
    what works on a context of its own may run beside others."""
    return getattr(function, "_cfn", function)


_free: list[_LLVM] = []


def compile_ir(source: str, name: str) -> bytes:
    """LLVM IR text -> a relocatable object for this machine; threads compile side by side. CompileError if
    LLVM refuses the text."""
    try:
        llvm = _free.pop()
    except IndexError:
        llvm = _LLVM()
    try:
        return llvm.compile(source, name)
    finally:
        _free.append(llvm)


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
