"""DISK:path: a file as device memory. Reading maps it into the address space, so that nothing is read before
it is touched; writing makes or lengthens the file. Reading never changes a file: one that is missing or too
short is an error.

No kernels run here: copy to another device to compute.
"""
from __future__ import annotations

import errno
import mmap
import os
from typing import Any, NoReturn

from whit.codegen.target import Target
from whit.helpers import DeviceError
from whit.runtime.device import Device, Launch, Program
from whit.uop import UOp

_REMEDIES = {errno.ENOENT: "create it or its folder, or correct the path",
             errno.ENOSPC: "free space on that disk",
             errno.EACCES: "change its permissions, or choose another path",
             errno.EISDIR: "name a file in it",
             errno.EROFS: "choose a path on a disk that can be written"}


class DiskDevice(Device):
    """Handles are offsets into the file, so `allocate` touches nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Target(key=name, language="none"))
        self.path = name.partition(":")[2]
        if not self.path:
            raise DeviceError(f"device {name!r}", because="it names no file", fix="write DISK:/path/to/file")
        self.map: mmap.mmap | None = None
        self.mapped: tuple[int, int, int] = (0, 0, 0)  # device, inode and size of the file when it was mapped

    def allocate(self, nbytes: int) -> int:
        return 0

    def free(self, handle: int, nbytes: int) -> None:
        """The file stays."""

    def offset(self, handle: int, nbytes: int) -> int:
        return handle + nbytes

    def view(self, handle: int, nbytes: int) -> memoryview:
        """The bytes of the file from `handle` on, read-only and not copied. DeviceError if it has fewer."""
        asked = f"read {nbytes} bytes at {handle}"
        try:
            status = os.stat(self.path)
            if status.st_size < handle + nbytes:
                raise DeviceError(f"{self.name}: {asked}",
                                  because=f"the file has only {status.st_size} bytes",
                                  fix="it may be truncated: fetch it again, or ask for less")
            if (status.st_dev, status.st_ino, status.st_size) != self.mapped:
                self._open_map()
        except OSError as error:
            self._fail(asked, error)
        return memoryview(self.map or b"")[handle:handle + nbytes]

    def _open_map(self) -> None:
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            # an empty file cannot be mapped
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else None
            self.mapped = status.st_dev, status.st_ino, status.st_size

    def copyin(self, handle: int, data: memoryview) -> None:
        """Write; the file is made or lengthened as needed. On an error it keeps what was written so far."""
        asked, rest = f"write {data.nbytes} bytes at {handle}", data.cast("B")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                while rest.nbytes:
                    done = os.pwrite(descriptor, rest, handle)
                    handle, rest = handle + done, rest[done:]
            finally:
                os.close(descriptor)
        except OSError as error:
            self._fail(asked, error)

    def copyout(self, data: memoryview, handle: int) -> None:
        data.cast("B")[:] = self.view(handle, data.nbytes)

    def _fail(self, asked: str, error: OSError) -> NoReturn:
        raise DeviceError(f"{self.name}: {asked}", because=error.strerror or str(error),
                          fix=_REMEDIES.get(error.errno or 0, "check the path and the disk")) from error

    def _no_kernels(self, name: str) -> NoReturn:
        raise DeviceError(f"kernel {name} on {self.name}", because="DISK holds bytes and computes nothing",
                          fix='copy first: tensor.to("CPU") reads the file and computes there')

    def render(self, linear: UOp, name: str) -> str:
        self._no_kernels(name)

    def compile(self, source: str, name: str) -> bytes:
        self._no_kernels(name)

    def load(self, binary: bytes, name: str, launch: Launch) -> Program:
        self._no_kernels(name)

    def plan(self, calls: Any) -> NoReturn:
        self._no_kernels("plan")
