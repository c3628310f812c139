"""GGUF files: metadata and tensors of a model in one file or several parts. Opening one reads the header,
checks every count, length and offset against the file's size before anything is allocated for it, and maps
the rest.

    magic "GGUF", version, number of tensors, number of metadata entries
    entries: name, type, value             types: numbers, bool, text, arrays of one type
    tensors: name, sizes (row length first), block type, offset
    padding to `general.alignment`, then the data
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

from whit.helpers import ArgumentError, FileFormatError, prod, round_up, write_atomic
from whit.nn.blocks import BLOCK_TYPES, BlockType, block_type, decode
from whit.nn.state import FileError
from whit.tensor import Tensor, hooks, storage
from whit.uop import DType, UOp, dtypes
from whit.uop.uop import show_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"GGUF"
_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_FORMATS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?",
            "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip
_SIZES = {name: struct.calcsize("<" + code) for name, code in _FORMATS.items()} | {"string": 8, "array": 12}
_DEEPEST = 4  # arrays of arrays
_LONGEST_KEY = 65535
_LONGEST_NAME = 255  # of a tensor; the format says 64
_MOST_PARTS = 10_000
_FEW = 2000  # texts that a loop finds sooner than NumPy is loaded


class GGUFArray(Sequence[Any]):
    """An array of the metadata, read when it is asked for. Elements are numbers, bools, texts or arrays.

    `kind` names the type of the elements as the format does: "u8" … "f64", "bool", "string", "array".
    `places`: of texts, where in `data` their lengths stand, and the end; of arrays, the arrays.
    """

    def __init__(self, data: memoryview, kind: str, count: int, places: Any = None) -> None:
        self.data, self.kind, self._count = data, kind, count
        self.places = places

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        place = range(self._count)[index]
        if self.kind == "array":
            return self.places[place]
        if self.kind == "string":
            return _text(self._text_bytes(place))
        size = _SIZES[self.kind]
        return struct.unpack_from("<" + _FORMATS[self.kind], self.data, place * size)[0]

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "array":
            return iter(self.places)
        if self.kind == "string":
            return iter(self.strings())
        return (value for (value,) in struct.iter_unpack("<" + _FORMATS[self.kind], self.data))

    def __repr__(self) -> str:
        shown = ", ".join(repr(value) for value in self[:4])
        return f"GGUFArray({self.kind} × {self._count}: {shown}{', …' if self._count > 4 else ''})"

    def numpy(self) -> NDArray[Any]:
        """The numbers as a NumPy array (read-only, not copied). ArgumentError for texts and arrays of
        arrays."""
        import numpy as np

        if self.kind not in _FORMATS:
            raise ArgumentError(
                f"numpy() of an array of {self.kind}",
                because="it holds no numbers",
                fix="iterate, or use strings()",
            )
        found: NDArray[Any] = np.frombuffer(self.data, np.dtype("<" + _FORMATS[self.kind]), self._count)
        found.flags.writeable = False
        return found

    def byte_strings(self) -> list[bytes]:
        """The bytes of every text. ArgumentError if the elements are no texts."""
        self._only_texts("byte_strings")
        data, places = bytes(self.data), self.places
        return [
            data[a + 8 : b]
            for a, b in itertools.pairwise(places if isinstance(places, list) else places.tolist())
        ]

    def strings(self) -> list[str]:
        """Every text, decoded as one. Bytes that are no UTF-8 become U+FFFD. ArgumentError if the elements
        are no texts."""
        self._only_texts("strings")
        if isinstance(self.places, list):
            return [_text(text) for text in self.byte_strings()]
        import numpy as np

        # with lengths of less than 256 as zeros, eight zeros stand between the texts: the whole is decoded,
        # then cut
        body = np.frombuffer(self.data, np.uint8).copy()
        body[self.places[:-1]] = 0
        if np.count_nonzero(body) == len(body) - 8 * self._count:
            with suppress(UnicodeDecodeError):
                return body.tobytes().decode().split("\0" * 8)[1:]
        return [_text(text) for text in self.byte_strings()]

    def _only_texts(self, what: str) -> None:
        if self.kind != "string":
            raise ArgumentError(
                f"{what}() of an array of {self.kind}", because="it holds no texts", fix="iterate"
            )

    def _text_bytes(self, place: int) -> bytes:
        return bytes(self.data[int(self.places[place]) + 8 : int(self.places[place + 1])])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


class Value(NamedTuple):
    """A metadata value with the type that the file gives it: "u8" … "f64", "bool", "string" or "array"."""

    type: str
    value: Any


def _nbytes(kind: BlockType, shape: tuple[int, ...]) -> int:
    return int(prod(shape)) // kind.elements * kind.nbytes


class GGUFTensor(NamedTuple):
    """A tensor of a file. `shape` has rows first, as NumPy has it; `offset` counts from the start of the file
    `part`."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    part: int = 0

    @property
    def nbytes(self) -> int:
        return _nbytes(self.type, self.shape)

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """The shape of its bytes."""
        row = self.shape[-1] if self.shape else 1
        return (*self.shape[:-1], row // self.type.elements * self.type.nbytes)


class _Part(NamedTuple):
    """One mapped file."""

    path: Path
    map: mmap.mmap
    address: int
    values: dict[str, Value]
    tensors: dict[str, GGUFTensor]


class GGUF:
    """An open GGUF file, made by `open_gguf`.

    metadata: values by name (of the first part); tensors: by name, of all parts.
    """

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path, self._parts = path, parts
        self.values: Mapping[str, Value] = MappingProxyType(parts[0].values)
        self.metadata: Mapping[str, Any] = MappingProxyType({k: v.value for k, v in parts[0].values.items()})
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    _refuse(part.path, f"the tensor {name!r} is in two parts")
                self.tensors[name] = tensor

    def __repr__(self) -> str:
        return f"GGUF({str(self.path)!r}: {len(self.tensors)} tensors, {len(self.metadata)} metadata values)"

    @property
    def paths(self) -> list[Path]:
        """The files it consists of."""
        return [part.path for part in self._parts]

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, as they are in the file. ArgumentError for an unknown name."""
        tensor = self._find(name)
        return memoryview(self._parts[tensor.part].map)[tensor.offset : tensor.offset + tensor.nbytes]

    def raw(self, name: str, device: str | None = None) -> Tensor:
        """The blocks of a tensor: uint8 (rows…, bytes of a row). On the CPU this is the file's mapping
        itself: nothing is read before it is used. ArgumentError for an unknown name."""
        return self._mapped(self._find(name), dtypes.uint8, device)

    def load(self, name: str, device: str | None = None) -> Tensor:
        """The values of a tensor, decoded when they are used: float32 from blocks, else the type of the file.
        ArgumentError for an unknown name."""
        tensor = self._find(name)
        if tensor.type.dtype is not None:
            return self._mapped(tensor, tensor.type.dtype, device)
        return decode(self.raw(name, device), tensor.type)

    def _find(self, name: str) -> GGUFTensor:
        found = self.tensors.get(name)
        if found is None:
            import difflib

            near = difflib.get_close_matches(str(name), list(self.tensors)[:5000], 3, 0.5)
            raise ArgumentError(
                f"tensor {name!r} of {self.path}",
                because="the file has none of that name",
                fix="did you mean " + ", ".join(near) + "?" if near else "`tensors` lists them",
            )
        return found

    def _mapped(self, tensor: GGUFTensor, dtype: DType, device: str | None) -> Tensor:
        part = self._parts[tensor.part]
        place = storage.device_name(device if device is not None else storage.default_device())
        shape = tensor.raw_shape if dtype is dtypes.uint8 else tensor.shape
        buffer = UOp.new_buffer(prod(shape), dtype, place)
        data = self.data(tensor.name)
        if tensor.offset % dtype.itemsize:  # no kernel could read it where it is
            storage.put(buffer, memoryview(bytes(data)))
        else:
            storage.put(buffer, data, storage.Lent(part.address + tensor.offset, part.map))
        return Tensor(buffer.reshape(shape))


def open_gguf(path: str | Path) -> GGUF:
    """Open a GGUF file, or all parts of one that is split (name any of them).

    Errors: FileFormatError for a file that is truncated, damaged or hostile (nothing has been allocated
    then); FileError if it cannot be opened.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"open_gguf({repr(path)[:60]})", because="it is no path", fix="pass text or a Path"
        )
    place = Path(path)
    first = _open(place, 0)
    count = _number(first, "split.count", 1)
    if count <= 1:
        return GGUF(place, [first])
    if count > _MOST_PARTS:
        _refuse(place, f"it says that it has {count} parts")
    parts = [_open(other, n) for n, other in enumerate(_part_paths(place, count))]
    for n, part in enumerate(parts):
        if _number(part, "split.no", 0) != n or _number(part, "split.count", 1) != count:
            _refuse(part.path, f"it is not part {n + 1} of {count}, as its name says")
    whole = GGUF(place, parts)
    wanted = _number(parts[0], "split.tensors.count", len(whole.tensors))
    if wanted != len(whole.tensors):
        _refuse(place, f"its parts have {len(whole.tensors)} tensors and should have {wanted}")
    return whole


def _number(part: _Part, name: str, default: int) -> int:
    value = part.values.get(name, Value("u16", default)).value
    if type(value) is not int:
        _refuse(part.path, f"{name} is no whole number")
    return value


def _part_paths(path: Path, count: int) -> list[Path]:
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if found is None or int(found[3]) != count:
        raise FileError(
            f"GGUF file {path}",
            because=f"it is one of {count} parts, and its name does not say which",
            fix=f"give the parts their names again: NAME-00001-of-{count:05d}.gguf",
        )
    return [path.with_name(f"{found[1]}-{n + 1:05d}-of-{count:05d}.gguf") for n in range(count)]


# ---- reading a header --------------------------------------------------------------------------------------


def _refuse(path: str | Path, reason: str) -> NoReturn:
    raise FileFormatError(f"GGUF file {path}", because=reason, fix="fetch or write the file again")


def _open(path: Path, number: int) -> _Part:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(24)
            if len(head) < 24 or head[:4] != MAGIC:
                _refuse(
                    path, "it is no GGUF file: " + (f"it starts with {head[:4]!r}" if head else "it is empty")
                )
            # private, so that a write to a tensor never changes the file; nothing is set aside for such
            # writes
            flags = mmap.MAP_PRIVATE | getattr(
                mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0
            )
            mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise FileError(f"GGUF file {path}", because=str(error), fix="check the path") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    values, tensors = _Header(path, memoryview(mapped)).parse()
    return _Part(path, mapped, address, values, {t.name: t._replace(part=number) for t in tensors})


class _Header:
    """A cursor over the header. Every read is checked against the file's end first."""

    def __init__(self, path: str | Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 4

    def parse(self) -> tuple[dict[str, Value], list[GGUFTensor]]:
        version = self.take("I")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                _refuse(self.path, "its numbers are big-endian, which whit does not read")
            _refuse(self.path, f"it has version {version}; whit reads versions 2 and 3")
        tensor_count, value_count = self.take("Q"), self.take("Q")
        self.expect(value_count, 13, "metadata entries")
        values: dict[str, Value] = {}
        for _ in range(value_count):
            key = self.key("the name of a metadata entry", _LONGEST_KEY)
            if key in values:
                _refuse(self.path, f"the metadata entry {key!r} stands twice")
            kind = self.kind(key)
            values[key] = Value(kind, self.value(kind, key))
        return values, self.tensors(tensor_count, _alignment(self.path, values))

    def tensors(self, count: int, alignment: int) -> list[GGUFTensor]:
        self.expect(count, 24, "tensors")
        found = [self.tensor() for _ in range(count)]
        if len({tensor.name for tensor in found}) != count:
            names = sorted(tensor.name for tensor in found)
            _refuse(
                self.path,
                f"the tensor {next(a for a, b in itertools.pairwise(names) if a == b)!r} stands twice",
            )
        start, end = round_up(self.at, alignment), self.data.nbytes
        for tensor in found:
            if tensor.offset % alignment:
                _refuse(
                    self.path, f"{tensor.name!r} is at offset {tensor.offset}, no multiple of {alignment}"
                )
            if start + tensor.offset + tensor.nbytes > end:
                last = start + tensor.offset + tensor.nbytes
                _refuse(self.path, f"{tensor.name!r} ends at byte {last}, and the file has {end}")
        last = 0
        for tensor in sorted(found, key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset < last:
                _refuse(self.path, f"{tensor.name!r} overlaps another tensor")
            last = tensor.offset + tensor.nbytes
        return [tensor._replace(offset=start + tensor.offset) for tensor in found]

    def tensor(self) -> GGUFTensor:
        name = self.key("the name of a tensor", _LONGEST_NAME)
        rank = self.take("I")
        if rank > 4:
            _refuse(self.path, f"{name!r} has {rank} dimensions, more than 4")
        shape = tuple(self.take("Q") for _ in range(rank))[::-1]
        number, offset = self.take("I"), self.take("Q")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            _refuse(self.path, f"{name!r} has the unknown block type {number}")
        if prod(shape) >= 1 << 60 or any(size >= 1 << 60 for size in shape):
            _refuse(self.path, f"{name!r} has the impossible shape {show_shape(shape)}")
        row = shape[-1] if shape else 1
        if row % kind.elements:
            _refuse(
                self.path,
                f"{name!r} has rows of {row}, no whole {kind.name} blocks of {kind.elements}",
            )
        return GGUFTensor(name, shape, kind, offset)

    # ---- values

    def take(self, code: str) -> Any:
        """One number."""
        size = struct.calcsize("<" + code)
        self.expect(1, size, "numbers")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def expect(self, count: int, size: int, what: str) -> None:
        """Refuse a count of things of at least `size` bytes that the rest of the file cannot hold."""
        if count * size > self.data.nbytes - self.at:
            _refuse(
                self.path,
                f"{count} {what} should follow byte {self.at}, and the file has {self.data.nbytes}",
            )

    def kind(self, key: str) -> str:
        number = self.take("I")
        if number >= len(_NAMES):
            _refuse(self.path, f"{key!r} has the unknown type {number}")
        return _NAMES[number]

    def raw_text(self) -> bytes:
        length = self.take("Q")
        self.expect(length, 1, "bytes of text")
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def key(self, what: str, longest: int) -> str:
        start = self.at
        raw = self.raw_text()
        if len(raw) > longest:
            _refuse(self.path, f"{what} at byte {start} has {len(raw)} bytes")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            _refuse(self.path, f"{what} at byte {start} is no UTF-8")

    def value(self, kind: str, key: str, depth: int = 0) -> Any:
        if kind == "string":
            return _text(self.raw_text())
        if kind == "array":
            return self.array(key, depth)
        if kind == "bool":
            return self.truth(key)
        return self.take(_FORMATS[kind])

    def truth(self, key: str) -> bool:
        value = self.take("B")
        if value > 1:
            _refuse(self.path, f"{key!r} is the bool {value}")
        return bool(value)

    def array(self, key: str, depth: int) -> GGUFArray:
        if depth >= _DEEPEST:
            _refuse(self.path, f"{key!r} nests arrays more than {_DEEPEST} deep")
        kind, count = self.kind(key), self.take("Q")
        self.expect(count, _SIZES[kind], f"elements of {key!r}")
        start = self.at
        places: Any = None
        if kind == "string":
            places = self.text_places(count, key)
        elif kind == "array":
            places = [self.array(key, depth + 1) for _ in range(count)]
        else:
            self.at += count * _SIZES[kind]
            if kind == "bool" and bytes(self.data[start : self.at]).strip(b"\0\1"):
                _refuse(self.path, f"{key!r} has a bool that is neither 0 nor 1")
        return GGUFArray(self.data[start : self.at], kind, count, places)

    def text_places(self, count: int, key: str) -> Any:
        """Where the lengths of `count` texts stand, from the first one on, and the end of the last."""
        start = self.at
        places = (
            walk_texts(self.data[start:], count) if count <= _FEW else find_texts(self.data[start:], count)
        )
        if places is None:
            _refuse(self.path, f"the texts of {key!r} reach beyond the end of the file")
        self.at = start + int(places[-1])
        return places


def _alignment(path: str | Path, values: Mapping[str, Value]) -> int:
    value = values.get("general.alignment", Value("u32", 32)).value
    if type(value) is not int or value < 1 or value & (value - 1) or value > 1 << 20:
        _refuse(path, f"general.alignment is {value!r}")
    return value


def walk_texts(data: memoryview, count: int) -> list[int] | None:
    """Places of `count` texts, one after the other: each is a length of eight bytes and that many bytes. The
    last number is the end; None if the data end before."""
    places, at, end = [0], 0, data.nbytes
    read = struct.Struct("<Q").unpack_from
    for _ in range(count):
        if at + 8 > end:
            return None
        at += 8 + read(data, at)[0]
        places.append(at)
    return places if at <= end else None


def find_texts(data: memoryview, count: int) -> NDArray[np.int64] | None:
    """The same without a step for every text: places whose eight bytes are a small number are candidates, and
    a run of candidates of which each leads to the next one is taken as a whole. Only between runs is there a
    step."""
    import numpy as np

    pieces: list[NDArray[np.int64]] = []
    at, left = 0, count
    window = 24 * count + 4096
    while left:
        part = data[at : at + window]
        usable = part.nbytes - 8
        if usable < 0:
            return None
        places, following = _candidates(part)
        # run[i]: the first candidate from i on that does not lead to its neighbour
        broken = np.flatnonzero(following[:-1] != places[1:])
        here = 0
        while left and here <= usable:
            i = int(np.searchsorted(places, here))
            if i < len(places) and places[i] == here:
                b = bisect.bisect_left(broken, i)
                last = int(broken[b]) if b < len(broken) else len(places) - 1
                last = min(last, i + left - 1)
                pieces.append(places[i : last + 1] + at)
                left -= last + 1 - i
                here = int(following[last])
            else:  # a long text
                pieces.append(np.array([at + here], np.int64))
                left -= 1
                here += 8 + int.from_bytes(part[here : here + 8], "little")
        at += here
        if at > data.nbytes:
            return None
    return np.concatenate([*pieces, np.array([at], np.int64)])


def _candidates(data: memoryview) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places at which eight bytes are a number below 256, in order, and where such texts would end. (The
    place before one of these is none, unless the number is 0.)"""
    import numpy as np

    found = np.zeros(data.nbytes, bool)
    for shift in range(8):
        words = np.frombuffer(data, np.dtype("<u8"), (data.nbytes - shift) // 8, shift)
        np.less(words, 256, out=found[shift::8][: len(words)])
    places = np.flatnonzero(found)
    return places, places + 8 + np.frombuffer(data, np.uint8)[places]


# ---- writing -----------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A tensor for `write_gguf` whose bytes are blocks already, or are made when they are written: `data` is
    bytes or a
    function that gives them. `shape` counts numbers, rows first."""

    type: BlockType
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        return _nbytes(self.type, self.shape)


_TYPE_OF_DTYPE = {kind.dtype: kind for kind in BLOCK_TYPES.values() if kind.dtype is not None}
_LIMITS = {name: (-(1 << 8 * _SIZES[name] - 1) if name[0] == "i" else 0,
                  (1 << 8 * _SIZES[name] - (name[0] == "i")) - 1)
           for name in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")}  # fmt: skip


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a GGUF file (version 3). It appears whole under its name, or not at all; an older file of that
    name is kept
    then.

    metadata: numbers, bools, texts, sequences of one kind of them, or `Value`s where the type matters: a
    whole number is written as u32, or i32, u64, i64 where it must; a float as f32. tensors: Tensors, NumPy
    arrays, or `Encoded`.
    Errors: ArgumentError for what the format cannot hold (nothing is written then); FileError when the disk
    refuses.

    >>> write_gguf("model.gguf", {"general.architecture": "llama"}, {"w": Tensor([1.0])})  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"write_gguf to {repr(path)[:60]}", because="it is no path", fix="pass text or a Path"
        )
    if not isinstance(metadata, Mapping) or not isinstance(tensors, Mapping):
        raise ArgumentError(
            "write_gguf", because="metadata and tensors must be dictionaries", fix="pass dictionaries"
        )
    alignment = _alignment(path, {k: _typed(k, v) for k, v in metadata.items() if k == "general.alignment"})
    entries = {name: _encoded(name, tensor) for name, tensor in tensors.items()}
    head = bytearray(MAGIC + struct.pack("<IQQ", 3, len(entries), len(metadata)))
    for key, value in metadata.items():
        typed = _typed(key, value)
        head += _packed_text(_key(key)) + struct.pack("<I", _NAMES.index(typed.type)) + _packed(key, typed)
    place = 0
    for name, entry in entries.items():
        head += _packed_text(_key(name))
        head += struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        head += struct.pack("<IQ", entry.type.id, place)
        place += round_up(entry.nbytes, alignment)
    head += bytes(-len(head) % alignment)
    try:
        write_atomic(path, _parts(head, list(entries.values()), alignment), durable=True)
    except OSError as error:
        raise FileError(
            f"write_gguf to {path}",
            because=str(error),
            fix="choose another place; what was there before is unchanged",
        ) from error


def _parts(head: bytearray, entries: list[Encoded], alignment: int) -> Iterator[bytes | memoryview]:
    """The file, piece by piece: what is encoded when it is written never lies in memory as a whole."""
    yield bytes(head)
    for entry in entries:
        data = memoryview(entry.data() if callable(entry.data) else entry.data).cast("B")
        assert data.nbytes == entry.nbytes, f"{data.nbytes} bytes for {entry.type} {entry.shape}"
        yield data
        yield bytes(-data.nbytes % alignment)


def _key(name: object) -> bytes:
    if (
        not isinstance(name, str)
        or not 0 < len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
        or "\0" in name
    ):
        raise ArgumentError(
            f"write_gguf: the name {repr(name)[:60]}",
            because=f"names are text of 1 to {_LONGEST_NAME} bytes",
            fix="rename it",
        )
    return name.encode()


def _packed_text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


_BY_NUMPY = {
    "float32": "F32", "float16": "F16", "float64": "F64", "bfloat16": "BF16",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


def _encoded(name: str, tensor: Any) -> Encoded:
    """A tensor in whatever form, as bytes of a type that the format has."""
    kind: BlockType | None
    if isinstance(tensor, Encoded):
        kind, shape, data = tensor
    elif isinstance(tensor, Tensor):
        kind, shape = _TYPE_OF_DTYPE.get(tensor.dtype), tensor._concrete_shape()
        data = partial(hooks.read, tensor)
    else:
        import numpy as np

        array = np.ascontiguousarray(tensor)
        kind = block_type(_BY_NUMPY[array.dtype.name]) if array.dtype.name in _BY_NUMPY else None
        shape, data = np.shape(tensor), array.reshape(-1).view(np.uint8)
    row = shape[-1] if shape else 1
    problem = ""
    if kind is None:
        problem = f"the format has no type for {getattr(tensor, 'dtype', type(tensor).__name__)}"
    elif len(shape) > 4:
        problem = f"it has {len(shape)} axes, more than 4"
    elif row % kind.elements:
        problem = f"its rows of {row} are no whole {kind.name} blocks of {kind.elements}"
    elif not callable(data) and memoryview(data).nbytes != _nbytes(kind, shape):
        problem = f"{memoryview(data).nbytes} bytes are given and {_nbytes(kind, shape)} needed"
    if problem or kind is None:
        raise ArgumentError(
            f"write_gguf: tensor {name!r}", because=problem, fix="cast, reshape or leave it out"
        )
    return Encoded(kind, shape, data)


def _typed(key: str, value: Any) -> Value:
    """A metadata value with a type."""
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return Value("bool", value)
    if isinstance(value, int):
        for kind in ("u32", "i32", "u64", "i64"):
            if _LIMITS[kind][0] <= value <= _LIMITS[kind][1]:
                return Value(kind, value)
    if isinstance(value, float):
        return Value("f32", value)
    if isinstance(value, str):
        return Value("string", value)
    if isinstance(value, Sequence) or hasattr(value, "__array__"):
        return Value("array", value)
    raise ArgumentError(
        f"write_gguf: metadata {key!r} = {repr(value)[:60]}",
        because="the format has no such values",
        fix="use numbers, bools, texts or sequences of them",
    )


def _packed(key: str, typed: Value) -> bytes:
    kind, value = typed
    try:
        if kind == "string":
            return _packed_text(value.encode("utf-8", "surrogatepass"))
        if kind == "array":
            return _packed_array(key, value)
        return struct.pack("<" + _FORMATS[kind], value)
    except (struct.error, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise ArgumentError(
            f"write_gguf: metadata {key!r} = {repr(value)[:60]}",
            because=f"it is no {kind}",
            fix="pass another type",
        ) from error


def _packed_array(key: str, value: Any) -> bytes:
    if isinstance(value, GGUFArray):
        head = struct.pack("<IQ", _NAMES.index(value.kind), len(value))
        return head + (
            b"".join(_packed_array(key, v) for v in value) if value.kind == "array" else bytes(value.data)
        )
    if hasattr(value, "__array__"):
        value = value.tolist()
    kinds = {_typed(key, item).type for item in value}
    whole = kinds <= set(_LIMITS)
    if whole:  # one type for all: the narrowest of the four that writing uses
        fits = [
            k for k in ("i32", "u32", "i64", "u64") if all(_LIMITS[k][0] <= v <= _LIMITS[k][1] for v in value)
        ]
        kinds = set(fits[:1])
    elif kinds == {"f32"} | (kinds & set(_LIMITS)):
        kinds, value = {"f32"}, [float(item) for item in value]
    if len(kinds) != 1 and value:
        raise ArgumentError(
            f"write_gguf: metadata {key!r}", because="its elements are of several kinds", fix="use one kind"
        )
    kind = kinds.pop() if kinds else "i32"
    body = b"".join([_packed(key, Value(kind, item)) for item in value])
    return struct.pack("<IQ", _NAMES.index(kind), len(value)) + body
