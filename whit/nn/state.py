"""Names of a model's tensors, and safetensors files of them: checked before anything is allocated, mapped
lazily. Checkpoints of PyTorch and archives are read by `torch_files` and `archives`."""

from __future__ import annotations

import difflib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from whit.engine.realize import owned
from whit.helpers import ArgumentError, FileFormatError, all_int, prod, round_up, write_atomic
from whit.nn.archives import TensorIO, accept_filename, tar_extract, zip_extract
from whit.nn.mapped import Bytes, FileError, bytes_of
from whit.nn.torch_files import torch_load
from whit.tensor import Tensor, hooks
from whit.tensor.indexing import in_memory, memory_below
from whit.uop import DType, Ops, UOp, dtypes
from whit.uop.uop import show_shape

__all__ = [
    "FileError",
    "TensorIO",
    "accept_filename",
    "get_parameters",
    "get_state_dict",
    "load_state_dict",
    "safe_load",
    "safe_load_metadata",
    "safe_save",
    "tar_extract",
    "torch_load",
    "zip_extract",
]

# ---- names -------------------------------------------------------------------------------------------------


def get_state_dict(model: object, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a model by name: attributes, list positions and dictionary keys, joined by dots.

    Objects that contain themselves are entered once. A tensor that stands in several places has several
    names.

    >>> sorted(get_state_dict({"layer": [Tensor([1.0]), Tensor([2.0])]}))
    ['layer.0', 'layer.1']
    """
    if not isinstance(prefix, str):
        raise ArgumentError(
            f"get_state_dict with prefix {prefix!r}", because="it is no text", fix='pass "" or a name'
        )
    found: dict[str, Tensor] = {}
    _collect(model, prefix.rstrip("."), found, set())
    return found


def _collect(value: object, name: str, found: dict[str, Tensor], above: set[int]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
        return
    if id(value) in above:
        return
    for key, child in _children(value):
        _collect(child, f"{name}.{key}" if name else key, found, above | {id(value)})


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif hasattr(value, "_asdict"):
        yield from value._asdict().items()
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), child) for i, child in enumerate(value))
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, UOp))
        and not callable(getattr(value, "__get__", None))
    ):
        yield from vars(value).items()


def get_parameters(model: object) -> list[Tensor]:
    """All tensors of a model, each once, in the order of `get_state_dict`.

    >>> len(get_parameters([Tensor([1.0]), Tensor([2.0])]))
    2
    """
    return list({id(tensor): tensor for tensor in get_state_dict(model).values()}.values())


def load_state_dict(
    model: object, state_dict: Mapping[str, Tensor], strict: bool = True, realize: bool = True
) -> None:
    """Give every tensor of the model the value of that name, cast and copied to where the model's tensor is.

    strict: names that are missing or left over are an error (a tensor of several names needs one of them);
    shapes must always agree. Everything is checked before anything changes. A tensor that is already in
    memory is written in place (captured JIT functions see the new value). Errors: ArgumentError that lists
    what is missing, left over and of another shape, with the nearest names.
    """
    own = get_state_dict(model)
    _only_tensors("load_state_dict", state_dict)
    problems = _mismatches(own, state_dict, strict)
    if problems:
        raise ArgumentError(
            "load_state_dict",
            because="; ".join(problems),
            fix="rename the entries, or pass strict=False to load those whose names and shapes agree"
            if strict
            else "reshape the entries, or leave them out",
        )
    loaded: dict[int, Tensor] = {}
    for name, tensor in own.items():
        if name in state_dict and id(tensor) not in loaded:
            value = state_dict[name].to(tensor.device).cast(tensor.dtype)
            tensor.assign(value) if in_memory(tensor.uop) else tensor.replace(value)
            loaded[id(tensor)] = tensor
    if realize and loaded:
        hooks.realize(list(loaded.values()))
        for tensor in loaded.values():  # an array that somebody else holds may change: a model keeps its own
            memory = memory_below(tensor.uop)
            if memory is not None and memory.op is Ops.BUFFER:
                owned(memory)


def _only_tensors(what: str, values: Mapping[str, object]) -> None:
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"{what} of {repr(values)[:60]}", because="it is no dictionary", fix="pass tensors by name"
        )
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"{what} with {name!r}",
                because=f"it is a {type(value).__name__} and not a Tensor",
                fix="wrap it: Tensor(value)",
            )


def _mismatches(own: Mapping[str, Tensor], given: Mapping[str, Tensor], strict: bool) -> list[str]:
    problems: list[str] = []
    known = {id(tensor) for name, tensor in own.items() if name in given}
    missing = [name for name, tensor in own.items() if id(tensor) not in known]
    extra = [name for name in given if name not in own]
    if strict and missing:
        problems.append("missing " + _listed(missing, lambda name: _nearest(name, extra)))
    if strict and extra:
        problems.append("unexpected " + _listed(extra, lambda name: _nearest(name, missing)))
    wrong = [name for name in own if name in given and own[name].shape != given[name].shape]
    if wrong:
        problems.append(
            "other shapes: "
            + _listed(
                wrong,
                lambda name: (
                    f" is {show_shape(given[name].shape)}, the model has {show_shape(own[name].shape)}"
                ),
            )
        )
    return problems


def _listed(names: list[str], note: Callable[[str], str]) -> str:
    shown = ", ".join(name + note(name) for name in names[:10])
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others[:1000], 1, 0.5)
    return f" (near: {near[0]})" if near else ""


# ---- safetensors -------------------------------------------------------------------------------------------

_FILE_TYPES: dict[str, DType] = {
    "BOOL": dtypes.bool,
    "U8": dtypes.uint8,
    "I8": dtypes.int8,
    "U16": dtypes.uint16,
    "I16": dtypes.int16,
    "U32": dtypes.uint32,
    "I32": dtypes.int32,
    "U64": dtypes.uint64,
    "I64": dtypes.int64,
    "F16": dtypes.float16,
    "BF16": dtypes.bfloat16,
    "F32": dtypes.float32,
    "F64": dtypes.float64,
    "F8_E4M3": dtypes.fp8e4m3,
    "F8_E5M2": dtypes.fp8e5m2,
}
_FILE_NAMES = {dtype: name for name, dtype in _FILE_TYPES.items()}
INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes are, counted from the start of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


def safe_save(
    tensors: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. It appears whole under its name, or not at all; an older file of that name
    is kept then.

    Errors: ArgumentError for symbolic shapes and for a tensor named "__metadata__"; FileError when the disk
    refuses.

    >>> safe_save({"weight": Tensor([1.0, 2.0])}, "model.safetensors")  # doctest: +SKIP
    """
    _only_tensors("safe_save", tensors)
    target = _path("safe_save", path)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ArgumentError(
            f"safe_save with metadata {repr(metadata)[:60]}",
            because="it is no dictionary",
            fix="pass texts by name",
        )
    for name, tensor in tensors.items():
        if name == "__metadata__" or not all_int(tensor.shape):
            raise ArgumentError(
                f"safe_save of {name!r} with shape {show_shape(tensor.shape)}",
                because="the name is reserved" if name == "__metadata__" else "its size is symbolic",
                fix="rename it" if name == "__metadata__" else "shrink it to a known size",
            )
    # the widest first: then every tensor is aligned to its elements
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name in order:
        size = prod(tensors[name].shape) * tensors[name].dtype.itemsize
        header[name] = {
            "dtype": _FILE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(len(text), 8))
    if tensors:
        hooks.realize(list(tensors.values()))
    head = struct.pack("<Q", len(text)) + text
    try:
        write_atomic(target, chain([head], (hooks.read(tensors[name]) for name in order)), durable=True)
    except OSError as error:
        raise FileError(
            f"safe_save to {target}",
            because=str(error),
            fix="choose another place; what was there before is unchanged",
        ) from error


def safe_load(path: str | Path, device: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, lazily: bytes are read when a tensor is first used. The file is
    mapped privately, so that writing to a tensor never changes it. Of a model in several files name the index
    (`model.safetensors.index.json`), or its folder.

    Errors: FileFormatError for a file that is damaged or hostile (nothing has been allocated then),
    FileError if it cannot be opened.
    """
    target = _path("safe_load", path)
    if target.is_dir():
        target = target / INDEX
    if target.name.endswith(".index.json"):
        return _load_shards(target, device)
    file, entries, _ = _open_checked(target)
    return {entry.name: file.tensor(entry.start, entry.shape, entry.dtype, device) for entry in entries}


def _load_shards(index: Path, device: str | None) -> dict[str, Tensor]:
    """The tensors of all files that an index names, each from the file that it says."""
    text = bytes(bytes_of("safe_load", index).data[:_HEADER_LIMIT])
    try:
        listed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse(index, f"it is no valid JSON ({error})")
    where = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        _refuse(index, "its weight_map must give a file for each tensor")
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(where.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            _refuse(index, f"it names the file {name!r}, which is none beside it")
        shard = safe_load(index.parent / name, device)
        for key, tensor in shard.items():
            if where.get(key) != name:
                _refuse(index, f"{key!r} is in {name}, and the index says {where.get(key)!r}")
            found[key] = tensor
    missing = [key for key in where if key not in found]
    if missing:
        _refuse(index, f"{missing[0]!r} is not in {where[missing[0]]}")
    return {key: found[key] for key in where}


def safe_load_metadata(path: str | Path) -> dict[str, str]:
    """The free text (`__metadata__`) of a safetensors file. Errors: as `safe_load`."""
    return _open_checked(_path("safe_load_metadata", path))[2]


def _path(what: str, path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"{what}: path {repr(path)[:60]}", because="it is no path", fix="pass text or a Path"
        )
    return Path(path)


def _open_checked(path: Path) -> tuple[Bytes, list[Entry], dict[str, str]]:
    file = bytes_of("safetensors file", path)
    size = len(file)
    length = struct.unpack("<Q", file.data[:8])[0] if size >= 8 else -1
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        _refuse(
            path,
            f"its {size} bytes hold no header of {length} bytes"
            if length >= 0
            else "it is shorter than 8 bytes",
        )
    entries, metadata = parse_header(bytes(file.data[8 : 8 + length]), size - 8 - length, path)
    return file, entries, metadata


def parse_header(text: bytes, data_size: int, path: str | Path = "") -> tuple[list[Entry], dict[str, str]]:
    """Check a header against the number of data bytes that follow it. Every byte must belong to exactly one
    tensor.

    Errors: FileFormatError that names the entry and what is wrong with it.
    """
    try:
        header = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is no valid JSON ({error})")
    if not isinstance(header, dict):
        _refuse(path, "its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "__metadata__ must hold texts")
    entries = [_entry(name, row, 8 + len(text), path) for name, row in header.items()]
    place = 8 + len(text)
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != place:
            _refuse(
                path,
                f"{entry.name!r} starts at byte {entry.start} of the file, but "
                + ("the one before it ends" if entry.start > place else "bytes are taken up")
                + f" at {place}",
            )
        place = entry.stop
    if place != 8 + len(text) + data_size:
        _refuse(path, f"its tensors take {place - 8 - len(text)} bytes and {data_size} are there")
    return entries, metadata


def _entry(name: str, row: Any, base: int, path: str | Path) -> Entry:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"{name!r} must have dtype, shape and data_offsets, and nothing else")
    if not isinstance(row["dtype"], str) or row["dtype"] not in _FILE_TYPES:
        _refuse(path, f"{name!r} has the unknown dtype {row['dtype']!r}")
    dtype, shape, offsets = _FILE_TYPES[row["dtype"]], row["shape"], row["data_offsets"]
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
            _refuse(path, f"{name!r} has the {what} {str(values)[:80]}, which must be whole numbers from 0")
    if len(shape) > 64 or len(offsets) != 2 or prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        _refuse(
            path,
            f"{name!r} of shape {str(shape)[:80]} and dtype {row['dtype']} does not fit the "
            f"data_offsets {str(offsets)[:80]}",
        )
    return Entry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def _refuse(path: str | Path, reason: str) -> NoReturn:
    raise FileFormatError(f"safetensors file {path}", because=reason, fix="fetch or write the file again")
