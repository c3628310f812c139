"""Products against NumPy."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate as numpy_of
from whit.helpers import ArgumentError, ShapeError
from whit.tensor import Tensor
from whit.uop import dtypes

few = settings(max_examples=80, deadline=None)
rng = np.random.default_rng(0)
sizes = st.integers(0, 4)


def values(shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
    return rng.integers(-4, 5, shape).astype(dtype)


@st.composite
def matmul_shapes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    k = draw(sizes)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    left_batch = [draw(st.sampled_from([1, n])) for n in batch]
    right_batch = [draw(st.sampled_from([1, n])) for n in batch][draw(st.integers(0, len(batch))):]
    left = (k,) if draw(st.booleans()) and not batch else (*left_batch, draw(sizes), k)
    right = (k,) if draw(st.booleans()) else (*right_batch, k, draw(sizes))
    return left, right


@few
@given(matmul_shapes(), st.sampled_from([np.float64, np.float32, np.int32, np.int8, np.bool_]))
def test_matmul_is_numpys(shapes: Any, dtype: Any) -> None:
    a, b = values(shapes[0], dtype), values(shapes[1], dtype)
    got = Tensor(a) @ Tensor(b)
    expected = np.matmul(a, b)
    assert got.shape == expected.shape and numpy_of(got).dtype == expected.dtype
    np.testing.assert_array_equal(numpy_of(got), expected)
    np.testing.assert_array_equal(numpy_of(Tensor(a).dot(b)), expected)


def test_narrow_floats_accumulate_in_float32() -> None:
    a = rng.standard_normal((3, 4000)).astype(np.float16)
    b = rng.standard_normal((4000, 2)).astype(np.float16)
    expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    np.testing.assert_allclose(numpy_of(Tensor(a) @ Tensor(b)).astype(float), expected.astype(float),
                               rtol=1e-3)
    c, d = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    expected = (c.astype(np.float64) @ d.astype(np.float64)).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(numpy_of(Tensor(c) @ Tensor(d)).astype(float), expected.astype(float),
                               rtol=1e-2)
    assert (Tensor(a).matmul(Tensor(b), dtype=dtypes.float32)).dtype is dtypes.float32
    assert (Tensor(a) @ Tensor(b.astype(np.float32))).dtype is dtypes.float32


@pytest.mark.parametrize("formula, shapes", [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("ba", [(2, 3)]), ("ii", [(3, 3)]),
                                             ("ii->i", [(3, 3)]),
    ("ijij->ji", [(2, 3, 2, 3)]), ("i,j->ij", [(2,), (3,)]), ("i,i->", [(3,), (3,)]), ("ij->", [(2, 3)]),
                                             ("ij->j", [(2, 3)]),
    ("...ij,...jk->...ik", [(2, 1, 2, 3), (5, 3, 4)]), ("...ii->...i", [(2, 3, 3)]),
                                             ("i...->...", [(2, 3, 4)]),
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,ij,ij->i", [(2, 3), (2, 3), (2, 3)]), ("abc,bad->dc", [(2, 3, 4), (3, 2, 5)]),
                                             ("ij,jk->k", [(2, 3), (3, 4)]),
    ("a...b,b...->a...", [(2, 3, 4), (4, 3)]), (" i j , j -> i ", [(2, 3), (3,)]),
                                             ("ij,k->ij", [(2, 3), (4,)]),
    ("...,...", [(2, 3), (3,)]), ("xi,xi,yi->yx", [(2, 3), (2, 3), (4, 3)]),
])
def test_einsum_is_numpys(formula: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [values(shape) for shape in shapes]
    got = Tensor.einsum(formula, *[Tensor(a) for a in operands])
    np.testing.assert_array_equal(numpy_of(got), np.einsum(formula, *operands))


@few
@given(st.data())
def test_random_einsums(data: Any) -> None:
    size = {label: data.draw(st.integers(1, 3)) for label in "abcd"}
    terms = data.draw(st.lists(st.text("abcd", min_size=1, max_size=3), min_size=1, max_size=3))
    used = sorted(set("".join(terms)))
    out = "".join(data.draw(st.permutations(used))[:data.draw(st.integers(0, len(used)))])
    operands = [values(tuple(size[label] for label in term)) for term in terms]
    formula = ",".join(terms) + "->" + out
    np.testing.assert_array_equal(numpy_of(Tensor.einsum(formula, *[Tensor(a) for a in operands])),
                                  np.einsum(formula, *operands))


def test_outer_inner_tensordot() -> None:
    a, b = values((2, 3, 4)), values((4, 3, 5))
    np.testing.assert_array_equal(numpy_of(Tensor(a).tensordot(Tensor(b), 1)), np.tensordot(a, b, 1))
    np.testing.assert_array_equal(numpy_of(Tensor(a).tensordot(Tensor(b), ([1, 2], [1, 0]))),
                                  np.tensordot(a, b, ([1, 2], [1, 0])))
    np.testing.assert_array_equal(numpy_of(Tensor(a).tensordot(Tensor(b), 0)), np.tensordot(a, b, 0))
    c = values((2, 5, 4))
    np.testing.assert_array_equal(numpy_of(Tensor(a).inner(Tensor(c))), np.inner(a, c))
    np.testing.assert_array_equal(numpy_of(Tensor(a).outer(Tensor(c))), np.outer(a, c))
    np.testing.assert_array_equal(numpy_of(Tensor(a[0, 0]).inner(Tensor(c[0, 0]))),
                                  np.inner(a[0, 0], c[0, 0]))


@pytest.mark.parametrize("offset", [-4, -1, 0, 2, 5])
def test_trace(offset: int) -> None:
    a = values((3, 4, 5), np.int32)
    np.testing.assert_array_equal(numpy_of(Tensor(a).trace(offset)), np.trace(a, offset))
    np.testing.assert_array_equal(numpy_of(Tensor(a).trace(offset, 2, 0)), np.trace(a, offset, 2, 0))


def test_kron_cross_norm() -> None:
    a, b = values((2, 3)), values((4, 2, 2))
    np.testing.assert_array_equal(numpy_of(Tensor(a).kron(Tensor(b))), np.kron(a, b))
    c, d = values((4, 3)), values((1, 3))
    np.testing.assert_array_equal(numpy_of(Tensor(c).cross(Tensor(d))), np.cross(c, d))
    np.testing.assert_array_equal(numpy_of(Tensor(c.T).cross(Tensor(d.T), 0)), np.cross(c, d).T)
    for order in (0, 1, 2, 3.5, np.inf, -np.inf):
        np.testing.assert_allclose(numpy_of(Tensor(b).norm(order, 1)), np.linalg.norm(b, order, 1))
    np.testing.assert_allclose(numpy_of(Tensor(b).norm()), np.linalg.norm(b))
    np.testing.assert_allclose(numpy_of(Tensor(b).norm(2, (0, 2), keepdim=True)),
                               np.sqrt((b * b).sum((0, 2), keepdims=True)))
    with pytest.raises(ShapeError):
        Tensor(a).cross(Tensor(a), 0)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 3)])
def test_newton_schulz_orthogonalises(shape: tuple[int, ...]) -> None:
    x = rng.standard_normal(shape)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    # the classical iteration converges to the polar factor
    got = numpy_of(Tensor(x).newton_schulz(40, (1.5, -0.5)))
    np.testing.assert_allclose(got, u @ v, atol=1e-5)


def test_linear() -> None:
    x, w, b = values((2, 3)), values((3, 4)), values((4,))
    np.testing.assert_array_equal(numpy_of(Tensor(x).linear(Tensor(w), Tensor(b))), x @ w + b)
    np.testing.assert_array_equal(numpy_of(Tensor(x).linear(Tensor(w[:, 0]))), x * w[:, 0])


def test_bad_products() -> None:
    a, b = Tensor(values((2, 3))), Tensor(values((2, 3)))
    with pytest.raises(ShapeError, match="last axis of left"):
        a @ b
    with pytest.raises(ShapeError, match="scalar"):
        a @ 2.0
    with pytest.raises(ShapeError, match="batch"):
        Tensor(values((2, 2, 3))) @ Tensor(values((3, 3, 1)))
    with pytest.raises(ArgumentError):
        Tensor.einsum("ij->k", a)
    with pytest.raises(ArgumentError):
        Tensor.einsum("ij,jk", a)
    with pytest.raises(ShapeError):
        Tensor.einsum("ijk", a)
    with pytest.raises(ShapeError, match="one size"):
        Tensor.einsum("ii", a)
    with pytest.raises(ShapeError):
        Tensor.einsum("ij,jk->ik", a, b)
    with pytest.raises(ShapeError):
        a.tensordot(b, ([0], [1]))
