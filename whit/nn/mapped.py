"""Files as memory: mapped privately, so that nothing is read before it is used and nobody's file changes."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from whit.helpers import ArgumentError, WhitError, prod
from whit.tensor import Tensor, hooks, storage
from whit.uop import DType, UOp, dtypes


class FileError(WhitError, OSError):
    """A file that cannot be read or written."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of a file or of a tensor. `address`: where they lie if devices may use them in place."""

    name: str
    data: memoryview
    owner: object
    address: int | None = None

    def __len__(self) -> int:
        return self.data.nbytes

    def tensor(self, start: int, shape: tuple[int, ...], dtype: DType, device: str | None = None) -> Tensor:
        """The numbers from a byte on, read when they are used. What is not aligned to its elements is put
        together from bytes by the kernel that reads it."""
        if start % dtype.itemsize:
            raw = self.tensor(start, (prod(shape) * dtype.itemsize,), dtypes.uint8, device)
            return raw.bitcast(dtype).reshape(shape)
        place = storage.device_name(device if device is not None else storage.default_device())
        buffer = UOp.new_buffer(prod(shape), dtype, place)
        part = self.data[start : start + prod(shape) * dtype.itemsize]
        owner = self.owner if self.address is None else storage.Lent(self.address + start, self.owner)
        storage.put(buffer, part, owner)
        return Tensor(buffer.reshape(shape))


def bytes_of(what: str, source: object) -> Bytes:
    """The bytes of a file, by its path, or of a uint8 tensor of one axis.

    Errors: ArgumentError for anything else, FileError for a file that cannot be opened
    """
    if isinstance(source, Tensor):
        if source.dtype is not dtypes.uint8 or source.ndim != 1:
            raise ArgumentError(
                f"{what} of a {source.dtype} tensor of {source.ndim} axes",
                because="a file is a row of bytes",
                fix="pass a path, or a uint8 tensor of one axis",
            )
        hooks.realize([source])
        return Bytes("a tensor", memoryview(hooks.read(source)).cast("B"), source)
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            f"{what} of {repr(source)[:60]}",
            because="it is no path",
            fix="pass text, a Path or a uint8 tensor",
        )
    path = Path(source)
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return Bytes(str(path), memoryview(b""), None)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise FileError(f"{what} of {path}", because=str(error), fix="check the path") from error
    return Bytes(str(path), memoryview(mapped), mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
