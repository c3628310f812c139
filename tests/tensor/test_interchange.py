"""Values from and for NumPy, PyTorch, pickle and Python: what shares memory, and what does not."""

from __future__ import annotations

import copy
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tensor.reference import DEVICE
from whit import Context, Tensor, TinyJit, dtypes
from whit.helpers import ArgumentError, DTypeError, FileFormatError, ShapeError

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
on_cpu = pytest.mark.skipif(not DEVICE.startswith("CPU"), reason="memory that the host sees")


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@on_cpu
def test_arrays_are_read_where_they_lie_and_never_written() -> None:
    for kind in (np.float32, np.float64, np.float16, np.int8, np.uint64, np.bool_):
        a = np.arange(6).reshape(2, 3).astype(kind)
        assert address(np.asarray(Tensor(a))) == address(a)
    a = np.arange(4, dtype=np.float32)
    t, twin = Tensor(a), Tensor(a)
    a[0] = 7
    assert t.tolist() == [7, 1, 2, 3]
    t[1] = 9
    twin.assign(twin * 2)
    assert t.tolist() == [7, 9, 2, 3] and twin.tolist() == [14, 2, 4, 6] and a.tolist() == [7, 1, 2, 3]
    assert address(np.asarray(t)) != address(a)


def test_what_cannot_be_shared_is_copied() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    swapped = np.arange(3, dtype=">i4")
    odd = np.frombuffer(bytes(13), np.uint8)[1:].view(np.float32)
    tensors = [Tensor(a.T), Tensor(a[:, ::2]), Tensor(swapped), Tensor(odd), Tensor(a, device="PYTHON")]
    a[:] = 50
    assert tensors[0].tolist() == [[0, 3], [1, 4], [2, 5]] and tensors[1].tolist() == [[0, 2], [3, 5]]
    assert tensors[2].tolist() == [0, 1, 2] and tensors[3].tolist() == [0, 0, 0]
    assert tensors[4].tolist() == [[0, 1, 2], [3, 4, 5]]
    frozen = np.arange(3)
    frozen.flags.writeable = False
    t = Tensor(frozen)
    t[0] = 5
    assert t.tolist() == [5, 1, 2] and frozen.tolist() == [0, 1, 2]


@on_cpu
def test_records_do_not_write_to_arrays() -> None:
    state_array = np.zeros(3, np.float32)
    state = Tensor(state_array)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        y = x * 2 + state
        state.assign(y)
        x.assign(x + 1)
        return y

    want = np.zeros(3)
    for i in range(5):
        batch = np.full(3, i, np.float32)
        x = Tensor(batch)
        got = step(x)
        want = batch * 2 + want
        assert got.tolist() == want.tolist() == state.tolist()
        assert x.tolist() == [i + 1] * 3 and batch.tolist() == [i] * 3 and not state_array.any()


@on_cpu
def test_asarray_sees_the_memory_and_numpy_copies() -> None:
    t = Tensor([1.0, 2.0, 3.0]) * 2
    view, own = np.asarray(t), t.numpy()
    view[0] = 50
    assert t.tolist() == [50, 4, 6] and own.tolist() == [2, 4, 6]
    assert address(np.asarray(t[1:])) == address(view) + 4
    assert not np.shares_memory(np.array(t, copy=True), view)
    assert np.asarray(t, copy=False) is not None and np.asarray(t, dtype=np.float64).dtype == np.float64
    with pytest.raises(ArgumentError):
        np.asarray(t, dtype=np.float64, copy=False)
    del t
    assert view.tolist() == [50, 4, 6], "the memory lives as long as the array"


def test_asarray_of_everything() -> None:
    assert np.asarray(Tensor.ones(2, 2)).tolist() == [[1, 1], [1, 1]]
    assert np.asarray(Tensor(2.5)).shape == () and np.asarray(Tensor.zeros(0, 3)).shape == (0, 3)
    assert np.asarray(Tensor([1, 2], dtype="bfloat16")).astype(float).tolist() == [1, 2]
    assert np.asarray(Tensor([1.5], device="PYTHON")).tolist() == [1.5]
    assert (np.float64(2) * Tensor([1.5])).tolist() == [3.0]
    assert np.sum(np.asarray(Tensor([1, 2, 3]).T)) == 6
    with pytest.raises(ArgumentError):
        np.asarray(Tensor([1.5], device="PYTHON"), copy=False)


@on_cpu
def test_dlpack_shares_with_torch_and_numpy() -> None:
    theirs = torch.arange(6.0).reshape(2, 3)
    mine = Tensor.from_dlpack(theirs)
    theirs[0, 0] = 7
    assert mine[0].tolist() == [7, 1, 2]
    mine[1] = 9
    mine.realize()
    assert theirs.tolist() == [[7, 1, 2], [9, 9, 9]]
    back = torch.from_dlpack(mine)
    assert back.data_ptr() == theirs.data_ptr()
    for dtype in (*dtypes.ints, dtypes.bool, dtypes.float16, dtypes.float32, dtypes.float64):
        t = Tensor([0, 1, 2], dtype=dtype)
        array = np.from_dlpack(t)
        assert array.tolist() == t.tolist() and address(array) == address(np.asarray(t))
        tensor = torch.from_dlpack(t)
        assert tensor.tolist() == t.tolist() and tensor.data_ptr() == address(array)
        assert Tensor.from_dlpack(tensor).dtype is dtype
    lazy = (Tensor([1.0, 2.0]) + 1)[1:]
    assert torch.from_dlpack(lazy).tolist() == [3]
    assert Tensor.from_dlpack(torch.ones(3, 4).T).shape == (4, 3)
    assert Tensor.from_dlpack(np.zeros((0, 2))).shape == (0, 2)
    assert torch.from_dlpack(Tensor.ones(2)).tolist() == [1, 1]


def test_dlpack_refuses_by_name() -> None:
    t = Tensor([1.0, 2.0])
    assert t.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(t, copy=True).tolist() == [1, 2]
    for call in (
        lambda: t.__dlpack__(stream=1),
        lambda: t.__dlpack__(dl_device=(2, 0)),
        lambda: Tensor.from_dlpack([1]),
        lambda: Tensor.from_dlpack(torch.ones(2, requires_grad=True)),
        lambda: Tensor.from_dlpack(torch.ones(2, 3).T, copy=False),
        lambda: Tensor.from_dlpack(np.ones(2), device="PYTHON", copy=False),
        lambda: t.to_device("CPU", stream=3),
    ):
        with pytest.raises(ArgumentError):
            call()
    with pytest.raises(DTypeError, match="bitcast"):
        Tensor([1.0], dtype="bfloat16").__dlpack__()
    assert Tensor.from_dlpack(np.ones(2), device="PYTHON").device == "PYTHON"
    assert Tensor.from_dlpack(np.arange(2), copy=True).tolist() == [0, 1]


def test_pickle_and_deepcopy() -> None:
    for t in (
        Tensor([[1.5, 2.5]], requires_grad=True),
        Tensor([1, 2], dtype="bfloat16") + 1,
        Tensor.zeros(0, 3),
        Tensor(3),
        Tensor([True]),
        Tensor([1.0], device="PYTHON"),
    ):
        for other in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t), copy.copy(t)):
            assert other.tolist() == t.tolist() and other.dtype is t.dtype and other.device == t.device
            assert other.shape == t.shape and other.requires_grad == t.requires_grad
    t = Tensor([1, 2]).realize()
    other = copy.deepcopy({"a": [t, t]})
    assert other["a"][0] is other["a"][1], "what was one tensor is one tensor"
    other["a"][0][0] = 5
    assert t.tolist() == [1, 2]


def test_python_protocols() -> None:
    t = Tensor([3, 1, 2])
    assert float(t[0]) == 3.0 and int(t[1]) == 1 and bool(t[2]) and complex(t[0]) == 3 + 0j
    assert [10, 20, 30, 40][t[0]] == 40 and range(5)[t[1]] == 1
    assert 3 in t and 7 not in t and [int(x) for x in t] == [3, 1, 2]
    assert t in [t] and Tensor([1, 2]).T.shape == (2,)
    assert sorted(t.tolist()) == [1, 2, 3] and sum(t).item() == 6  # type: ignore[arg-type]  # iterates
    a, b, c = t
    assert (a.item(), b.item(), c.item()) == (3, 1, 2)
    with pytest.raises(ShapeError):
        float(t)
    with pytest.raises(DTypeError):
        range(3)[Tensor(1.5)]
    with pytest.raises(ShapeError):
        iter(Tensor(1)).__next__()


def test_size_counts_and_can_be_called() -> None:
    t = Tensor.zeros(2, 3)
    assert t.size == 6 and t.size() == (2, 3) and t.size(1) == 3 and isinstance(t.size, int)
    assert pickle.loads(pickle.dumps(t.size)) == 6 and t.size * 2 == 12
    with pytest.raises(ShapeError):
        t.size(5)
    assert t.mT.shape == (3, 2) and Tensor.ones(4, 2, 3).mT.shape == (4, 3, 2)
    with pytest.raises(ShapeError):
        Tensor([1]).mT  # noqa: B018


def test_repr_shows_values_of_what_is_in_memory() -> None:
    t = Tensor(np.arange(1000.0)).realize()
    text = repr(t)
    assert "(1000,) float64 on" in text and "0., " in text and "999." in text and len(text) < 200
    lazy = repr(Tensor([1.0]) + 1)
    assert "(1,) float32 on" in lazy and "lazy" in lazy
    seen: list[str] = []

    @TinyJit
    def step(x: Tensor) -> Tensor:
        seen.append(repr(x))
        return x + 1

    for _ in range(3):
        step(Tensor([1.0]).realize())
    assert all("(1,) float32" in text for text in seen)


def test_urls(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"abcd"))
    assert bytes(Tensor.from_url((tmp_path / "a").as_uri()).data()) == b"abc"
    assert bytes(Tensor.from_url((tmp_path / "a.gz").as_uri(), gunzip=True).data()) == b"abcd"
    with pytest.raises(FileFormatError, match="gzip"):
        Tensor.from_url((tmp_path / "a").as_uri(), gunzip=True)
    for url in ("ftp://x/y", "nothing", (tmp_path / "missing").as_uri(), "http://127.0.0.1:9/x", "http://[bad"):
        with pytest.raises(ArgumentError, match="from_url"):
            Tensor.from_url(url)


def test_memory_at_an_address() -> None:
    a = np.arange(3, dtype=np.float32)
    t = Tensor.from_blob(address(a), (3,), keep=a)
    assert t.tolist() == [0, 1, 2]
    with Context(DEBUG=0):
        t.assign(t + 1).realize()
    assert t.tolist() == [1, 2, 3]
    if DEVICE.startswith("CPU"):
        assert a.tolist() == [1, 2, 3]
