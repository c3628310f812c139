"""Tar and zip files against the standard library's, sharded safetensors, and hostile ones."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from whit import Tensor
from whit.helpers import ArgumentError, FileFormatError
from whit.nn.state import TensorIO, accept_filename, safe_load, safe_save, tar_extract, zip_extract

FILES = {"a.bin": bytes(range(256)) * 9, "folder/b": b"", "folder/Ω.txt": b"text"}


def tar_of(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind, "a.bin"
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_zip(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("folder/", b"")
        for name, data in FILES.items():
            file.writestr(name, data)
    for source in (path, str(path), Tensor(path.read_bytes(), dtype="uint8")):
        assert {name: bytes(t.tolist()) for name, t in zip_extract(source).items()} == FILES


def test_tar(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "x.tar", FILES)
    for source in (path, Tensor(path.read_bytes(), dtype="uint8")):
        assert {name: bytes(t.tolist()) for name, t in tar_extract(source).items()} == FILES


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "C:\\windows", "..\\up"])
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFormatError, match="leads out of the folder"):
        tar_extract(tar_of(tmp_path / "x.tar", {name: b"x"}))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        info = zipfile.ZipInfo("placeholder")
        info.filename = name
        file.writestr(info, b"x")
    with pytest.raises(FileFormatError, match="leads out of the folder"):
        zip_extract(tmp_path / "x.zip")


def test_links_and_compressed_tars(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        with pytest.raises(FileFormatError, match="no plain file"):
            tar_extract(tar_of(tmp_path / "x.tar", {"link": b""}, kind))
    with pytest.raises(FileFormatError, match="tar file"):
        tar_extract(tar_of(tmp_path / "x.tgz", FILES, mode="w:gz"))


def test_bombs_and_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zeros", b"\0" * (1 << 20))
    with pytest.raises(FileFormatError, match="the limit is"):
        zip_extract(path, limit=1 << 19)
    body = path.read_bytes()
    tar = tar_of(tmp_path / "x.tar", FILES).read_bytes()
    rng = np.random.default_rng(0)
    for read, whole in ((zip_extract, body), (tar_extract, tar)):
        for stop in (0, 5, len(whole) // 2):
            path.write_bytes(whole[:stop])
            try:
                found = read(path)
            except FileFormatError:
                continue
            assert set(found) <= set(FILES)  # a tar file may end after any member
        for _ in range(100):
            damaged = bytearray(whole)
            damaged[rng.integers(0, min(len(whole), 3000))] ^= int(rng.integers(1, 256))
            path.write_bytes(damaged)
            with contextlib.suppress(FileFormatError):
                read(path)


def test_a_tensor_as_a_file() -> None:
    file = TensorIO(Tensor(b"hello\nworld", dtype="uint8"))
    assert file.readline() == b"hello\n" and file.tell() == 6 and file.read(100) == b"world"
    assert file.seek(-5, io.SEEK_END) == 6 and file.read() == b"world" and file.read(1) == b""
    with pytest.raises(ArgumentError):
        file.seek(-20)
    with pytest.raises(ArgumentError):
        TensorIO(Tensor([1.0]))


def test_functions_that_take_names(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")

    @accept_filename
    def total(file: Tensor, factor: int = 1) -> int:
        return int(file.cast("int32").sum().item()) * factor

    assert total(tmp_path / "x", factor=2) == 2 * total(Tensor(b"abc", dtype="uint8")) == 588


# ---- safetensors in several files --------------------------------------------------------------------------


def shards(folder: Path) -> dict[str, Tensor]:
    parts = {
        "one.safetensors": {"a": Tensor([1.0, 2.0])},
        "two.safetensors": {"b": Tensor([3]), "c": Tensor([4])},
    }
    where = {}
    for name, tensors in parts.items():
        safe_save(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return {key: tensor for tensors in parts.values() for key, tensor in tensors.items()}


def test_shards(tmp_path: Path) -> None:
    want = shards(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        got = safe_load(path)
        assert list(got) == list(want) and all(got[key].tolist() == want[key].tolist() for key in want)


@pytest.mark.parametrize(
    "weight_map, why",
    [
        ({"a": "../one.safetensors"}, "none beside it"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, "'z' is not in one"),
        ({"b": "two.safetensors"}, "the index says None"),
        ({"a": 1}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_broken_indices(tmp_path: Path, weight_map: object, why: str) -> None:
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileFormatError, match=why):
        safe_load(tmp_path)
