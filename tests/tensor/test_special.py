"""Special functions against PyTorch, SciPy and mpmath over their whole ranges; their gradients against
PyTorch's; single operations; covariances; hashes against Python's."""

from __future__ import annotations

import hashlib
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import special

from tests.tensor.reference import DEVICE, evaluate
from whit import Ops, Tensor, dtypes
from whit.helpers import ArgumentError, DTypeError, ShapeError

RNG = np.random.default_rng(7)
INF, NAN = float("inf"), float("nan")
WIDE = np.concatenate(
    [
        RNG.normal(size=300) * 5,
        RNG.uniform(0, 3, 300),
        10.0 ** RNG.uniform(-300, 300, 100),
        -(10.0 ** RNG.uniform(-10, 3, 100)),
        np.arange(-10.0, 11),
        [INF, -INF, NAN, 0.0, -0.0],
    ]
)
UNIT = np.concatenate(
    [
        RNG.uniform(-1, 1, 400),
        1 - 10.0 ** RNG.uniform(-16, 0, 100),
        10.0 ** RNG.uniform(-300, 0, 50),
        [1, -1, 2, -3, 0, -0.0, NAN, INF],
    ]
)
FUNCTIONS: list[tuple[str, Any, np.ndarray[Any, Any]]] = [
    ("lgamma", torch.lgamma, WIDE),
    ("digamma", torch.digamma, WIDE),
    ("i0", torch.special.i0, WIDE),
    ("erfinv", torch.erfinv, UNIT),
    ("erfc", torch.erfc, WIDE),
]

EXACT: dict[str, Any] = {
    "lgamma": special.gammaln,
    "digamma": special.digamma,
    "i0": special.i0,
    "erfinv": special.erfinv,
    "erfc": special.erfc,
}


@pytest.mark.parametrize("name, x", [(n, x) for n, _, x in FUNCTIONS], ids=[f[0] for f in FUNCTIONS])
@pytest.mark.parametrize("dtype, rtol", [("float64", 2e-13), ("float32", 3e-7), ("float16", 1e-3)])
def test_values_over_the_whole_range(name: str, x: Any, dtype: str, rtol: float) -> None:
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
        expected = EXACT[name](x.astype(np.float64))
        if name in ("lgamma", "i0"):  # of which SciPy makes NaN
            expected[np.isinf(x)] = INF
        expected = expected.astype(dtype)
    got = evaluate(getattr(Tensor(x), name)())
    assert got.dtype == dtype
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    # beside the zeros of the functions only the absolute error is small
    np.testing.assert_allclose(got[finite], expected[finite], rtol, 1e-13 if dtype == "float64" else 1e-7)


@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_zeros_of_lgamma_keep_their_digits(name: str) -> None:
    x = np.array([1 + 1e-9, 2 - 1e-9, 1.5, 2.5 - 1e-12, 2.5, 0.5, 8.5, 1e-200, 3.25, 100.5])
    mine = evaluate(getattr(Tensor(x), name)())
    exact = [float(mpmath.loggamma(v) if name == "lgamma" else mpmath.digamma(v)) for v in x]
    np.testing.assert_allclose(mine, exact, 1e-13)


@pytest.mark.parametrize("name, peer, x", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_gradients(name: str, peer: Any, x: Any) -> None:
    x = x[np.isfinite(x) & (np.abs(x) < (0.999999 if name == "erfinv" else 30)) & (np.abs(x) > 1e-3)]
    x = x[x != np.floor(x)]
    theirs = torch.from_numpy(x).requires_grad_()
    peer(theirs).sum().backward()
    mine = Tensor(x, requires_grad=True)
    getattr(mine, name)().sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    expected = theirs.grad.numpy()
    # PyTorch's trigamma and i1 are good to ten digits
    np.testing.assert_allclose(evaluate(mine.grad), expected, 2e-8, 1e-9)


def test_second_derivatives() -> None:
    x = np.array([-0.9, -0.3, 0.1, 0.7])
    theirs = torch.from_numpy(x).requires_grad_()
    (slope,) = torch.autograd.grad(torch.erfinv(theirs).sum(), theirs, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), theirs)
    mine = Tensor(x)
    second = mine.erfinv().sum().gradient(mine)[0].sum().gradient(mine)[0]
    np.testing.assert_allclose(evaluate(second), curve.numpy(), 1e-6)


def test_atan2_has_all_signs() -> None:
    a = np.array([0.0, -0.0, 1, -1, INF, -INF, NAN, 3, 1e-310, 1e300, -1e300])
    y, x = (m.copy() for m in np.meshgrid(a, a))
    got, expected = evaluate(Tensor(y).atan2(Tensor(x))), np.arctan2(y, x)
    np.testing.assert_allclose(got, expected, 1e-15)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(expected)[known])
    y, x = RNG.normal(size=(2, 50))
    t, s = (torch.from_numpy(v).requires_grad_() for v in (y, x))
    torch.atan2(t, s).sum().backward()
    assert t.grad is not None and s.grad is not None
    mine = Tensor(y), Tensor(x)
    for got, peer in zip(mine[0].atan2(mine[1]).sum().gradient(*mine), (t.grad, s.grad)):
        np.testing.assert_allclose(evaluate(got), peer.numpy(), 1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_nextafter_and_signbit(dtype: Any) -> None:
    a = np.array([0.0, -0.0, 1, -1, INF, -INF, NAN, 6e-8, 65504], dtype)
    y, x = (m.copy() for m in np.meshgrid(a, a))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(evaluate(Tensor(y).nextafter(Tensor(x))), np.nextafter(y, x))
    np.testing.assert_array_equal(evaluate(Tensor(a).signbit()), np.signbit(a))
    assert evaluate(Tensor([-1, 0, 2]).signbit()).tolist() == [True, False, False]
    assert evaluate(Tensor([True]).signbit()).tolist() == [False]
    with pytest.raises(DTypeError, match="nextafter"):
        Tensor([1]).nextafter(2)


def test_single_operations() -> None:
    x = Tensor([1, 2])
    assert evaluate(x.alu(Ops.ADD, 2)).tolist() == [3, 4]
    assert evaluate((x > 1).alu(Ops.WHERE, Tensor([1.5, 2.5]), 0)).tolist() == [0, 2.5]
    assert evaluate(Tensor([4.0]).alu(Ops.SQRT)).tolist() == [2]
    assert x.ufix(3).shape == () and x.ufix(2.5).dtype is dtypes.float32 and x.ufix(x) is x
    assert evaluate(Tensor.const(3)).item() == 3 and Tensor.const(3, "int8").dtype is dtypes.int8
    assert x.is_param is False and Tensor([1.0]).is_param_().is_param is True
    for bad in (lambda: x.alu(Ops.ADD), lambda: x.alu(Ops.RESHAPE, 1), lambda: x.alu("ADD", 1)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            bad()
    with pytest.raises(ArgumentError):
        Tensor.const([1])


@pytest.mark.parametrize("correction", [0, 1])
def test_covariance(correction: int) -> None:
    x = RNG.normal(size=(3, 8))
    often, weight = RNG.integers(1, 4, 8), RNG.uniform(0.5, 2, 8)
    for f, w in ((None, None), (often, None), (None, weight), (often, weight)):
        mine = Tensor(x).cov(correction, None if f is None else Tensor(f), None if w is None else Tensor(w))
        np.testing.assert_allclose(evaluate(mine), np.cov(x, ddof=correction, fweights=f, aweights=w))
    np.testing.assert_allclose(evaluate(Tensor(x).corrcoef()), np.corrcoef(x), 1e-12)
    np.testing.assert_allclose(evaluate(Tensor(x[0]).cov()), np.cov(x[0]))
    assert evaluate(Tensor(x[0]).corrcoef()).item() == 1
    theirs = torch.from_numpy(x).requires_grad_()
    (theirs.corrcoef() ** 2).sum().backward()
    mine = Tensor(x)
    assert theirs.grad is not None
    got = (mine.corrcoef() ** 2).sum().gradient(mine)[0]
    np.testing.assert_allclose(evaluate(got), theirs.grad.numpy(), 1e-9, 1e-12)
    with pytest.raises(ShapeError):
        Tensor(x).cov(fweights=Tensor([1]))


@pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
@pytest.mark.parametrize("n", [0, 1, 135, 136, 200])
def test_hashes_are_pythons(n: int) -> None:
    data = bytes(range(256))[:n]
    x = Tensor(np.frombuffer(data, np.uint8))
    for name in ("sha3_256", "sha3_512"):
        assert bytes(x.keccak(name).data()) == getattr(hashlib, name)(data).digest()
    assert bytes(x.keccak("shake_128").data()) == hashlib.shake_128(data).digest(16)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
def test_hash_of_rows_and_trees() -> None:
    rows = RNG.integers(0, 256, (2, 3, 20)).astype(np.uint8)
    got = Tensor(rows).keccak().numpy()
    for place in np.ndindex(2, 3):
        assert bytes(got[place]) == hashlib.sha3_256(rows[place].tobytes()).digest()
    data = RNG.integers(0, 256, 4200).astype(np.uint8).tobytes()

    def leaf(b: bytes) -> bytes:
        return hashlib.shake_128(b).digest(16)

    padded = data + bytes(-len(data) % 4096)
    inner = b"".join(leaf(padded[i : i + 4096]) for i in range(0, len(padded), 4096))
    assert bytes(Tensor(data).hash().data()) == leaf(inner + len(data).to_bytes(8, "little"))
    assert bytes(Tensor([1.5]).hash().data()) == leaf(np.float32(1.5).tobytes() + (4).to_bytes(8, "little"))
    with pytest.raises(ArgumentError):
        Tensor(data).keccak("md5")
    with pytest.raises(DTypeError):
        Tensor([1]).keccak()
