"""GGUF files: the reference package's files are read, ours are read by it, and nothing hostile gets in."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whit import Tensor, dtypes
from whit.helpers import ArgumentError, FileFormatError
from whit.nn.blocks import block_type
from whit.nn.gguf import Encoded, Value, find_texts, open_gguf, walk_texts, write_gguf
from whit.nn.state import FileError

TEXTS = ["", "a", "▁word", "\n\n", "日本語", "x" * 300, "", "y" * 70000, "<0x00>"]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, body: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + body


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file(
    entries: list[bytes] = [],  # noqa: B006  # not changed
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """The format written from its description."""
    counts = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def refused(path: Path, body: bytes) -> str:
    path.write_bytes(body)
    with pytest.raises(FileFormatError, match="To fix: fetch or write the file again") as error:
        open_gguf(path)
    return str(error.value)


# ---- reading what the reference writes


def test_every_metadata_type_from_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    numbers: dict[str, Any] = {
        "uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -70000,
        "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.15625, "float64": 0.1, "bool": True,
        "string": "ä▁",
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"v.{kind}", value)
    writer.add_array("texts", TEXTS)
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("bools", [True, False, True])
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("w", matrix)
    writer.add_tensor("h", matrix.astype(np.float16))
    q8 = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()

    found = open_gguf(path)
    assert {kind: found.metadata[f"v.{kind}"] for kind in numbers} == numbers
    texts = found.metadata["texts"]
    assert list(texts) == texts.strings() == TEXTS and texts[3] == "\n\n" and texts[-1] == TEXTS[-1]
    assert texts.byte_strings() == [t.encode() for t in TEXTS] and texts[2:4] == TEXTS[2:4]
    assert found.metadata["floats"].numpy().tolist() == [0.5, -1.25] and found.metadata["floats"][1] == -1.25
    assert list(found.metadata["bools"]) == [True, False, True]
    assert found.tensors["q"].shape == (2, 32) and found.tensors["q"].nbytes == 68
    np.testing.assert_array_equal(found.load("w").numpy(), matrix)
    assert found.load("h").dtype is dtypes.float16
    np.testing.assert_array_equal(found.load("h").numpy(), matrix.astype(np.float16))
    np.testing.assert_array_equal(found.raw("q").numpy(), q8)
    np.testing.assert_array_equal(
        found.load("q").numpy(), gguf.quants.dequantize(q8, gguf.GGMLQuantizationType.Q8_0)
    )
    with pytest.raises(ArgumentError, match=r"tensor 'W' .*: the file has none of that name"):
        found.load("W")


def test_the_reference_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_0)
    metadata = {
        "general.architecture": "llama", "small": 3, "negative": -3, "large": 1 << 40,
        "lowest": -(1 << 40), "float": 0.5, "yes": True, "typed": Value("u8", 7), "texts": TEXTS,
        "ints": [1, -2],
        "floats": [1.0, 2], "array": np.array([1.5, 2.5], np.float32),
    }  # fmt: skip
    tensors = {
        "w": weights, "t": Tensor(weights) + 1, "half": weights.astype(np.float16),
        "scalar": np.float32(3.0), "q": Encoded(block_type("Q4_0"), (3, 64), blocks),
        "late": Encoded(block_type("I8"), (5,), lambda: b"12345"),
    }  # fmt: skip
    write_gguf(path, metadata, tensors)
    reader = gguf.GGUFReader(path)
    types = {name: field.types[0].name for name, field in reader.fields.items()}
    assert {n: types[n] for n in ("small", "negative", "large", "lowest", "typed", "float")} == {
        "small": "UINT32", "negative": "INT32", "large": "UINT64", "lowest": "INT64", "typed": "UINT8",
        "float": "FLOAT32",
    }  # fmt: skip
    assert reader.get_field("texts").contents() == TEXTS
    assert reader.get_field("ints").contents() == [1, -2]
    assert reader.get_field("floats").contents() == [1.0, 2.0]
    arrays = {t.name: t for t in reader.tensors}
    np.testing.assert_array_equal(arrays["w"].data, weights)
    np.testing.assert_array_equal(arrays["t"].data, weights + 1)
    np.testing.assert_array_equal(arrays["q"].data, blocks)
    assert arrays["late"].data.tobytes() == b"12345" and arrays["scalar"].data.tolist() == 3.0
    ours = open_gguf(path)
    assert ours.metadata["negative"] == -3 and ours.load("scalar").item() == 3.0
    again = tmp_path / "again.gguf"
    copies = {n: Encoded(t.type, t.shape, ours.data(n)) for n, t in ours.tensors.items()}
    write_gguf(again, ours.values, copies)
    assert again.read_bytes() == path.read_bytes()


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {"a": np.zeros(4, np.float32)})
    before = path.read_bytes()

    def fail() -> bytes:
        raise OSError("disk full")

    with pytest.raises(FileError, match=r"write_gguf to .*: disk full. To fix"):
        write_gguf(path, {}, {"a": Encoded(block_type("F32"), (4,), fail)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.gguf"]
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"a": object()}, {}, "no such values"), ({"a": [1, "b"]}, {}, "several kinds"),
        ({"a": Value("u8", 300)}, {}, "it is no u8"), ({"": 1}, {}, "names are text"),
        ({}, {"a": np.zeros(4, np.uint8)}, "no type for uint8"), ({}, {"a": np.zeros((1,) * 5)}, "5 axes"),
        ({}, {"a": Encoded(block_type("Q4_0"), (2, 31), b"")}, "no whole Q4_0 blocks"),
        ({}, {"a": Encoded(block_type("Q4_0"), (2, 32), b"1")}, "1 bytes are given and 36 needed"),
    ]  # fmt: skip
    for metadata, tensors, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            write_gguf(path, metadata, tensors)
    assert path.read_bytes() == before


def test_bytes_are_not_copied_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {"a": np.arange(8, dtype=np.float32)})
    before = path.read_bytes()
    a = open_gguf(path).load("a")
    from whit.engine.counters import GlobalCounters

    used = GlobalCounters.mem_used
    a.realize()
    assert GlobalCounters.mem_used == used
    a.assign(a + 1).realize()
    assert a.tolist() == list(range(1, 9)) and path.read_bytes() == before


def test_split_files(tmp_path: Path) -> None:
    def part(n: int, count: int = 3, **extra: int) -> None:
        metadata = {"split.no": Value("u16", n), "split.count": Value("u16", count)}
        metadata |= {"split.tensors.count": Value("i32", 3), "name": f"part {n}"} | extra
        write_gguf(tmp_path / f"m-{n + 1:05d}-of-00003.gguf", metadata, {f"t{n}": np.full(4, n, np.float32)})

    for n in range(3):
        part(n)
    for n in range(3):
        whole = open_gguf(tmp_path / f"m-{n + 1:05d}-of-00003.gguf")
        assert [whole.load(f"t{i}").tolist() for i in range(3)] == [[i] * 4 for i in range(3)]
        assert whole.metadata["name"] == "part 0" and len(whole.paths) == 3
    part(1, count=2)
    with pytest.raises(FileFormatError, match="it is not part 2 of 3"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")
    os.unlink(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(FileError, match="m-00002-of-00003"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")
    os.rename(tmp_path / "m-00001-of-00003.gguf", tmp_path / "other.gguf")
    with pytest.raises(FileError, match="its name does not say which"):
        open_gguf(tmp_path / "other.gguf")


# ---- texts


LONG = st.integers(200, 70000).map(lambda n: b"\1" * n)


@given(st.lists(st.binary(max_size=20) | LONG, max_size=60), st.binary(max_size=40))
@settings(max_examples=60, deadline=None)
def test_places_of_texts(texts: list[bytes], behind: bytes) -> None:
    data = memoryview(b"".join(map(text, texts)) + behind)
    walked, found = walk_texts(data, len(texts)), find_texts(data, len(texts))
    assert walked is not None and found is not None
    ends = np.cumsum([0] + [8 + len(t) for t in texts]).tolist()
    assert walked == found.tolist() == ends
    for count in (len(texts) + 1, len(texts) + 9):
        assert (walk_texts(data, count) is None) == (find_texts(data, count) is None)


def test_a_large_vocabulary(tmp_path: Path) -> None:
    """More texts than are walked one by one, with ones that are empty, long, no UTF-8, and full of zeros."""
    plain = [f"token {n} ▁é" for n in range(5000)] + ["", "z" * 255, "z" * 256, "z" * 1000, ""]
    for odd in ([], [b"\xff\xfe"], [b"a\0b", b"\0" * 40]):
        texts = [t.encode() for t in plain] + odd
        body = struct.pack("<IQ", 8, len(texts)) + b"".join(map(text, texts))
        path = tmp_path / "v.gguf"
        path.write_bytes(file([entry("tokens", 9, body), entry("after", 4, struct.pack("<I", 9))]))
        found = open_gguf(path)
        assert found.metadata["after"] == 9
        assert found.metadata["tokens"].strings() == [t.decode("utf-8", "replace") for t in texts]
        assert found.metadata["tokens"].byte_strings() == texts


# ---- bad input

NESTED = struct.pack("<IQ", 9, 1)


def test_hostile_headers(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    huge = 1 << 60
    f32 = struct.pack("<f", 1.0)
    good = [entry("k", 4, struct.pack("<I", 1))]
    cases = {
        "it is empty": b"",
        r"it starts with b'GGML'": b"GGML" + bytes(40),
        "it is no GGUF file": b"GGUF\3",
        "it has version 1": file(version=1),
        "it has version 77": file(version=77),
        "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        f"{huge} metadata entries": file(good, counts=(0, huge)),
        f"{huge} tensors": file(good, counts=(huge, 1)),
        f"{huge} bytes of text": file([struct.pack("<Q", huge) + b"abc"]),
        "unknown type 13": file([entry("k", 13, b"1234")]),
        "'k' is the bool 2": file([entry("k", 7, b"\2")]),
        "stands twice": file(good * 2),
        f"{huge} elements of 'k'": file([entry("k", 9, struct.pack("<IQ", 8, huge))]),
        f"{huge + 1} elements of 'k'": file([entry("k", 9, struct.pack("<IQ", 0, huge + 1))]),
        "texts of 'k' reach beyond": file([entry("k", 9, struct.pack("<IQQ", 8, 1, huge))]),
        "neither 0 nor 1": file([entry("k", 9, struct.pack("<IQ", 7, 3) + b"\0\1\2")]),
        "nests arrays more than 4 deep": file([entry("k", 9, NESTED * 5000 + struct.pack("<IQ", 0, 0))]),
        "is no UTF-8": file([entry("k", 4, f32).replace(b"k", b"\xff")]),
        "has 70000 bytes": file([entry("k" * 70000, 4, f32)]),
        "general.alignment is 33": file([entry("general.alignment", 4, struct.pack("<I", 33))]),
        "general.alignment is 'x'": file([entry("general.alignment", 8, text("x"))]),
        "unknown block type 99": file(tensors=[tensor("t", (4,), 99, 0)], data=bytes(64)),
        "has 5 dimensions": file(tensors=[tensor("t", (1,) * 5, 0, 0)], data=bytes(64)),
        "impossible shape": file(tensors=[tensor("t", (1 << 40, 1 << 40), 0, 0)], data=bytes(64)),
        "no whole Q4_0 blocks of 32": file(tensors=[tensor("t", (33,), 2, 0)], data=bytes(64)),
        "no multiple of 32": file(tensors=[tensor("t", (4,), 0, 8)], data=bytes(64)),
        "and the file has": file(tensors=[tensor("t", (17,), 0, 0)], data=bytes(64)),
        "'far' ends at byte": file(tensors=[tensor("far", (4,), 0, 1 << 62)], data=bytes(64)),
        "'b' overlaps another tensor": file(
            tensors=[tensor("a", (9,), 0, 0), tensor("b", (4,), 0, 32)], data=bytes(64)
        ),
        "the tensor 't' stands twice": file(
            tensors=[tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)], data=bytes(64)
        ),
        "split.count is no whole number": file([entry("split.count", 8, text("x"))]),
        f"it says that it has {1 << 31} parts": file([entry("split.count", 4, struct.pack("<I", 1 << 31))]),
    }  # fmt: skip
    for message, body in cases.items():
        assert message in refused(path, body), message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    entries = [entry("k", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")), entry("s", 8, text("value"))]
    whole = file(entries, [tensor("t", (8,), 0, 0)], bytes(32))
    path.write_bytes(whole)
    assert open_gguf(path).tensors["t"].shape == (8,)
    for length in range(len(whole)):
        refused(path, whole[:length])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_never_do_harm(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A file with random bytes changed is read or refused, with one exception type."""
    path = tmp_path_factory.mktemp("damage") / "d.gguf"
    entries = [entry("k", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")), entry("n", 4, b"\1\0\0\0")]
    body = bytearray(file(entries, [tensor("t", (32, 2), 2, 0), tensor("u", (4,), 0, 64)], bytes(96)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.sampled_from([0, 1, 2, 9, 127, 128, 255]))
    path.write_bytes(bytes(body))
    try:
        found = open_gguf(path)
    except (FileFormatError, FileError):
        return
    for name in found.tensors:
        assert len(found.data(name)) == found.tensors[name].nbytes
    for value in found.metadata.values():
        repr(value)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"GGUF file .*missing.gguf: .*No such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(FileError, match="Is a directory"):
        open_gguf(tmp_path)
    with pytest.raises(ArgumentError, match="it is no path"):
        open_gguf(3)  # type: ignore[arg-type]
