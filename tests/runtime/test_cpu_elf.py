"""The object loader on hand-made cases: constants, calls between functions, jump tables, and files that are
not good."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from whit.helpers import CompileError
from whit.runtime import elf, native

TABLE = """
@table = internal constant [4 x i64] [i64 11, i64 22, i64 33, i64 44]
define internal i64 @twice(i64 %x) noinline { %y = mul i64 %x, 2 ret i64 %y }
define i64 @pick(i64 %i) {
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %i
  %v = load i64, ptr %at
  %r = call i64 @twice(i64 %v)
  ret i64 %r
}
define double @half(double %x) { %y = fmul double %x, 0.5 ret double %y }
define i64 @choose(i64 %i) {
  switch i64 %i, label %other
    [ i64 0, label %a  i64 1, label %b  i64 2, label %c  i64 3, label %d  i64 4, label %e ]
a: ret i64 100
b: ret i64 7
c: ret i64 -3
d: ret i64 55
e: ret i64 12
other: ret i64 0
}
"""


def test_constants_calls_and_jump_tables() -> None:
    image = elf.load(native.compile_ir(TABLE, "t"))
    integer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    assert [integer(image["pick"])(i) for i in range(4)] == [22, 44, 66, 88]
    assert [integer(image["choose"])(i) for i in range(7)] == [100, 7, -3, 55, 12, 0, 0]
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(image["half"])(5.0) == 2.5
    with pytest.raises(CompileError, match="defines only"):
        image["missing"]


def test_memory_is_never_writable_and_executable() -> None:
    image = elf.load(native.compile_ir(TABLE, "t"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = [int(part, 16) for part in line.split()[0].split("-")]
        if low <= image.base < high:
            assert line.split()[1].startswith("r-x")
            return
    raise AssertionError("the image is not mapped")


@pytest.mark.parametrize(
    "text, why",
    [
        (
            "declare double @sin(double)\n"
            "define double @f(double %x) { %y = call double @sin(double %x) ret double %y }",
            "calls sin",
        ),
        ("@state = global i64 5\ndefine i64 @f() { %v = load i64, ptr @state ret i64 %v }", "writable data"),
        (
            "@far = external global i64\ndefine i64 @f() { %v = load i64, ptr @far ret i64 %v }",
            "far|relocation",
        ),
    ],
)
def test_what_a_kernel_must_not_have(text: str, why: str) -> None:
    with pytest.raises(CompileError, match=why):
        elf.load(native.compile_ir(text, "bad"))


def test_text_that_llvm_refuses() -> None:
    with pytest.raises(CompileError, match=r"kernel broken.*LLVM refuses"):
        native.compile_ir("define void @f() { %x = add i32 1, 2.0 ret void }", "broken")


def test_truncated_and_damaged_files() -> None:
    """Every prefix fails with CompileError; random damage fails so or loads, and never takes the process
    down."""
    good = native.compile_ir(TABLE, "t")
    for size in range(0, len(good), 7):
        with pytest.raises(CompileError):
            elf.load(good[:size])
    rng = random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            bad[rng.randrange(len(bad))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        with contextlib.suppress(CompileError):
            elf.load(bytes(bad))


def test_objects_for_other_machines_are_refused() -> None:
    good = bytearray(native.compile_ir(TABLE, "t"))
    struct.pack_into("<H", good, 18, 8)  # MIPS
    with pytest.raises(CompileError, match="machine 8"):
        elf.load(bytes(good))


def test_x86_relocations_by_hand() -> None:
    memory = bytearray(16)
    elf._relocate_x86(memory, 0, 1, 0x1122334455667788, 0)
    elf._relocate_x86(memory, 8, 2, 0x1000, 0x1010)
    elf._relocate_x86(memory, 12, 10, 0xFFFFFFFF, 0)
    assert memory.hex() == "8877665544332211" + "f0ffffff" + "ffffffff"
    for kind, value, here in ((2, 1 << 40, 0), (11, 1 << 31, 0), (10, 1 << 32, 0), (99, 0, 0)):
        with pytest.raises(CompileError):
            elf._relocate_x86(memory, 0, kind, value, here)


def test_arm_relocations_by_hand() -> None:
    """Against the encodings of the Arm manual: adrp x0, +0x12345 pages; add x0, x0, #0x678; ldr q0, [x0,
    #0x670]; bl +8."""

    def patched(word: int, kind: int, value: int, here: int) -> int:
        memory = bytearray(word.to_bytes(4, "little"))
        elf._relocate_arm(memory, 0, kind, value, here)
        return int.from_bytes(memory, "little")

    assert patched(0x90000000, 275, 0x12345678, 0x678) == 0xB0091A20  # immhi 0x48d1, immlo 1
    assert patched(0x91000000, 277, 0x12345678, 0) == 0x9119E000
    assert patched(0x3DC00000, 299, 0x12345670, 0) == 0x3DC19C00
    assert patched(0x94000000, 283, 0x1008, 0x1000) == 0x94000002
    assert patched(0x94000000, 283, 0x0FFC, 0x1000) == 0x97FFFFFF


@pytest.mark.skipif(not shutil.which("gcc") or platform.machine() != "x86_64", reason="no gcc")
def test_an_object_of_gcc(tmp_path: Path) -> None:
    source = tmp_path / "t.c"
    source.write_text(
        "static const int t[] = {3, 1, 4, 1, 5, 9, 2, 6};\nint at(long i) { return t[i & 7]; }\n"
        "double f(double x) { return x * 1.5 + 0.25; }\n"
        "int sum(void) { int s = 0; for (long i = 0; i < 8; i++) s += at(i); return s; }"
    )
    subprocess.run(
        [
            "gcc",
            "-O1",
            "-c",
            "-fPIC",
            "-fno-asynchronous-unwind-tables",
            str(source),
            "-o",
            str(tmp_path / "t.o"),
        ],
        check=True,
    )
    image = elf.load((tmp_path / "t.o").read_bytes())
    assert ctypes.CFUNCTYPE(ctypes.c_int)(image["sum"])() == 31
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(image["f"])(2.0) == 3.25


def test_what_llvm_emits_for_arm_can_be_linked() -> None:
    """Cross-compiled: no undefined symbols, and only relocations that the loader knows."""
    import llvmlite.binding as binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    machine = binding.Target.from_triple(triple).create_target_machine(
        cpu="neoverse-n1", opt=2, reloc="pic", codemodel="small"
    )
    module = binding.parse_assembly(TABLE)
    module.triple = triple
    binary = bytearray(machine.emit_object(module))
    struct.pack_into("<H", binary, 18, elf._MACHINES[elf.MACHINE])  # so that it can be read here
    sections, _ = elf._read_sections(bytes(binary))
    symbols = elf._read_symbols(bytes(binary), sections, elf.Image(0, 0))
    kinds = set()
    for section in sections:
        if section.type == 4 and sections[section.info].place >= 0:
            part = binary[section.file_offset : section.file_offset + section.size]
            for _, info, _ in struct.iter_unpack("<QQq", part):
                assert symbols[info >> 32][0] is not None
                kinds.add(info & 0xFFFFFFFF)
    assert kinds and kinds <= {257, 261, 275, 282, 283, *elf._ARM_LOW12}
