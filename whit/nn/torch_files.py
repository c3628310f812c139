"""Checkpoints of PyTorch, `.pth` and `.pt`, in both of its forms, without PyTorch and without running
anything that a file names.

Zip form (torch 1.6 and later): a pickle of the structure, `…/data.pkl`, and a stored member for each storage.
Legacy form: pickles of a magic number, a version, facts of the machine, the structure and the names of the
storages; then, for each storage, its length (int64) and its bytes.

A pickle is a program. It is read by an unpickler that knows the few names with which tensors are written and
refuses every other one; its opcodes are checked before, for what would allocate.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NoReturn, cast

from whit.helpers import FileFormatError, prod
from whit.nn.archives import Member, MemoryFile, ZipFile
from whit.nn.mapped import Bytes, bytes_of
from whit.tensor import Tensor
from whit.uop import DType, dtypes

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
MOST_PICKLE = 1 << 28  # bytes of a structure
_STATE_DICT = "write a state dict: torch.save(model.state_dict(), path)"
MOST_DEPTH = 100  # of lists and dictionaries within each other
_STORAGES: dict[str, DType] = {
    "DoubleStorage": dtypes.float64,
    "FloatStorage": dtypes.float32,
    "HalfStorage": dtypes.float16,
    "BFloat16Storage": dtypes.bfloat16,
    "LongStorage": dtypes.int64,
    "IntStorage": dtypes.int32,
    "ShortStorage": dtypes.int16,
    "CharStorage": dtypes.int8,
    "ByteStorage": dtypes.uint8,
    "BoolStorage": dtypes.bool,
    "UntypedStorage": dtypes.uint8,
}
_DTYPES: dict[str, DType] = {
    "float64": dtypes.float64,
    "float32": dtypes.float32,
    "float16": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "int64": dtypes.int64,
    "int32": dtypes.int32,
    "int16": dtypes.int16,
    "int8": dtypes.int8,
    "uint8": dtypes.uint8,
    "uint16": dtypes.uint16,
    "uint32": dtypes.uint32,
    "uint64": dtypes.uint64,
    "bool": dtypes.bool,
    "float8_e4m3fn": dtypes.fp8e4m3,
    "float8_e5m2": dtypes.fp8e5m2,
}


def torch_load(source: Any, device: str | None = None) -> Any:
    """What a file written by `torch.save` holds: dictionaries, lists, numbers and texts, with Tensors that
    are read when they are used. Tensors that share memory there are tensors of their own here.

    source: a path, or a uint8 tensor of one axis
    Errors: FileFormatError for a damaged or hostile file (nothing has been allocated then), for a whole
            module instead of a state dict, for programs of TorchScript, and for sparse, complex or quantized
            tensors; FileError if it cannot be opened

    >>> torch_load("model.pth")["state_dict"]  # doctest: +SKIP
    """
    file = bytes_of("torch_load", source)
    reader = _Zip(file) if bytes(file.data[:4]) == b"PK\x03\x04" else _Legacy(file)
    return _finished(reader.structure, reader, device, set(), 0)


# ---- what a pickle may build -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    """Numbers of one type in the file, or a stretch of them; the file counts in units of some bytes."""

    dtype: DType
    key: str
    count: int
    unit: int
    start: int = 0


@dataclass(frozen=True)
class _Pending:
    """A tensor, of which the numbers' place is not known yet."""

    storage: _Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Kind:
    """The type of a storage, as pickles name it."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype


class _Unpickler(pickle.Unpickler):
    """Knows the names with which tensors are written, and no other."""

    def __init__(self, stream: io.BytesIO, file: Bytes) -> None:
        super().__init__(stream, encoding="utf-8")
        self.file = file
        self.known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): _plain(OrderedDict),
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._typed_tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch", "Size"): _plain(tuple),
            ("torch", "device"): _plain(str),
            ("torch.serialization", "_get_layout"): _plain(str),
            ("_codecs", "encode"): _encoded,
        }
        for module in ("builtins", "__builtin__"):
            self.known[module, "set"] = _plain(set)

    def find_class(self, module: str, name: str) -> Any:
        found = self.known.get((module, name))
        if found is not None:
            return found
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Kind(_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        refuse(self.file, f"it names {module}.{name}, and only tensors are read", _STATE_DICT)

    def persistent_load(self, pid: Any) -> Any:
        fits = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"
        if not fits or not isinstance(pid[1], _Kind) or not _whole(pid[4]):
            refuse(self.file, f"{repr(pid)[:80]} is no storage")
        kind, key, count = pid[1], str(pid[2]), pid[4]
        whole = _Storage(kind.dtype, key, count, kind.dtype.itemsize)
        if len(pid) < 6 or pid[5] is None:
            return whole
        view = pid[5]  # a stretch of another storage
        if not isinstance(view, tuple) or len(view) != 3 or not _whole(view[1]) or not _whole(view[2]):
            refuse(self.file, f"{repr(view)[:80]} is no view of a storage")
        return _Storage(kind.dtype, key, count, kind.dtype.itemsize, view[1])

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Pending:
        numbers = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
        if not isinstance(storage, _Storage) or not numbers or len(shape) > 64:
            refuse(self.file, "a tensor has no storage, shape and strides")
        if not all(_whole(v) for v in (offset, *shape, *strides)):
            refuse(self.file, f"a tensor has the shape {repr(shape)[:60]} and strides {repr(strides)[:60]}")
        last = offset + sum([(n - 1) * step for n, step in zip(shape, strides)])
        if prod(shape) and last + storage.start >= storage.count:
            refuse(
                self.file,
                f"a tensor of shape {shape} from element {offset} on ends behind its storage "
                f"{storage.key!r} of {storage.count}",
            )
        return _Pending(storage, storage.dtype, offset, shape, strides)

    def _typed_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Pending:
        """A tensor over a storage of bytes: how types are written that have no storage of their own."""
        dtype = next((part for part in rest if isinstance(part, DType)), None)
        if dtype is None or not isinstance(storage, _Storage):
            refuse(self.file, "a tensor has no dtype")
        count = storage.count * storage.unit // dtype.itemsize
        typed = _Storage(dtype, storage.key, count, storage.unit)
        return self._tensor(typed, offset, shape, strides)

    def _parameter(self, data: Any, *rest: Any) -> Any:
        return data


def _plain(kind: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor that pickles may call, and nothing that they could change."""
    return lambda *args: kind(*args)


def _encoded(text: Any, encoding: Any = "utf-8") -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are written as latin1")
    return text.encode("latin1")


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def unpickled(data: memoryview, file: Bytes) -> tuple[Any, int]:
    """The first pickle in the bytes, and its length. FileFormatError if it is broken or asks for anything
    that is no tensor."""
    stop = _check_opcodes(data, file)
    try:
        return _Unpickler(io.BytesIO(bytes(data[:stop])), file).load(), stop
    except FileFormatError:
        raise
    except Exception as error:  # a broken pickle ends in any of Python's errors
        refuse(file, f"its structure is broken ({type(error).__name__}: {error})")


def _check_opcodes(data: memoryview, file: Bytes) -> int:
    """The length of a pickle that asks for no memory but what it fills: tables of its unpickler grow to the
    largest number that an opcode names."""
    most = min(data.nbytes, MOST_PICKLE)
    import pickletools

    stream, count = MemoryFile(data[:most]), 0
    try:
        for opcode, argument, _ in pickletools.genops(cast(IO[bytes], stream)):
            count += 1
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
                refuse(file, f"its structure numbers {count} values up to {argument}")
            if opcode.name in ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"):
                refuse(file, f"its structure uses {opcode.name}")
    except FileFormatError:
        raise
    except Exception as error:  # pickletools raises whatever a broken byte leads to
        refuse(file, f"its structure is broken ({error})")
    return stream.tell()


# ---- the two forms -----------------------------------------------------------------------------------------


class _Zip:
    def __init__(self, file: Bytes) -> None:
        self.file = file
        members = {member.name: member for member in ZipFile(file).members(MOST_PICKLE)}
        found = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(found) != 1:
            refuse(file, "it has no structure, data.pkl" if not found else "it has several structures")
        self.folder = found[0][: -len("data.pkl")]
        if self.folder + "constants.pkl" in members:
            refuse(file, "it is a program of TorchScript", _STATE_DICT)
        order = members.get(self.folder + "byteorder")
        if order is not None and order.read() != b"little":
            refuse(file, "its numbers are big-endian")
        self.members: dict[str, Member] = members
        self.structure, _ = unpickled(memoryview(members[found[0]].read()), file)

    def place(self, storage: _Storage) -> int:
        """Where its bytes begin."""
        member = self.members.get(f"{self.folder}data/{storage.key}")
        if member is None or member.start is None:
            refuse(self.file, f"storage {storage.key!r} is missing" if member is None else "it is compressed")
        if member.size != storage.count * storage.dtype.itemsize:
            refuse(
                self.file,
                f"storage {storage.key!r} has {member.size} bytes, not {storage.count} {storage.dtype}",
            )
        return member.start


class _Legacy:
    def __init__(self, file: Bytes) -> None:
        self.file, self.at = file, 0
        if self._next() != MAGIC:
            refuse(file, "it does not begin as a checkpoint of PyTorch does")
        if self._next() != PROTOCOL:
            refuse(file, "it is of an unknown version")
        facts = self._next()
        if not isinstance(facts, dict) or not facts.get("little_endian", False):
            refuse(file, "its numbers are big-endian")
        self.structure = self._next()
        keys = self._next()
        if not isinstance(keys, list):
            refuse(file, "it does not name its storages")
        self.keys, self.begin = [str(key) for key in keys], self.at
        self.places: dict[str, tuple[int, int]] = {}  # of each storage, its bytes' place and their number

    def _next(self) -> Any:
        value, length = unpickled(self.file.data[self.at :], self.file)
        self.at += length
        return value

    def find(self, sizes: dict[str, int]) -> None:
        """Walk over the storages: each has its length before it. `sizes`: bytes of an element of each."""
        place = self.begin
        for key in self.keys:
            head = self.file.data[place : place + 8]
            count = struct.unpack("<q", head)[0] if head.nbytes == 8 else -1
            length = count * sizes.get(key, 1)
            if count < 0 or place + 8 + length > len(self.file):
                refuse(self.file, f"storage {key!r} of {count} elements does not end in the file")
            self.places[key] = place + 8, count
            place += 8 + length

    def place(self, storage: _Storage) -> int:
        if not self.places:
            self.find(_sizes(self.structure, {}, 0))
        found = self.places.get(storage.key)
        if found is None or found[1] * storage.unit < storage.count * storage.dtype.itemsize:
            refuse(self.file, f"storage {storage.key!r} of {storage.count} elements is not in it")
        return found[0] + storage.start * storage.dtype.itemsize


# ---- structures --------------------------------------------------------------------------------------------


def _sizes(value: Any, found: dict[str, int], depth: int) -> dict[str, int]:
    """Bytes of an element of each storage in a structure."""
    if isinstance(value, _Storage):
        found[value.key] = value.unit
    elif isinstance(value, _Pending):
        found[value.storage.key] = value.storage.unit
    elif depth < MOST_DEPTH:
        for child in _children(value):
            _sizes(child, found, depth + 1)
    return found


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set)) else []


def _finished(value: Any, reader: _Zip | _Legacy, device: str | None, above: set[int], depth: int) -> Any:
    """The structure with tensors in the places of pending ones."""
    if isinstance(value, _Pending):
        return _tensor(value, reader, device)
    if isinstance(value, _Storage):
        return _tensor(_Pending(value, value.dtype, 0, (value.count,), (1,)), reader, device)
    if not isinstance(value, (dict, list, tuple, set)):
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, DType)):
            return value
        refuse(reader.file, f"it holds a {type(value).__name__}")
    if depth > MOST_DEPTH or id(value) in above:
        refuse(reader.file, "its structure contains itself, or is nested too deeply")
    inner = above | {id(value)}

    def finish(child: Any) -> Any:
        return _finished(child, reader, device, inner, depth + 1)

    if isinstance(value, dict):
        return type(value)((key, finish(child)) for key, child in value.items())
    return type(value)([finish(child) for child in value])


def _tensor(pending: _Pending, reader: _Zip | _Legacy, device: str | None) -> Tensor:
    place, dtype, shape = reader.place(pending.storage), pending.dtype, pending.shape
    start = place + pending.offset * dtype.itemsize
    if 0 in shape:
        return Tensor.zeros(*shape, dtype=dtype)
    order = sorted(range(len(shape)), key=lambda axis: -pending.strides[axis])
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and pending.strides[axis] != step:
            return _strided(pending, reader.file, place, device)
        step *= shape[axis]
    found = reader.file.tensor(start, tuple([shape[axis] for axis in order]), dtype, device)
    back = [order.index(axis) for axis in range(len(shape))]
    return found if back == list(range(len(shape))) else found.permute(back)


def _strided(pending: _Pending, file: Bytes, place: int, device: str | None) -> Tensor:
    """Any strides: elements are looked up by their numbers."""
    last = sum([(n - 1) * step for n, step in zip(pending.shape, pending.strides)])
    start = place + pending.offset * pending.dtype.itemsize
    row = file.tensor(start, (last + 1,), pending.dtype, device)
    numbers = Tensor.zeros(*pending.shape, dtype=dtypes.int64)
    for axis, (size, step) in enumerate(zip(pending.shape, pending.strides)):
        sides = [size if n == axis else 1 for n in range(len(pending.shape))]
        numbers = numbers + (Tensor.arange(size, dtype=dtypes.int64) * step).reshape(sides)
    return row.take(numbers.flatten(), 0).reshape(pending.shape)


def refuse(file: Bytes, reason: str, fix: str = "fetch or write the file again") -> NoReturn:
    raise FileFormatError(f"torch file {file.name}", because=reason, fix=fix)
