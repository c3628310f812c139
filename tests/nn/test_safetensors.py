"""Safetensors files: the reference implementation reads ours, we read its, and nothing hostile gets in."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from whit.helpers import ArgumentError, FileFormatError
from whit.nn.state import FileError, parse_header, safe_load, safe_load_metadata, safe_save
from whit.tensor import Tensor
from whit.uop import dtypes

NUMPY_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def write(path: Path, arrays: dict[str, tuple[str, np.ndarray]], pad: int = 0, **extra: Any) -> bytes:
    """The format written from its description, without whit and without the reference implementation."""
    header: dict[str, Any] = dict(extra)
    data = b""
    for name, (dtype, array) in arrays.items():
        body = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(body)],
        }
        data += body
    text = json.dumps(header).encode() + b" " * pad
    body = struct.pack("<Q", len(text)) + text + data
    path.write_bytes(body)
    return body


def sample(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(
        0, 256, int(np.prod(shape)) * np.dtype(NUMPY_TYPES[dtype]).itemsize, np.uint8
    )
    if dtype == "BOOL":
        bits %= 2
    return bits.view(NUMPY_TYPES[dtype]).reshape(shape)


def raw(tensor: Tensor) -> bytes:
    from whit.tensor import hooks

    return bytes(hooks.read(tensor))


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("pad", [0, 1, 3])
def test_every_dtype_at_every_alignment(tmp_path: Path, dtype: str, pad: int) -> None:
    arrays = {
        "first": ("U8", sample("U8", (3,))),
        "x": (dtype, sample(dtype, (2, 3))),
        "scalar": (dtype, sample(dtype, ())),
        "empty": (dtype, sample(dtype, (0, 4))),
    }
    write(tmp_path / "f", arrays, pad)
    loaded = safe_load(tmp_path / "f")
    assert list(loaded) == list(arrays)
    for name, (_, array) in arrays.items():
        assert loaded[name].shape == array.shape and raw(loaded[name]) == array.tobytes()
        assert loaded[name].dtype.itemsize == array.dtype.itemsize


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_save_is_read_by_the_reference(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "in", {"x": (dtype, sample(dtype, (5, 2))), "y": ("F64", sample("F64", (3,)))})
    safe_save(safe_load(tmp_path / "in"), tmp_path / "out", {"key": "vålue"})
    theirs = load_file(tmp_path / "out")
    assert theirs["x"].contiguous().view(torch.uint8).numpy().tobytes() == sample(dtype, (5, 2)).tobytes()
    with safetensors.safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {"key": "vålue"}
    assert safe_load_metadata(tmp_path / "out") == {"key": "vålue"}


def test_load_of_a_file_of_the_reference(tmp_path: Path) -> None:
    given_ = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1, 2, 3]),
        "c": torch.tensor([True, False]),
    }
    save_file(given_, tmp_path / "f", {"made": "by torch"})
    loaded = safe_load(tmp_path / "f")
    assert {k: v.tolist() for k, v in loaded.items()} == {k: v.tolist() for k, v in given_.items()}
    assert safe_load_metadata(tmp_path / "f") == {"made": "by torch"}


def test_computed_values_are_saved(tmp_path: Path) -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    safe_save({"t": x.transpose(0, 1) * 2, "view": x[1], "": Tensor(7)}, tmp_path / "f")
    theirs = safetensors.numpy.load_file(tmp_path / "f")
    assert theirs["t"].tolist() == [[2.0, 6.0], [4.0, 8.0]] and theirs["view"].tolist() == [3.0, 4.0]
    assert theirs[""].tolist() == 7


def test_no_tensors(tmp_path: Path) -> None:
    safe_save({}, tmp_path / "f")
    assert safe_load(tmp_path / "f") == {} and safetensors.numpy.load_file(tmp_path / "f") == {}


def test_loading_is_lazy_and_private(tmp_path: Path) -> None:
    body = write(tmp_path / "f", {"x": ("F32", np.arange(4, dtype=np.float32))})
    x = safe_load(tmp_path / "f")["x"]
    x.assign(x * 10).realize()
    assert x.tolist() == [0.0, 10.0, 20.0, 30.0] and (tmp_path / "f").read_bytes() == body
    large = 1 << 31
    with open(
        tmp_path / "large", "wb"
    ) as file:  # sparse: costs no disk, and loading it all would take seconds
        text = json.dumps({"x": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]}}).encode()
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + large)
    assert safe_load(tmp_path / "large")["x"].shape == (large,)


def test_overwriting_the_file_that_tensors_come_from(tmp_path: Path) -> None:
    write(
        tmp_path / "f",
        {"x": ("F32", np.arange(1000, dtype=np.float32)), "y": ("F32", np.ones(3, np.float32))},
    )
    loaded = safe_load(tmp_path / "f")
    safe_save(loaded, tmp_path / "f")
    assert safetensors.numpy.load_file(tmp_path / "f")["x"].tolist() == list(range(1000))
    assert loaded["y"].tolist() == [1.0, 1.0, 1.0]


# ---- failures ----


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        safe_save({"x": Tensor([1.0])}, tmp_path / "f")
    assert [file.name for file in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_bytes() == b"old"


def test_save_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        safe_save({"x": Tensor([1.0])}, tmp_path / "no" / "f")


def test_reserved_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="reserved"):
        safe_save({"__metadata__": Tensor([1.0])}, tmp_path / "f")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        safe_load(tmp_path / "f")


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


HOSTILE: list[tuple[str, str]] = [
    ("", "JSON"),
    ("[]", "no JSON object"),
    ("{", "JSON"),
    ('{"x":}', "JSON"),
    ("\ufffe", "JSON"),
    ("null", "no JSON object"),
    ("[" * 100_000, "JSON"),
    ('{"x":1,"x":2}', "twice"),
    ('{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "twice"),
    (json.dumps({"x": 1}), "must have dtype"),
    (json.dumps({"x": {"dtype": "F32", "shape": [2]}}), "must have dtype"),
    (json.dumps({"x": entry(more=1)}), "nothing else"),
    (json.dumps({"x": entry(dtype="F31")}), "unknown dtype"),
    (json.dumps({"x": entry(dtype=["F32"])}), "unknown dtype"),
    (json.dumps({"x": entry(dtype=None)}), "unknown dtype"),
    (json.dumps({"x": entry(shape=[-2])}), "whole numbers"),
    (json.dumps({"x": entry(shape=[2.0])}), "JSON"),
    (json.dumps({"x": entry(shape=[True, 2])}), "whole numbers"),
    (json.dumps({"x": entry(shape=2)}), "whole numbers"),
    (json.dumps({"x": entry(shape=[2**64])}), "whole numbers"),
    (json.dumps({"x": entry(shape=[2**32, 2**32])}), "does not fit"),
    (json.dumps({"x": entry(shape=[0] + [2**62] * 1000, data_offsets=[0, 0])}), "does not fit"),
    (json.dumps({"x": entry(data_offsets=[-8, 0])}), "whole numbers"),
    (json.dumps({"x": entry(data_offsets=[8, 0])}), "not fit"),
    (json.dumps({"x": entry(data_offsets=[0, 2**70])}), "whole numbers"),
    (json.dumps({"x": entry(data_offsets=[0, 9])}), "not fit"),
    (json.dumps({"x": entry(data_offsets=[0])}), "not fit"),
    (json.dumps({"x": entry(data_offsets=[0, 4, 8])}), "not fit"),
    (json.dumps({"x": entry(shape=[3])}), "not fit"),
    (json.dumps({"x": entry(), "y": entry()}), "taken up"),
    (json.dumps({"x": entry(), "y": entry(data_offsets=[4, 12])}), "taken up"),
    (json.dumps({"x": entry(data_offsets=[4, 12])}), "the one before it ends"),
    (json.dumps({"x": entry(shape=[1], data_offsets=[0, 4])}), "4 bytes and 8 are there"),
    (json.dumps({"x": entry(shape=[4], data_offsets=[0, 16])}), "16 bytes and 8 are there"),
    (json.dumps({"__metadata__": 1, "x": entry()}), "must hold texts"),
    (json.dumps({"__metadata__": {"a": 1}, "x": entry()}), "must hold texts"),
    ('{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "JSON"),
    ('{"x":{"dtype":"F32","shape":[1' + "0" * 5000 + '],"data_offsets":[0,8]}}', "JSON"),
]


@pytest.mark.parametrize("text,reason", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers(tmp_path: Path, text: str, reason: str) -> None:
    body = text.encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(body)) + body + b"\0" * 8)
    with pytest.raises(FileFormatError, match=reason if len(text) > 1 else None):
        safe_load(tmp_path / "f")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 1 << 40) + b"{}",
    ],
)
def test_headers_longer_than_the_file(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "f").write_bytes(body)
    with pytest.raises(FileFormatError):
        safe_load(tmp_path / "f")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    body = write(tmp_path / "f", {"x": ("F32", np.ones(2, np.float32)), "y": ("U8", np.ones(3, np.uint8))})
    for length in range(len(body)):
        (tmp_path / "f").write_bytes(body[:length])
        with pytest.raises(FileFormatError):
            safe_load(tmp_path / "f")


BODY_HEADER = json.dumps(
    {
        "__metadata__": {"k": "v"},
        "x": entry(),
        "yy": {"dtype": "U8", "shape": [3, 1], "data_offsets": [8, 11]},
    }
).encode()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BODY_HEADER) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    """A changed header is refused, or describes tensors that fill the data exactly."""
    text = bytearray(BODY_HEADER)
    for place, value in flips:
        text[place] = value
    try:
        entries, _ = parse_header(bytes(text), 11)
    except FileFormatError:
        return
    assert sum(e.stop - e.start for e in entries) == 11
    assert all(len(text) + 8 <= e.start <= e.stop <= len(text) + 8 + 11 for e in entries)
    assert all(int(np.prod(e.shape)) * e.dtype.itemsize == e.stop - e.start for e in entries)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(JSON_VALUES, st.integers(0, 64))
def test_any_json(value: Any, size: int) -> None:
    with contextlib.suppress(FileFormatError):
        parse_header(json.dumps({"x": value}).encode(), size)


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(sorted(NUMPY_TYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
def test_round_trips(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, list[int]]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    arrays = {
        name: (dtype, sample(dtype, tuple(shape), i))
        for i, (name, (dtype, shape)) in enumerate(layout.items())
    }
    write(folder / "in", arrays)
    safe_save(safe_load(folder / "in"), folder / "out")
    again = safe_load(folder / "out")
    assert {name: raw(tensor) for name, tensor in again.items()} == {
        n: a.tobytes() for n, (_, a) in arrays.items()
    }
    assert all(np.dtype(arrays[n][1].dtype).itemsize == t.dtype.itemsize for n, t in again.items())


def test_dtype_table_is_complete() -> None:
    from whit.nn.state import _FILE_TYPES

    assert set(_FILE_TYPES) == set(NUMPY_TYPES) and set(_FILE_TYPES.values()) == set(dtypes.all)
