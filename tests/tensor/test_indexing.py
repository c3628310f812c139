"""Brackets, gather, scatter and masks against NumPy and PyTorch."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate as numpy_of
from whit.helpers import ArgumentError, DTypeError, IndexingError, ShapeError
from whit.tensor import Tensor
from whit.uop import Ops, UOp

few = settings(max_examples=150, deadline=None)


@st.composite
def slices(draw: Any, size: int) -> slice:
    bound = st.none() | st.integers(-size - 2, size + 2)
    step = draw(st.none() | st.integers(-4, 4).filter(bool))
    return slice(draw(bound), draw(bound), step)


@st.composite
def indexed(draw: Any) -> tuple[tuple[int, ...], Any, Any]:
    """(shape, index for NumPy, the same index for whit)."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    common = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    for_numpy: list[Any] = []
    for_whit: list[Any] = []
    used_ellipsis = False
    axis = 0
    while axis < len(shape):
        size = shape[axis]
        kinds = ["slice", "slice", "new", "stop"]
        kinds += [] if used_ellipsis else ["ellipsis"]
        kinds += ["int", "tensor", "tensor", "list", "mask", "array"] if size else []
        kind = draw(st.sampled_from(kinds))
        if kind == "stop":
            break
        if kind == "ellipsis":
            used_ellipsis = True
            axis += draw(st.integers(0, len(shape) - axis))
            rest = len(shape) - axis
            for_numpy.append(...)
            for_whit.append(...)
            tail = [draw(slices(shape[len(shape) - rest + i])) for i in range(rest)]
            for_numpy += tail
            for_whit += tail
            break
        if kind == "new":
            for_numpy.append(None)
            for_whit.append(None)
            if len(for_numpy) > 7:
                break
            continue
        if kind == "slice":
            for_numpy.append(draw(slices(size)))
            for_whit.append(for_numpy[-1])
        elif kind == "int":
            for_numpy.append(draw(st.integers(-size, size - 1)))
            for_whit.append(for_numpy[-1])
        elif kind == "mask":
            mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
            others = any(isinstance(item, np.ndarray) and item.ndim for item in for_numpy)
            fits = not others if common in ((), (1,)) else int(mask.sum()) in (1, common[-1])
            if not fits:
                mask = np.arange(size) == 0
            for_numpy.append(mask)
            for_whit.append(mask if draw(st.booleans()) else mask.tolist())
            common = common or (1,)
            if mask.sum() != 1:
                common = (1,)  # later arrays must broadcast with it
        else:
            values = np.array(draw(st.lists(st.integers(-size, size - 1), min_size=int(np.prod(common)),
                                            max_size=int(np.prod(common))))).reshape(common)
            for_numpy.append(values)
            dtype = draw(st.sampled_from([np.int8, np.int32, np.int64]))
            for_whit.append({"tensor": lambda v=values, d=dtype: Tensor(v.astype(d)),
                             "array": lambda v=values: v,
                             "list": lambda v=values: v.tolist()}[kind]())
        axis += 1
    return shape, tuple(for_numpy), tuple(for_whit)


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int32).reshape(shape)


@few
@given(indexed())
def test_getitem_is_numpys(case: Any) -> None:
    shape, for_numpy, for_whit = case
    x = numbered(shape)
    try:
        expected = x[for_numpy]
    except IndexError:
        with pytest.raises((IndexingError, ShapeError)):
            Tensor(x)[for_whit]
        return
    got = Tensor(x)[for_whit]
    assert got.shape == expected.shape
    np.testing.assert_array_equal(numpy_of(got), expected)


@few
@given(indexed(), st.booleans(), st.booleans())
def test_setitem_is_numpys(case: Any, lazily: bool, scalar: bool) -> None:
    shape, for_numpy, for_whit = case
    x = numbered(shape)
    before = Tensor(x) * 1 if lazily else Tensor(x)
    tensor = Tensor(before.uop)
    try:
        place = x[for_numpy].shape
    except IndexError:
        return
    value: Any = 77 if scalar else -np.arange(1, int(np.prod(place)) + 1, dtype=np.int32).reshape(place)
    expected = x.copy()
    expected[for_numpy] = value
    tensor[for_whit] = value
    np.testing.assert_array_equal(numpy_of(tensor), expected)
    np.testing.assert_array_equal(numpy_of(before), x)


def test_the_two_kinds_of_write() -> None:
    stored = Tensor([[1, 2, 3, 4], [4, 5, 6, 7]])
    stored[1, ::2] = 0
    assert any(node.op is Ops.AFTER for node in stored.uop.toposort())
    lazy = Tensor([[1, 2, 3], [4, 5, 6]]) + 1
    lazy[1, ::2] = 0
    assert not any(node.op is Ops.AFTER for node in lazy.uop.toposort())
    assert numpy_of(stored).tolist() == [[1, 2, 3, 4], [0, 5, 0, 7]]
    assert numpy_of(lazy).tolist() == [[2, 3, 4], [0, 6, 0]]


def test_writes_in_sequence_and_from_itself() -> None:
    x = Tensor([1, 2, 3, 4, 5])
    view = x[1:4]
    x[0] = 10
    x[1:] = x[:-1]
    assert numpy_of(x).tolist() == [10, 10, 2, 3, 4]
    assert numpy_of(view).tolist() == [2, 3, 4]


def test_writes_to_constants_and_views() -> None:
    x = Tensor.zeros(2, 3)
    x[:, 1] = 5
    assert numpy_of(x).tolist() == [[0, 5, 0], [0, 5, 0]]
    base = Tensor([[1, 2], [3, 4]])
    row = base[0]
    row[1] = 9
    assert numpy_of(row).tolist() == [1, 9] and numpy_of(base).tolist() == [[1, 2], [3, 4]]


def test_last_write_wins() -> None:
    x = Tensor([0, 0, 0])
    x[Tensor([1, 1, 0])] = Tensor([5, 6, 7])
    assert numpy_of(x).tolist() == [7, 6, 0]


def test_masked_writes() -> None:
    x = Tensor([[1, 2], [3, 4]])
    x[x > 2] = 0
    assert numpy_of(x).tolist() == [[1, 2], [0, 0]]
    x[Tensor([False, True])] = Tensor([8, 9])
    assert numpy_of(x).tolist() == [[1, 2], [8, 9]]
    with pytest.raises(ShapeError, match="broadcast"):
        x[x > 2] = Tensor([1, 2, 3])
    x[x > 2] = Tensor([1, 2])
    assert numpy_of(x).tolist() == [[1, 2], [1, 2]]


def test_out_of_range_tensors_read_zero() -> None:
    x = Tensor([[1, 2], [3, 4]])
    assert numpy_of(x[Tensor([-3, -1, 2])]).tolist() == [[0, 0], [3, 4], [0, 0]]
    assert numpy_of(x[Tensor([0, 0]), Tensor([2, -2])]).tolist() == [0, 1]


def test_variables_index_and_slice() -> None:
    x = np.arange(12).reshape(4, 3)
    i = UOp.variable("i", 0, 3).bind(2)
    n = UOp.variable("n", 1, 4).bind(3)
    t = Tensor(x)
    assert numpy_of(t[i]).tolist() == x[2].tolist()
    assert numpy_of(t[:n]).tolist() == x[:3].tolist()
    assert numpy_of(t[n - 1:, 0]).tolist() == x[2:, 0].tolist()
    assert numpy_of(t[:n][-1]).tolist() == x[2].tolist()
    t[n:] = 0
    expected = x.copy()
    expected[3:] = 0
    assert numpy_of(t).tolist() == expected.tolist()
    with pytest.raises(IndexingError):
        t[UOp.variable("j", 0, 9).bind(7)]
    with pytest.raises(IndexingError):
        t[:UOp.variable("j", 0, 9).bind(7)]


@pytest.mark.parametrize("index, error", [
    (3, IndexingError), (-4, IndexingError), ((0, 0, 0), IndexingError), ((..., ...), IndexingError),
                                          ("a", IndexingError),
    (1.5, IndexingError), ([0, 3], IndexingError), ([[0], [1, 2]], IndexingError),
                                          ([True, False], IndexingError),
    (slice(0, 1, 0), IndexingError), ([True, 1], IndexingError), (np.array([0.5]), IndexingError),
])
def test_bad_indices(index: Any, error: type[Exception]) -> None:
    x = Tensor(np.zeros((3, 2), np.float32))
    with pytest.raises(error):
        x[index]


def test_bad_tensors() -> None:
    x = Tensor(np.zeros((3, 2), np.float32))
    with pytest.raises(IndexingError, match="integers"):
        x[Tensor([0.0])]
    with pytest.raises(ShapeError, match="broadcast"):
        x[0] = [1, 2, 3]
    with pytest.raises(IndexingError, match="shapes"):
        x[[0, 1], [0, 1, 1]]


# ---- gather and scatter ------------------------------------------------------------------------------------


@st.composite
def along(draw: Any) -> tuple[np.ndarray[Any, Any], int, np.ndarray[Any, Any]]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    index_shape = [draw(st.integers(0 if i == dim else 1, 5 if i == dim else n)) for i, n in enumerate(shape)]
    count = int(np.prod(index_shape))
    index = np.array(draw(st.lists(st.integers(0, shape[dim] - 1), min_size=count, max_size=count)), np.int64)
    dtype = draw(st.sampled_from([np.float32, np.int32, np.float64]))
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype) + 1, dim, index.reshape(index_shape)


@few
@given(along())
def test_gather_is_torchs(case: Any) -> None:
    x, dim, index = case
    expected = torch.gather(torch.from_numpy(x), dim, torch.from_numpy(index)).numpy()
    np.testing.assert_array_equal(numpy_of(Tensor(x).gather(dim, Tensor(index))), expected)


@few
@given(along(), st.sampled_from(["sum", "prod", "mean", "amax", "amin"]), st.booleans())
def test_scatter_reduce_is_torchs(case: Any, reduce: str, include_self: bool) -> None:
    x, dim, index = case
    source = (np.arange(index.size).reshape(index.shape) + 2).astype(x.dtype)
    expected = torch.from_numpy(x).scatter_reduce(dim, torch.from_numpy(index), torch.from_numpy(source),
                                                  reduce,
                                                  include_self=include_self).numpy()
    got = Tensor(x).scatter_reduce(dim, Tensor(index), Tensor(source), reduce, include_self)
    np.testing.assert_allclose(numpy_of(got), expected, rtol=1e-6)


@few
@given(along(), st.booleans())
def test_scatter_keeps_the_last(case: Any, scalar: bool) -> None:
    x, dim, index = case
    source = -(np.arange(index.size).reshape(index.shape) + 2).astype(x.dtype)
    expected = x.copy()
    for place in np.ndindex(*index.shape):
        target = list(place)
        target[dim] = int(index[place])
        expected[tuple(target)] = 5 if scalar else source[place]
    got = Tensor(x).scatter(dim, Tensor(index), 5 if scalar else Tensor(source))
    np.testing.assert_array_equal(numpy_of(got), expected)


@few
@given(along())
def test_index_add_copy_select(case: Any) -> None:
    x, dim, index = case
    row = index.reshape(-1)[:3]
    shape = list(x.shape)
    shape[dim] = len(row)
    source = np.arange(int(np.prod(shape))).reshape(shape).astype(x.dtype)
    t, i, s = torch.from_numpy(x), torch.from_numpy(row), torch.from_numpy(source)
    np.testing.assert_allclose(numpy_of(Tensor(x).index_add(dim, Tensor(row), Tensor(source), alpha=2)),
                               t.index_add(dim, i, s, alpha=2).numpy())
    np.testing.assert_array_equal(numpy_of(Tensor(x).index_select(dim, Tensor(row))),
                                  t.index_select(dim, i).numpy())
    expected = x.copy()
    for k, target in enumerate(row):
        np.moveaxis(expected, dim, 0)[target] = np.moveaxis(source, dim, 0)[k]
    np.testing.assert_array_equal(numpy_of(Tensor(x).index_copy(dim, Tensor(row), Tensor(source))), expected)


def test_take_and_along_dim() -> None:
    x = np.array([[3, 1, 2], [9, 7, 8]])
    order = np.argsort(x, 1)
    np.testing.assert_array_equal(numpy_of(Tensor(x).take_along_dim(Tensor(order), 1)),
                                  np.take_along_axis(x, order, 1))
    np.testing.assert_array_equal(numpy_of(Tensor(x).take_along_dim(Tensor(order[:1]), 1)),
                                  np.take_along_axis(x, order[:1], 1))
    np.testing.assert_array_equal(numpy_of(Tensor(x).take(Tensor([5, -6]))), np.take(x, [5, -6]))
    np.testing.assert_array_equal(numpy_of(Tensor(x).take([2, 0], axis=1)), np.take(x, [2, 0], 1))
    expected = x.copy()
    np.put_along_axis(expected, order[:, :1], 0, 1)
    np.testing.assert_array_equal(numpy_of(Tensor(x).put_along_dim(Tensor(order[:, :1]), 0, 1)), expected)


def test_one_hot_and_masks() -> None:
    labels = np.array([[0, 2], [1, 5]], np.uint8)
    np.testing.assert_array_equal(numpy_of(Tensor(labels).one_hot(3)),
                                  np.eye(6, dtype=np.int32)[labels][..., :3])
    x = Tensor([1.0, 2.0])
    assert numpy_of(x.masked_fill(x > 1, -1)).tolist() == [1.0, -1.0]


def test_calls_whose_size_depends_on_values() -> None:
    x = np.array([[3, 0, 5], [0, 7, 0]], np.int32)
    np.testing.assert_array_equal(numpy_of(Tensor(x).masked_select(Tensor(x) > 3)), x[x > 3])
    columns = Tensor(x).masked_select(Tensor([True, False, True]))
    np.testing.assert_array_equal(numpy_of(columns), x[:, [0, 2]].ravel())
    np.testing.assert_array_equal(numpy_of(Tensor(x).nonzero()), np.argwhere(x))
    assert Tensor(x * 0).nonzero().shape == (0, 2)
    np.testing.assert_array_equal(numpy_of(Tensor([0, 2]).one_hot()), np.eye(3, dtype=np.int32)[[0, 2]])


def test_bad_gathers() -> None:
    x = Tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeError, match="rank"):
        x.gather(1, Tensor([0]))
    with pytest.raises(ShapeError, match="longer"):
        x.gather(1, Tensor([[0], [0], [0]]))
    with pytest.raises(DTypeError):
        x.gather(1, Tensor([[0.0]]))
    with pytest.raises(ArgumentError):
        x.scatter(1, Tensor([[0]]), 1.0, reduce="max")
    with pytest.raises(ShapeError, match="source"):
        x.scatter(1, Tensor([[0, 1]]), Tensor([[1.0]]))
    with pytest.raises(DTypeError, match="one dtype"):
        x.scatter(1, Tensor([[0]]), Tensor([[1]]))
    with pytest.raises(ShapeError):
        x.index_add(0, Tensor([0, 1]), Tensor([[1.0]]))


def test_index_arrays_on_symbolic_axes() -> None:
    x = np.arange(12).reshape(4, 3)
    rows = Tensor(x)[:UOp.variable("n", 1, 4).bind(3)]
    assert numpy_of(rows[Tensor([0, -1])]).tolist() == x[:3][[0, -1]].tolist()
    assert numpy_of(rows[[0, -1], [2, 1]]).tolist() == x[:3][[0, -1], [2, 1]].tolist()
    assert numpy_of(rows.gather(0, Tensor([[2, 0, 1]]))).tolist() == [[x[2, 0], x[0, 1], x[1, 2]]]
