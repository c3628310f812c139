"""Members of tar and zip files as tensors of bytes, and a tensor of bytes as a file. Nothing is written to
the disk, and what is not compressed is read when it is used."""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from whit.helpers import ArgumentError, FileFormatError, human_bytes
from whit.nn.mapped import Bytes, bytes_of
from whit.tensor import Tensor
from whit.uop import dtypes

LIMIT = 1 << 32  # bytes that compressed members may become, unless the caller allows more
MOST_MEMBERS = 1 << 20


class MemoryFile(io.RawIOBase):
    """Bytes in memory as a file, not copied; a read never allocates more than there is."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._place = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        stop = self._data.nbytes if size is None or size < 0 else self._place + size
        part = bytes(self._data[self._place : stop])
        self._place += len(part)
        return part

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        part = self.read(view.nbytes)
        view[: len(part)] = part
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._data.nbytes}.get(whence)
        if start is None or start + offset < 0:
            raise ArgumentError(
                f"seek({offset}, {whence})", because="no such place is in the file", fix="seek from 0, 1 or 2"
            )
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        return self._place


class TensorIO(MemoryFile):
    """A uint8 tensor of one axis as a file that is read: for libraries that take file objects.

    >>> TensorIO(Tensor([104, 105], dtype="uint8")).read()
    b'hi'
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(bytes_of("TensorIO", tensor).data)


def accept_filename(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of a uint8 tensor take a path as well: the file's bytes, read when they are used.

    >>> @accept_filename
    ... def size(file: Tensor) -> int:
    ...     return int(file.shape[0])
    >>> size(Tensor([1, 2, 3], dtype="uint8"))
    3
    """

    @functools.wraps(function)
    def wrapped(source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, (str, os.PathLike)):
            found = bytes_of(function.__name__, source)
            source = found.tensor(0, (len(found),), dtypes.uint8)
        return function(source, *args, **kwargs)

    return wrapped


# ---- tar ---------------------------------------------------------------------------------------------------


def tar_extract(source: Any) -> dict[str, Tensor]:
    """The files in a tar file, by name, as uint8 tensors of one axis that are read when they are used.

    source: a path, or a uint8 tensor
    Errors: FileFormatError for a damaged or compressed file, for links and devices, and for names that lead
            out of the folder (absolute ones and those with ".."); FileError if it cannot be opened

    >>> tar_extract("weights.tar")  # doctest: +SKIP
    """
    import tarfile

    file = bytes_of("tar_extract", source)
    found: dict[str, Tensor] = {}
    try:
        with tarfile.open(fileobj=MemoryFile(file.data), mode="r:") as archive:
            for count, member in enumerate(archive):
                if count >= MOST_MEMBERS:
                    _refuse("tar", file, f"it has more than {MOST_MEMBERS} members")
                _check_name("tar", file, member.name)
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    _refuse("tar", file, f"{member.name!r} is no plain file")
                if member.size < 0 or member.offset_data + member.size > len(file):
                    _refuse("tar", file, f"{member.name!r} of {member.size} bytes does not end in the file")
                found[member.name] = file.tensor(member.offset_data, (member.size,), dtypes.uint8)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        _refuse("tar", file, str(error) or type(error).__name__)
    return found


# ---- zip ---------------------------------------------------------------------------------------------------


def zip_extract(source: Any, limit: int = LIMIT) -> dict[str, Tensor]:
    """The files in a zip file, by name, as uint8 tensors of one axis. Those that are stored are read when
    they are used, compressed ones at once.

    source: a path, or a uint8 tensor. limit: bytes that compressed members may become
    Errors: FileFormatError for a damaged file, encrypted members, more than `limit` bytes, and names that
            lead out of the folder; FileError if it cannot be opened

    >>> zip_extract("weights.zip")  # doctest: +SKIP
    """
    file = bytes_of("zip_extract", source)
    found: dict[str, Tensor] = {}
    for member in ZipFile(file).members(limit):
        start = member.start
        if start is not None:
            found[member.name] = file.tensor(start, (member.size,), dtypes.uint8)
        else:
            found[member.name] = Tensor(member.read(), dtype=dtypes.uint8)
    return found


class Member:
    """A file in a zip file; `start` is its place if it is stored as it is."""

    def __init__(self, archive: ZipFile, info: Any) -> None:
        self.archive, self.info = archive, info
        self.name, self.size = str(info.filename), int(info.file_size)
        self.start = archive.place(info) if info.compress_type == 0 else None

    def read(self) -> bytes:
        """Its bytes, checked."""
        return self.archive.read(self.info)


class ZipFile:
    """A zip file whose directory has been checked against its length."""

    def __init__(self, file: Bytes) -> None:
        import zipfile
        import zlib

        self.file = file
        self.errors = zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error, zlib.error
        try:
            self.archive = zipfile.ZipFile(MemoryFile(file.data))
        except self.errors as error:
            _refuse("zip", file, str(error))

    def members(self, limit: int) -> list[Member]:
        """The files in it, checked."""
        infos = self.archive.infolist()
        grown = sum([info.file_size for info in infos if info.compress_type])
        if len(infos) > MOST_MEMBERS or grown > limit:
            what = f"{len(infos)} members" if len(infos) > MOST_MEMBERS else human_bytes(grown)
            _refuse("zip", self.file, f"it would become {what}; the limit is {human_bytes(limit)}")
        for info in infos:
            _check_name("zip", self.file, info.filename)
            if info.flag_bits & 1:
                _refuse("zip", self.file, f"{info.filename!r} is encrypted")
        return [Member(self, info) for info in infos if not info.is_dir()]

    def place(self, info: Any) -> int:
        """Where the bytes of a stored member begin."""
        head = self.file.data[info.header_offset : info.header_offset + 30]
        if head.nbytes < 30 or bytes(head[:4]) != b"PK\x03\x04" or info.compress_size != info.file_size:
            _refuse("zip", self.file, f"{info.filename!r} has no header where the directory says")
        name, extra = struct.unpack("<HH", head[26:30])
        start: int = info.header_offset + 30 + name + extra
        if start + info.file_size > len(self.file):
            _refuse("zip", self.file, f"{info.filename!r} of {info.file_size} bytes does not end in the file")
        return start

    def read(self, info: Any) -> bytes:
        """The bytes of a member, no more than the directory says."""
        try:
            with self.archive.open(info) as stream:
                data = stream.read(info.file_size + 1)
        except self.errors as error:
            _refuse("zip", self.file, f"{info.filename!r}: {error}")
        if len(data) != info.file_size:
            _refuse("zip", self.file, f"{info.filename!r} is not as long as the directory says")
        return data


def _check_name(kind: str, file: Bytes, name: str) -> None:
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        _refuse(kind, file, f"the name {name!r} leads out of the folder")


def _refuse(kind: str, file: Bytes, reason: str) -> NoReturn:
    raise FileFormatError(f"{kind} file {file.name}", because=reason, fix="fetch or write the file again")

