"""DISK:path: a file as device memory, mapped into the address space, so that reading costs nothing until
bytes are touched.

Opening a device maps an existing file (for reading only, where it cannot be written); `allocate` makes or
lengthens it. No kernels run here: copy to another device to compute.
"""
from __future__ import annotations

import errno
import mmap
import os
from typing import Any, NoReturn

from whit.codegen.target import Target
from whit.helpers import DeviceError, human_bytes
from whit.runtime.device import Device, Launch, Program
from whit.uop import UOp

TARGET = Target(key="disk", language="none")


class DiskDevice(Device):
    """Handles are memoryviews of the mapping, all of the file from some offset on."""

    def __init__(self, name: str) -> None:
        super().__init__(name, TARGET)
        self.path = name.partition(":")[2]
        if not self.path:
            raise DeviceError(f"device {name!r}", because="it names no file", fix="write DISK:/path/to/file")
        self.map: mmap.mmap | None = None
        self.is_writable = True
        if os.path.exists(self.path):
            self._open(0)

    def _open(self, nbytes: int) -> None:
        """Map the file, made at least `nbytes` long."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT if nbytes else os.O_RDWR, 0o644)
            self.is_writable = True
        except OSError as error:
            if nbytes or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                self._fail(f"open {self.path}" + (f" for {human_bytes(nbytes)}" if nbytes else ""), error)
            descriptor = self._open_for_reading()
        try:
            size = os.fstat(descriptor).st_size
            if size < nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
                size = nbytes
            if size:  # an empty file cannot be mapped
                access = mmap.ACCESS_WRITE if self.is_writable else mmap.ACCESS_READ
                self.map = mmap.mmap(descriptor, size, access=access)
        except (OSError, ValueError) as error:
            self._fail(f"map {self.path}", error)
        finally:
            os.close(descriptor)

    def _open_for_reading(self) -> int:
        self.is_writable = False
        try:
            return os.open(self.path, os.O_RDONLY)
        except OSError as error:
            self._fail(f"open {self.path}", error)

    def _fail(self, asked: str, error: Exception) -> NoReturn:
        remedies = {errno.ENOENT: "create its folder, or correct the path",
                    errno.ENOSPC: "free space on that disk",
                    errno.EACCES: "change its permissions, or choose another path",
                    errno.EISDIR: "name a file in it"}
        code = getattr(error, "errno", None)
        raise DeviceError(f"{self.name}: {asked}", because=getattr(error, "strerror", None) or str(error),
                          fix=remedies.get(code or 0, "check the path and the disk")) from error

    @property
    def size(self) -> int:
        """Bytes of the mapped file."""
        return len(self.map) if self.map is not None else 0

    def allocate(self, nbytes: int) -> memoryview:
        """The file from its start; a file that is shorter is made `nbytes` long."""
        if self.size < nbytes:
            if not self.is_writable:
                raise DeviceError(f"{self.name}: {human_bytes(nbytes)} of it",
                                  because=f"the file has {human_bytes(self.size)} and cannot be written",
                                  fix="it may be truncated: fetch it again, or ask for less")
            self._open(nbytes)
        assert self.map is not None
        return memoryview(self.map)

    def open_existing(self, nbytes: int) -> memoryview:
        """The file from its start, without ever making or lengthening it. DeviceError if it has fewer than
        `nbytes`."""
        if not os.path.exists(self.path):
            self._fail(f"open {self.path}", FileNotFoundError(errno.ENOENT, "there is no such file"))
        if self.size < nbytes:
            raise DeviceError(f"{self.name}: {nbytes} bytes of it", because=f"the file has only {self.size}",
                              fix="it may be truncated: fetch it again, or ask for less")
        return memoryview(self.map) if self.map is not None else memoryview(b"")

    def free(self, handle: Any, nbytes: int) -> None:
        """The file stays; the mapping goes when the last view does."""

    def offset(self, handle: Any, nbytes: int) -> memoryview:
        return memoryview(handle)[nbytes:]

    def copyin(self, handle: Any, data: memoryview) -> None:
        view = memoryview(handle)
        if view.readonly:
            raise DeviceError(f"{self.name}: write {human_bytes(data.nbytes)}",
                              because="the file cannot be written",
                              fix="change its permissions, or copy it first")
        self._check(view, data)
        view[:data.nbytes] = data.cast("B")

    def copyout(self, data: memoryview, handle: Any) -> None:
        view = memoryview(handle)
        self._check(view, data)
        data.cast("B")[:] = view[:data.nbytes]

    def _check(self, view: memoryview, data: memoryview) -> None:
        """A mapping of a file that was cut since would kill the process with SIGBUS: look first."""
        try:
            present = os.path.getsize(self.path)
        except OSError as error:
            self._fail(f"read {self.path}", error)
        if view.nbytes < data.nbytes or present < self.size:
            raise DeviceError(f"{self.name}: {data.nbytes} bytes at {self.size - view.nbytes}",
                              because=f"the file has {present} bytes",
                              fix="it was truncated: fetch it again, or ask for less")

    def _no_kernels(self, name: str) -> NoReturn:
        raise DeviceError(f"kernel {name} on {self.name}", because="DISK holds bytes and computes nothing",
                          fix='copy first: tensor.to("CPU") reads the file and computes there')

    def render(self, linear: UOp, name: str) -> str:
        self._no_kernels(name)

    def compile(self, source: str, name: str) -> bytes:
        self._no_kernels(name)

    def load(self, binary: bytes, name: str, launch: Launch) -> Program:
        self._no_kernels(name)

    def synchronize(self) -> None:
        """Write changed pages back to the file."""
        if self.map is not None and self.is_writable:
            self.map.flush()
