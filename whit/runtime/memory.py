"""Host memory: aligned blocks of few sizes, kept when freed, never much more than what was in use at once."""

from __future__ import annotations

import bisect
import os
import threading

from whit.helpers import PAGE, DeviceError, human_bytes, round_up
from whit.runtime import elf

_SLAB = 1 << 20  # small blocks are cut from slabs of this size
_SMALL = 1 << 16  # blocks up to this size are small
_HUGE = 2 << 20  # the size of a huge page
_MADV_HUGEPAGE = 14


def size_class(nbytes: int) -> int:
    """The size that a block of `nbytes` really gets: multiples of 64, four steps a doubling (large ones:
    sixteen).

    >>> size_class(1), size_class(65), size_class(1000), size_class(1 << 20)
    (64, 128, 1024, 1048576)
    """
    bits = max(nbytes - 1, 0).bit_length()
    return round_up(max(nbytes, 1), max(64, 1 << (bits - (3 if nbytes <= _SMALL else 5) if bits > 5 else 0)))


_malloc_trim = getattr(elf.libc, "malloc_trim", None)  # glibc has it


class HostMemory:
    """64-byte aligned blocks. A freed block is kept for a request of about its size, so that it costs no page
    faults. Before new pages are asked for, kept blocks go back to the system, the longest unused first, as
    long as all blocks together would exceed what was in use at once by more than a quarter."""

    def __init__(self) -> None:
        self.small: dict[int, list[int]] = {}  # free small blocks by size
        self.large: list[tuple[int, int]] = []  # free large blocks: (size, address), in order
        self.idle: dict[int, int] = {}  # address -> size of free large blocks, the longest unused first
        self.larger: dict[int, int] = {}  # address -> size of blocks in use that are larger than their class
        self.limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        self.kept = 0  # bytes in free large blocks
        self.used, self.most = 0, 0  # bytes handed out, now and at most so far
        self.slab, self.slab_end = 0, 0
        self.lock = threading.RLock()  # the collector may free a buffer inside of `allocate`

    def allocate(self, nbytes: int) -> int:
        """The address of at least `nbytes`. DeviceError when the system has no memory."""
        size = size_class(nbytes)
        with self.lock:
            if size > _SMALL:
                address, size = self.take(size)
            else:
                blocks = self.small.get(size)
                address = blocks.pop() if blocks else self.cut(size)
            self.used += size
            self.most = max(self.most, self.used)
            return address

    def free(self, address: int, nbytes: int) -> None:
        """Keep a block for reuse, or give it back when enough are kept."""
        size = size_class(nbytes)
        with self.lock:
            if size <= _SMALL:
                self.used -= size
                self.small.setdefault(size, []).append(address)
                return
            size = self.larger.pop(address, size)
            self.used -= size
            if self.kept + size > self.limit:
                elf.libc.munmap(address, self.mapped(size))
                return
            self.kept += size
            self.idle[address] = size
            bisect.insort(self.large, (size, address))

    def take(self, size: int) -> tuple[int, int]:
        """A large block, (address, its size): the smallest kept one that holds it, unless half of it would be
        for nothing; else new pages."""
        at = bisect.bisect_left(self.large, (size, 0))
        if at < len(self.large) and self.large[at][0] < 2 * size:
            found, address = self.large[at]
            self.forget(address)
            if found > size:
                self.larger[address] = found
            return address, found
        allowed = max(self.most, self.used + size) * 5 // 4
        while self.idle and self.used + self.kept + size > allowed:
            self.give_back(next(iter(self.idle)))
        return self.map(size), size

    def forget(self, address: int) -> int:
        """Take a block off the kept ones; its size."""
        size = self.idle.pop(address)
        del self.large[bisect.bisect_left(self.large, (size, address))]
        self.kept -= size
        return size

    def give_back(self, address: int) -> None:
        """Return a kept block to the system."""
        elf.libc.munmap(address, self.mapped(self.forget(address)))

    def cut(self, size: int) -> int:
        """A new small block. Large enough ones start at a page, so that the same element of any two is at the
        same place of a page: a load waits for an earlier store at its place of another page."""
        if size >= PAGE:
            self.slab = round_up(self.slab, PAGE)
        if self.slab + size > self.slab_end:
            self.slab = self.map(_SLAB)
            self.slab_end = self.slab + _SLAB
        address = self.slab
        self.slab += size
        return address

    @staticmethod
    def mapped(size: int) -> int:
        """Bytes of address space of a large block."""
        return round_up(size, _HUGE if size >= _HUGE else PAGE)

    def map(self, size: int) -> int:
        """Pages from the system; large blocks start at a huge page."""
        total = self.mapped(size)
        extra = _HUGE if total >= _HUGE else 0
        address = elf.map_memory(total + extra)
        if not address and self.kept:
            self.release()
            address = elf.map_memory(total + extra)
        if not address:
            raise DeviceError(
                f"allocate {human_bytes(size)} on the CPU",
                because=f"the system refuses; {human_bytes(self.used)} are in use by tensors",
                fix="free tensors, use smaller batches, or give the process more memory",
            )
        if extra:
            start = round_up(address, _HUGE)
            if start > address:
                elf.libc.munmap(address, start - address)
            if address + extra > start:
                elf.libc.munmap(start + total, address + extra - start)
            address = start
            elf.libc.madvise(address, total, _MADV_HUGEPAGE)
        return address

    def release(self) -> None:
        """Give every kept large block back to the system, and what compiling has left on the heap."""
        with self.lock:
            while self.idle:
                self.give_back(next(iter(self.idle)))
        if _malloc_trim is not None:
            _malloc_trim(0)


memory = HostMemory()


def _new_lock() -> None:
    """After a fork another thread of the parent may seem to hold the lock for ever."""
    memory.lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
