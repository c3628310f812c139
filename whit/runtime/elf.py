"""A linker for one ELF64 relocatable object: sections into memory, relocations applied, symbols by name.

What compilers emit for a kernel is small: code, constants, references between them. Undefined symbols and
writable data are errors: a kernel depends on nothing. Memory is written, then made executable, never both.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

from whit.helpers import CompileError, round_up

_MACHINES = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}
_PAGE = 4096
MACHINE = os.uname().machine
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4
_WRITE, _ALLOC = 1, 2
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
_MAP_PRIVATE_ANONYMOUS = 0x22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(size: int) -> int:
    """Fresh zeroed pages, or 0 when the system has none."""
    address = libc.mmap(None, size, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    return 0 if address is None or address == ctypes.c_void_p(-1).value else int(address)


class Section(NamedTuple):
    """A section header, with the offset that the section gets in memory (-1: not loaded)."""

    name: str
    type: int
    flags: int
    file_offset: int
    size: int
    link: int
    info: int
    place: int


class Image:
    """Executable memory of one object, unmapped when this is collected: keep it while its code may run."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self.symbols: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        """The address of a function."""
        if name not in self.symbols:
            raise CompileError(
                f"load {name!r}",
                because=f"the object defines only {sorted(self.symbols)}",
                fix="clear the disk cache (WHIT_CACHE); report the kernel if it comes back",
            )
        return self.symbols[name]

    def __del__(self) -> None:
        if self.base and libc is not None:
            libc.munmap(self.base, self.size)
            self.base = 0


def _bad(why: str) -> CompileError:
    return CompileError(
        "load an object file",
        because=why,
        fix="clear the disk cache (WHIT_CACHE); report the kernel if it comes back",
    )


def load(binary: bytes) -> Image:
    """Link a relocatable object into executable memory. CompileError if it is damaged, for another machine,
    or not self-contained."""
    try:
        sections, total = _read_sections(binary)
        memory = bytearray(total)
        for section in sections:
            if section.place >= 0:
                memory[section.place : section.place + section.size] = binary[
                    section.file_offset : section.file_offset + section.size
                ]
        base = map_memory(len(memory))
        if not base:
            raise CompileError(
                f"load {len(binary)} bytes of machine code",
                because="the system has no memory left",
                fix="free memory",
            )
        image = Image(base, len(memory))
        symbols = _read_symbols(binary, sections, image)
        _relocate(binary, sections, symbols, memory, base)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise _bad(f"it is damaged ({error})") from error
    ctypes.memmove(base, bytes(memory), len(memory))
    if libc.mprotect(
        base, len(memory), _PROT_READ | _PROT_EXEC
    ):  # also makes the kernel clean an ARM's instruction cache
        raise CompileError(
            "make machine code executable",
            because=f"mprotect failed (errno {ctypes.get_errno()})",
            fix="allow this process to map executable memory (SELinux execmem), or use DEV=PYTHON",
        )
    return image


def _read_sections(binary: bytes) -> tuple[list[Section], int]:
    """All sections with their places in memory, and the size of that memory."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise _bad("it is no little-endian ELF64 file")
    kind, machine = struct.unpack_from("<HH", binary, 16)
    expected = _MACHINES.get(MACHINE)
    if kind != 1 or machine != expected:
        raise _bad(
            f"it is of ELF type {kind} for machine {machine}; a relocatable (1) for {expected} is needed"
        )
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<HHH", binary, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", binary, table + size * i) for i in range(count)]
    strings = rows[names][4]
    sections, end = [], 0
    for name, kind, flags, _, offset, length, link, info, align, _ in rows:
        text = binary[strings + name : binary.index(b"\0", strings + name)].decode()
        place = -1
        if flags & _ALLOC and length and text != ".eh_frame":
            if flags & _WRITE:
                raise _bad(f"it has writable data in {text}")
            if kind != _PROGBITS or offset + length > len(binary) or align > _PAGE:
                raise _bad(
                    f"section {text} is of type {kind}, ends after the file or wants to be aligned to {align}"
                )
            place = round_up(end, max(1, align))
            end = place + length
        sections.append(Section(text, kind, flags, offset, length, link, info, place))
    return sections, max(_PAGE, round_up(end, _PAGE))


def _read_symbols(binary: bytes, sections: list[Section], image: Image) -> list[tuple[int | None, str]]:
    """(address or None if undefined, name) of each symbol; functions and objects with names go into the
    image."""
    result: list[tuple[int | None, str]] = []
    for section in sections:
        if section.type != _SYMTAB:
            continue
        strings = sections[section.link].file_offset
        end = section.file_offset + section.size
        for name, info, _, index, value, _ in struct.iter_unpack(
            "<IBBHQQ", binary[section.file_offset : end]
        ):
            text = binary[strings + name : binary.index(b"\0", strings + name)].decode() if name else ""
            placed = 0 < index < len(sections) and sections[index].place >= 0
            address = image.base + sections[index].place + value if placed else None
            if placed and info >> 4:  # not local
                image.symbols[text] = address or 0
            result.append((address, text))
    return result


def _relocate(
    binary: bytes,
    sections: list[Section],
    symbols: list[tuple[int | None, str]],
    memory: bytearray,
    base: int,
) -> None:
    """Apply every relocation of every loaded section."""
    apply = _relocate_arm if MACHINE in ("aarch64", "arm64") else _relocate_x86
    for section in sections:
        if section.type != _RELA or sections[section.info].place < 0:
            continue
        end = section.file_offset + section.size
        for offset, info, addend in struct.iter_unpack("<QQq", binary[section.file_offset : end]):
            address, name = symbols[info >> 32]
            if address is None:
                raise CompileError(
                    "load a kernel",
                    because=f"it calls {name or 'something'} that it does not define",
                    fix="report this kernel: generated code must not call a library",
                )
            width = 8 if info & 0xFFFFFFFF in _WIDE else 4
            if offset + width > sections[section.info].size:
                raise _bad(f"a relocation lies outside of {sections[section.info].name}")
            place = sections[section.info].place + offset
            apply(memory, place, info & 0xFFFFFFFF, address + addend, base + place)


def _store32(memory: bytearray, place: int, value: int, signed: bool = True) -> None:
    low, high = (-(1 << 31), 1 << 31) if signed else (0, 1 << 32)
    if not low <= value < high:
        raise _bad(f"relocation value {value:#x} does not fit in 32 bits")
    memory[place : place + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")


def _relocate_x86(memory: bytearray, place: int, kind: int, value: int, here: int) -> None:
    if kind == 1:  # R_X86_64_64
        memory[place : place + 8] = (value & (1 << 64) - 1).to_bytes(8, "little")
    elif kind in (2, 4):  # PC32, PLT32
        _store32(memory, place, value - here)
    elif kind == 24:  # PC64
        memory[place : place + 8] = ((value - here) & (1 << 64) - 1).to_bytes(8, "little")
    elif kind in (10, 11):  # 32, 32S
        _store32(memory, place, value, signed=kind == 11)
    else:
        raise _bad(f"relocation type {kind} is not known for x86-64")


def _relocate_arm(memory: bytearray, place: int, kind: int, value: int, here: int) -> None:
    word = int.from_bytes(memory[place : place + 4], "little")
    if kind == 257:  # ABS64
        memory[place : place + 8] = (value & (1 << 64) - 1).to_bytes(8, "little")
        return
    if kind == 261:  # PREL32
        _store32(memory, place, value - here)
        return
    if kind in (282, 283):  # JUMP26, CALL26
        word |= ((value - here) >> 2) & 0x3FFFFFF
    elif kind == 275:  # ADR_PREL_PG_HI21
        pages = (value >> 12) - (here >> 12)
        word |= (pages & 3) << 29 | ((pages >> 2) & 0x7FFFF) << 5
    elif kind in _ARM_LOW12:  # ADD and LDST of the low 12 bits, scaled by the access
        word |= ((value & 0xFFF) >> _ARM_LOW12[kind]) << 10
    else:
        raise _bad(f"relocation type {kind} is not known for AArch64")
    memory[place : place + 4] = (word & 0xFFFFFFFF).to_bytes(4, "little")


_WIDE = (1, 24, 257)  # relocations of eight bytes
_ARM_LOW12 = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
