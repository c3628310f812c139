"""Construction from data, reading data out, assignment, bookkeeping."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import DEVICE, evaluate, reference
from whit import Tensor, Variable, dtypes
from whit.helpers import TRAINING, ArgumentError, DeviceError, DTypeError, ShapeError
from whit.tensor.tensor import pack, unpack
from whit.uop import Ops

HOME = "CPU" if DEVICE == "reference" else DEVICE


def test_scalars_are_constants() -> None:
    for value, dtype in (
        (3, dtypes.int32),
        (2.5, dtypes.float32),
        (True, dtypes.bool),
        (2**40, dtypes.int64),
        (2**63, dtypes.uint64),
    ):
        t = Tensor(value)
        assert t.uop.op is Ops.CONST and t.dtype is dtype and t.shape == () and t.item() == value
    assert Tensor(3, dtype="float16").dtype is dtypes.float16
    assert Tensor(2**40, dtype="int64").item() == 2**40
    with pytest.raises(DTypeError, match="64 bits"):
        Tensor(2**65)


def test_lists() -> None:
    assert Tensor([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert Tensor([1, 2.5]).tolist() == [1.0, 2.5]
    assert Tensor([True, False]).dtype is dtypes.bool
    assert Tensor([2**40]).tolist() == [2**40]
    assert (
        Tensor([]).shape == (0,)
        and Tensor([[], []]).shape == (2, 0)
        and Tensor([[], []]).tolist() == [[], []]
    )
    assert Tensor((1, 2)).tolist() == [1, 2]
    assert Tensor([1.9, -1.9], dtype="int32").tolist() == [1, -1]
    assert Tensor([1, 0], dtype=dtypes.bool).tolist() == [True, False]
    assert evaluate(Tensor([Tensor([1, 2]), Tensor([3, 4])])).tolist() == [[1, 2], [3, 4]]
    assert evaluate(Tensor([np.float32(1.5), np.float32(2)])).tolist() == [1.5, 2]
    for ragged in ([[1, 2], [3]], [1, [2]], [[1], 2], [[[1]], [[1, 2]]]):
        with pytest.raises(ShapeError, match="nested lists"):
            Tensor(ragged)
    with pytest.raises(DTypeError, match="uint8 holds"):
        Tensor([300], dtype="uint8")
    for bad in (["text"], [1, "text"], [None], [1j]):
        for wanted in (None, "float32", "int32"):
            with pytest.raises(DTypeError):
                Tensor(bad, dtype=wanted)
    with pytest.raises(DTypeError, match="no integer"):
        Tensor([math.nan], dtype="int32")
    assert Tensor([True, 2, 3]).dtype is dtypes.int32 and Tensor([1, 2**33]).dtype is dtypes.int64
    assert Tensor([False, 1.5]).tolist() == [0.0, 1.5] and Tensor([-1, 2**63 - 1]).dtype is dtypes.int64
    with pytest.raises(ArgumentError):
        Tensor("text")
    with pytest.raises(ArgumentError):
        Tensor(None)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            "bool",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "uint64",
            "float16",
            "float32",
            "float64",
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
        ]
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**32),
)
def test_numpy_round_trip(kind: str, shape: list[int], seed: int) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind) if kind.startswith(("bf", "float8")) else kind)
    bits = np.random.default_rng(seed).integers(0, 256, [*shape, dtype.itemsize], dtype=np.uint8)
    x = (bits[..., 0] & 1).astype(bool) if kind == "bool" else np.ascontiguousarray(bits).view(dtype)[..., 0]
    back = Tensor(x).numpy()
    assert back.dtype == x.dtype and back.shape == x.shape
    assert back.tobytes() == np.ascontiguousarray(x).tobytes()
    listed = Tensor(x).tolist()
    np.testing.assert_array_equal(np.array(listed, np.float64).reshape(x.shape), x.astype(np.float64))


@pytest.mark.parametrize("name", ["bfloat16", "fp8e4m3", "fp8e5m2", "float16"])
def test_packing_rounds_like_ml_dtypes(name: str) -> None:
    kind: Any = {
        "bfloat16": ml_dtypes.bfloat16,
        "fp8e4m3": ml_dtypes.float8_e4m3fn,
        "fp8e5m2": ml_dtypes.float8_e5m2,
        "float16": np.float16,
    }[name]
    values = [
        0.0,
        -0.0,
        1.0,
        1.0625,
        1.1,
        -3.3,
        440.0,
        464.5,
        1e-3,
        2**-9,
        2**-10,
        1e-7,
        6e4,
        1e6,
        math.inf,
        -math.inf,
        0.017,
    ]
    dtype = getattr(dtypes, name)
    with np.errstate(all="ignore"):
        want = np.array(values, np.float64).astype(np.float32).astype(kind)
    got = np.frombuffer(pack(values, dtype), kind)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(
        np.array(unpack(memoryview(want.tobytes()), dtype)), want.astype(np.float64)
    )
    assert math.isnan(unpack(memoryview(pack([math.nan], dtype)), dtype)[0])


def test_other_sources() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(x.T)
    x[:] = 0
    assert t.tolist() == [[0, 3], [1, 4], [2, 5]], "arrays that are not row-major are copied"
    assert Tensor(b"\x01\xff").tolist() == [1, 255]
    assert Tensor(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]
    assert Tensor(np.float32(2)).shape == ()
    assert Tensor(Tensor([1, 2]), dtype="float32").tolist() == [1.0, 2.0]
    n = Variable("n", 1, 9).bind(4)
    assert evaluate(Tensor(n) + 1) == 5 and Tensor(n).dtype is dtypes.int32
    with pytest.raises(DTypeError, match="no such dtype"):
        Tensor(np.zeros(2, np.complex64))
    with pytest.raises(DeviceError, match="no such device"):
        Tensor([1], device="TPU")


def test_data_out() -> None:
    t = Tensor([[1, 2, 3], [4, 5, 6]])
    view = t.data()
    assert view.shape == (2, 3) and view.format == "i" and view.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.asarray(Tensor([1.5], dtype="float16").data()).tolist() == [1.5]
    assert len(t) == 2 and [row.tolist() for row in t] == [[1, 2, 3], [4, 5, 6]]
    assert int(Tensor([7])) == 7 and float(Tensor(2.5)) == 2.5 and [10, 20][Tensor(1)] == 20
    assert bool(Tensor([1])) and not Tensor(0.0) and 5 in t and 9 not in t
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    assert np.from_dlpack(t).tolist() == [[1, 2, 3], [4, 5, 6]]
    for bad, error in (
        (lambda: t.item(), ShapeError),
        (lambda: bool(t), ShapeError),
        (lambda: len(Tensor(1)), ShapeError),
        (lambda: [0][Tensor(0.0)], DTypeError),
        (lambda: Tensor([1.0], dtype="bfloat16").data(), DTypeError),
    ):
        with pytest.raises(error):
            bad()


def test_narrow_floats_compute() -> None:
    rng = np.random.default_rng(5)
    for name, kind in (
        ("bfloat16", ml_dtypes.bfloat16),
        ("fp8e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8e5m2", ml_dtypes.float8_e5m2),
    ):
        a, b = (rng.standard_normal(40) * 2).astype(kind), (rng.standard_normal(40) + 3).astype(kind)
        wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
        for got, want in (
            (Tensor(a) + Tensor(b), wide_a + wide_b),
            (Tensor(a) * Tensor(b), wide_a * wide_b),
            (Tensor(a) / Tensor(b), wide_a / wide_b),
            (Tensor(a).maximum(Tensor(b)), np.maximum(wide_a, wide_b)),
            (Tensor(a).relu(), np.maximum(wide_a, 0)),
            (-Tensor(a), -wide_a),
        ):
            result = evaluate(got)
            assert result.dtype == kind, name
            np.testing.assert_array_equal(result.astype(np.float32), want.astype(kind).astype(np.float32))
        np.testing.assert_array_equal(evaluate(Tensor(a) < Tensor(b)), wide_a < wide_b)
        np.testing.assert_allclose(
            evaluate(Tensor(a).sum()).astype(np.float32),
            wide_a.sum().astype(kind).astype(np.float32),
            rtol=0.07,
        )
        np.testing.assert_allclose(evaluate(Tensor(a).exp()).astype(np.float32), np.exp(wide_a), rtol=0.2)


def test_repr() -> None:
    assert repr(Tensor([1, 2])) == f"<Tensor (2,) int32 on {HOME}: [1, 2]>"
    assert repr(Tensor([1, 2]) + 1) == f"<Tensor (2,) int32 on {HOME}, lazy ADD>"
    assert repr(Tensor.empty(100, 100)).startswith(f"<Tensor (100, 100) float32 on {HOME}")


def test_assign() -> None:
    x = Tensor([1, 2, 3])
    y = x + 1
    before = x.uop
    x.assign(Tensor([4, 5, 6]))
    assert x.uop.op is Ops.AFTER
    target, store = x.uop.src
    assert target is before and store.op is Ops.STORE and store.src[0] is before
    assert reference(x.uop).tolist() == [4, 5, 6] and reference(y.uop).tolist() == [2, 3, 4]
    x.assign(x * 2).assign(7)
    assert reference(x.uop).tolist() == [7, 7, 7]
    z = Tensor.zeros(3)
    z.assign(Tensor([1.0, 2, 3]))
    assert reference(z.uop).tolist() == [1, 2, 3]
    base = Tensor([[1, 2], [3, 4]])
    row = base.shrink(((1, 2), None)).flip(1)
    row.assign(Tensor([[8, 9]]))
    assert reference(row.uop).tolist() == [[8, 9]] and reference(base.uop).tolist() == [[1, 2], [3, 4]]
    twin = Tensor(base)
    base.assign(Tensor([[0, 0], [0, 0]]))
    twin.assign(Tensor([[6, 6], [6, 6]]))
    twin[0] = 7
    assert reference(twin.uop).tolist() == [[7, 7], [6, 6]] and reference(base.uop).tolist() == [
        [0, 0],
        [0, 0],
    ]
    for value, error in (
        (Tensor([1.0, 2, 3]), DTypeError),
        (Tensor([1, 2]), ShapeError),
        (Tensor([1, 2, 3], device="PYTHON" if HOME != "PYTHON" else "CPU"), DeviceError),
    ):
        saved = x.uop
        with pytest.raises(error):
            x.assign(value)
        assert x.uop is saved


def test_devices() -> None:
    t = Tensor([1, 2])
    assert t.device == HOME and t.to(HOME) is t and t.to(None) is t
    other = "NULL"
    moved = t.to(other)
    assert moved.device == other and moved.uop.op is Ops.COPY
    assert t.to_(other) is t and t.device == other
    assert Tensor.zeros(2, device=other).device == other
    with pytest.raises(DeviceError):
        t.to("GPUX")


def test_live_tensors() -> None:
    gc.collect()
    t = Tensor([1])
    count = len(Tensor.live)
    kept = [t + i for i in range(5)]
    assert len(Tensor.live) == count + 5 and t in Tensor.live and kept[0] in Tensor.live
    assert 3 not in Tensor.live
    del kept
    gc.collect()
    assert len(Tensor.live) == count
    assert any(x is t for x in Tensor.live)


def test_equal_parameters_have_gradients_of_their_own() -> None:
    a, b = Tensor.ones(2), Tensor.ones(2)
    a.requires_grad = b.requires_grad = True
    assert a.uop is not b.uop
    kept = a.uop
    a.requires_grad = True
    assert a.uop is kept
    (a * 2 + b * 3).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert evaluate(a.grad).tolist() == [2, 2] and evaluate(b.grad).tolist() == [3, 3]


def test_sizes() -> None:
    t = Tensor.zeros(2, 3, dtype="float16")
    assert (t.numel(), t.ndim, t.size(), t.size(-1), t.element_size(), t.nbytes()) == (6, 2, (2, 3), 3, 2, 12)
    assert t.is_floating_point() and not Tensor([1]).is_floating_point()
    n = Variable("n", 2, 9)
    s = Tensor.zeros(9).shrink(((0, n),))
    assert s.max_shape == (9,) and s.max_numel() == 9


def test_copies() -> None:
    t = Tensor([1.0, 2.0], requires_grad=True)
    for twin in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert evaluate(twin).tolist() == [1, 2] and twin.requires_grad and twin is not t
    assert evaluate(t.clone()).tolist() == [1, 2] and evaluate(t.detach()).tolist() == [1, 2]
    assert t.detach().requires_grad is None
    assert t.contiguous() is t and (t + 1).contiguous().uop.op is Ops.CONTIGUOUS
    u = Tensor([5.0, 6.0])
    assert t.replace(u) is t and t.tolist() == [5, 6]
    with pytest.raises(ShapeError):
        t.replace(Tensor([1.0]))


def test_training_mode() -> None:
    assert not Tensor.training
    with Tensor.train():
        assert Tensor.training and TRAINING.value == 1
        with Tensor.train(False):
            assert not Tensor.training
    assert not Tensor.training


def test_import_is_light() -> None:
    code = (
        "import sys, whit; t = whit.Tensor([[1, 2]]) + 1; "
        "print(sorted({'numpy', 'llvmlite', 'whit.nn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_deep_graphs() -> None:
    x = Tensor([1.0])
    for _ in range(50_000):
        x = x + 1
    assert x.shape == (1,) and repr(x).startswith("<Tensor (1,)")
